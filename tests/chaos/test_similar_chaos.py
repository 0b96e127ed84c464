"""Worlds in which KV of similar prompts stands in: they keep their promises, and faults planted in the core and in the
workers' machines are found there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from halfmoon.conductor.core.placement import similar
from halfmoon.conductor.core.state.similar_index import KnownPrompt, SimilarIndex
from halfmoon.schemas.keys import split_keys
from halfmoon.store.kv_arrival import KvArrival
from halfmoon.workers.decode import orders as decode_orders
from halfmoon.workers.prefill import job
from halfmoon.workers.prefill.events import ReferenceLost
from halfmoon.workers.prefill.reference_job import ReferenceJob
from tests.chaos.searching import fails, shows


def test_worlds_keep_their_promises() -> None:
    wanted = [
        "similar prompts stood in",
        "references lost",
        "prompts with tokens left out",
        "documents stood in",
    ]
    shows(wanted, "similar")


def anybodys_prompt_stands_in(self: Any, tenant: str, sketch: bytes, least: int) -> Iterator[tuple[int, Any]]:
    prompts = dict.fromkeys(prompt.tenant for prompt in self.prompts.values())
    found: list[tuple[int, KnownPrompt]] = [
        one for each in prompts for one in whole_like(self, each, sketch, least)
    ]
    return iter(found)


def no_block_is_known_again(block_keys: bytes) -> list[bytes]:
    numbers = itertools.count()
    return [key + next(numbers).to_bytes(2, "big") + block_keys for key in split_keys(block_keys)]


def anybodys_document_stands_in(self: Any, tenant: str, name: bytes) -> Any:
    return self.documents.get(name.hex())


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


def blocks_that_were_left_out_are_waited_for(self: Any, blocks: int) -> None:
    pass


whole_like = SimilarIndex.like
whole_shares, whole_step = decode_orders.shares_generated, ReferenceJob.step
PLANTED = [
    (SimilarIndex, "like", anybodys_prompt_stands_in, "I117 "),
    (SimilarIndex, "document", anybodys_document_stands_in, "I117 "),
    (similar, "split_keys", no_block_is_known_again, "I122 "),
    (job, "shared_keys", what_stood_in_has_keys, "I99 "),
    (decode_orders, "shares_generated", what_is_generated_behind_it_is_shared, "I118 "),
    (KvArrival, "expect", blocks_that_were_left_out_are_waited_for, "I63 |I87 "),
    (ReferenceJob, "step", who_computes_is_not_told_that_it_is_lost, "I87 orders at [pd]|I87 .*held at n-p"),
]

#: Several worlds are played before.
FOUND_LATE = who_computes_is_not_told_that_it_is_lost


@pytest.mark.parametrize(
    ("owner", "name", "fault", "match"),
    [pytest.param(*one, marks=[pytest.mark.slow] if one[2] is FOUND_LATE else []) for one in PLANTED],
    ids=[one[2].__name__ for one in PLANTED],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, match: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    fails(match, "similar")
