"""Worlds in which KV of similar prompts stands in: one keeps its promises, and faults planted in the workers' machines
are found there, from the seed named on.
"""

from __future__ import annotations

from typing import Any

import pytest

from halfmoon.workers.decode import orders as decode_orders
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.prefill import job
from halfmoon.workers.prefill.events import ReferenceLost
from halfmoon.workers.prefill.reference_job import ReferenceJob
from tests.chaos.test_chaos import fails
from tests.chaos.world import World

#: Much stands in here, and some references are lost on the way.
ALIKE = 54
SEEN = ("similar prompts stood in", "references lost", "tokens left out")


def test_a_world_keeps_its_promises() -> None:
    world = World(ALIKE)
    world.run()
    assert all(world.net.counts[what] > 0 for what in SEEN), world.net.counts


def what_stood_in_has_keys(order: Any, reply: Any) -> Any:
    return reply.block_keys


def what_is_generated_behind_it_is_shared(sequence: Any, layout: Any) -> bool:
    result = sequence.result
    sequence.result = None
    shared = bool(whole_shares(sequence, layout))
    sequence.result = result
    return shared


def who_computes_is_not_told_that_it_is_lost(self: Any, event: Any, out: Any, *, computing: bool) -> None:
    if not isinstance(event, ReferenceLost):
        whole_step(self, event, out, computing=computing)


def length_counts_what_was_left_out(self: DecodeSequence) -> int:
    return len(self.prompt) + len(self.output) - 1


whole_shares, whole_step = decode_orders.shares_generated, ReferenceJob.step
PLANTED = [
    (job, "shared_keys", what_stood_in_has_keys, "committed without its bytes"),
    (decode_orders, "shares_generated", what_is_generated_behind_it_is_shared, "shares what it was not"),
    (DecodeSequence, "length", property(length_counts_what_was_left_out), "KV of somebody else"),
    (ReferenceJob, "step", who_computes_is_not_told_that_it_is_lost, "orders at [pd]|held at n-p"),
]


@pytest.mark.parametrize(("owner", "name", "fault", "match"), PLANTED, ids=[one[1] for one in PLANTED])
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, match: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    fails(ALIKE, match)
