"""Worlds that lend, move KV or have attention workers: holders that are slow, caches split by sequence, conductors that
die of a move that they ordered. Faults planted in what answers to these are found there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from halfmoon.conductor.core import machine, moves
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement import parts
from halfmoon.schemas.lending import KvPart
from halfmoon.workers.decode.lenders import Lenders
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.decode.step_times import PlaceTimes
from tests.chaos.conductors import Conductor
from tests.chaos.searching import fails, shows
from tests.chaos.wishes import Feature


@pytest.mark.parametrize(
    ("seen", "wants"),
    [
        (
            ["moves whose planners all died", "moves whose planner died", "KvMoved"],
            ["planner deaths"],
        ),
        (["slow ones marked", "steps split by sequence"], ["splits", "slow holders"]),
        pytest.param(["steps split by sequence", "resumed elsewhere"], ["splits"], marks=pytest.mark.slow),
    ],
)
def test_worlds_keep_their_promises(seen: list[str], wants: list[Feature]) -> None:
    shows(seen, *wants)


def none_is_slow(*_: Any) -> None:
    """Whatever was said."""


def whoever_is_a_little_quicker_is_well(state: Any, owner: Any, event: Any) -> None:
    whole_judge(state, owner, event)
    for seen in event.places:
        place = state.workers.get(seen.worker_id)
        if place is not None and seen.waited_ns * 100 < seen.expected_ns * state.policy.slow_place_percent:
            place.holds.slow_by.pop(owner.worker_id, None)


def nobody_is_told_of_waits(self: PlaceTimes) -> list[Any]:
    return []


def what_was_decided_before_counts_as_published(self: Conductor) -> None:
    whole_start(self)
    self.floor = (self.net.log[-1].seq if self.net.log else 0, 1_000)


def a_move_is_not_in_the_snapshot(snapshot: bytes, *, checked: bool = False) -> Core:
    core = whole_restore(snapshot, checked=checked)
    for order in core.state.orders.values():
        order.decode.move = None
    return core


def the_end_begins_a_block_too_early(self: DecodeSequence, part: KvPart) -> range:
    blocks = whole_blocks(self, part)
    return range(max(0, blocks.start - part.grows), blocks.stop)


def a_part_is_asked_for_by_the_first_keys(
    self: Lenders, sequence: Any, part: Any, after_ns: int, out: list[Any]
) -> None:
    whole_ask(self, sequence, part, after_ns, out)
    request = out[-1].request
    blocks = sequence.blocks_of(part)
    end = max(1, blocks.stop)
    keys = request.block_keys[: len(request.block_keys) * len(blocks) // end]
    request = msgspec.structs.replace(request, first_block=0, block_keys=keys)
    out[-1] = msgspec.structs.replace(out[-1], request=request)


whole_judge, whole_start, whole_restore = machine.judge_places, Conductor.start, Core.restore
whole_blocks, whole_ask = DecodeSequence.blocks_of, Lenders._ask
PLANTED: list[tuple[Any, str, Callable[..., Any], tuple[Feature, ...], str]] = [
    (
        Conductor,
        "start",
        what_was_decided_before_counts_as_published,
        ("planner deaths",),
        "I85 ",
    ),
    (
        Core,
        "restore",
        staticmethod(a_move_is_not_in_the_snapshot),
        ("planner deaths",),
        "I33 |I83 ",
    ),
    (moves, "slow_mark", none_is_slow, ("moves", "slow holders"), "I93 moves"),
    (parts, "slow_mark", none_is_slow, ("attention", "slow holders"), "I93 placed"),
    (parts, "slow_mark", none_is_slow, ("lending", "slow holders"), "I93 placed"),
    (
        machine,
        "judge_places",
        whoever_is_a_little_quicker_is_well,
        ("attention", "slow holders"),
        "I92 slow and not marked",
    ),
    (PlaceTimes, "take", nobody_is_told_of_waits, ("attention", "slow holders"), "I92 slow, and nobody"),
    (DecodeSequence, "blocks_of", the_end_begins_a_block_too_early, ("splits",), "I101 parts"),
    (
        Lenders,
        "_ask",
        a_part_is_asked_for_by_the_first_keys,
        ("splits",),
        "I96 attends",
    ),
    (parts, "free_blocks", lambda worker: worker.kv_blocks, ("splits",), "I34 "),
]

#: Of every third, which block; this one is found after dozens of worlds.
FOUND_LATE = nobody_is_told_of_waits


@pytest.mark.parametrize(
    ("owner", "name", "fault", "wants", "match"),
    [
        pytest.param(*planted, marks=[pytest.mark.slow] if number % 3 or planted[2] is FOUND_LATE else [])
        for number, planted in enumerate(PLANTED)
    ],
    ids=[f"{p[0].__name__.rsplit('.', 1)[-1]}.{p[1]}" for p in PLANTED],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, wants: tuple[Feature, ...], match: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    fails(match, *wants)
