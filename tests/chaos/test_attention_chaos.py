"""Worlds that lend, move KV or have attention workers: holders that are slow, caches split by sequence, conductors that
die of a move that they ordered. Faults planted in what answers to these are found there, from the seed named on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from halfmoon.conductor.core import admission, machine, moves, orders
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement import cache_places, lending
from halfmoon.conductor.core.state.core_state import State
from halfmoon.workers.decode.lenders import Lenders
from halfmoon.workers.decode.lent_parts import CachePart
from halfmoon.workers.decode.place_times import PlaceTimes
from tests.chaos.conductors import Conductor
from tests.chaos.test_chaos import fails
from tests.chaos.world import World

#: Conductors die of moves that they order; holders are slow; contexts are split by sequence.
PLANNERS_DIE, SLOW, SPLIT = 1, 62, 27
#: Requests wait for room that is lent.
ROOM, TURNS = 58, 4


@pytest.mark.parametrize(
    ("seed", "seen"),
    [
        (PLANNERS_DIE, ["moves whose planners all died", "moves whose planner died", "KvMoved"]),
        (SLOW, ["slow ones marked", "steps split by sequence"]),
        (ROOM, ["waited for room", "room after waiting"]),
        pytest.param(SPLIT, ["steps split by sequence", "resumed elsewhere"], marks=pytest.mark.slow),
    ],
)
def test_a_world_keeps_its_promises(seed: int, seen: list[str]) -> None:
    world = World(seed)
    world.run()
    assert all(world.net.counts[what] > 0 for what in seen), world.net.counts


def none_is_slow(*_: Any) -> None:
    """Whatever was said."""


def whoever_is_a_little_quicker_is_well(state: Any, owner: Any, event: Any) -> None:
    whole_judge(state, owner, event)
    for seen in event.places:
        place = state.workers.get(seen.worker_id)
        if place is not None and seen.waited_ns * 100 < seen.expected_ns * state.policy.slow_place_percent:
            place.slow_by.pop(owner.worker_id, None)


def nobody_is_told_of_waits(self: PlaceTimes) -> list[Any]:
    return []


def what_was_decided_before_counts_as_published(self: Conductor) -> None:
    whole_start(self)
    self.floor = (self.net.log[-1].seq if self.net.log else 0, 1_000)


def a_move_is_not_in_the_snapshot(snapshot: bytes, *, checked: bool = False) -> Core:
    core = whole_restore(snapshot, checked=checked)
    for order in core.state.orders.values():
        order.move = None
    return core


def the_end_begins_a_block_too_early(self: CachePart, *args: Any) -> None:
    whole_part(self, *args)
    if self.grows and self.first_block:
        self.first_block, self.blocks = self.first_block - 1, self.blocks + 1


def a_part_is_asked_for_by_the_first_keys(
    self: Lenders, sequence: Any, part: Any, after_ns: int, out: list[Any]
) -> None:
    whole_ask(self, sequence, part, after_ns, out)
    request = out[-1].request
    keys = request.block_keys[: len(request.block_keys) * part.blocks // (part.first_block + part.blocks)]
    request = msgspec.structs.replace(request, first_block=0, block_keys=keys)
    out[-1] = msgspec.structs.replace(out[-1], request=request)


def the_newest_goes_first(state: Any, request: Any, wait_ns: int, out: Any) -> None:
    whole_wait(state, request, wait_ns, out)
    state.line = dict.fromkeys([request.event.request_id, *state.line], True)


whole_wait = orders.wait_for_room
whole_judge, whole_start, whole_restore = machine.judge_places, Conductor.start, Core.restore
whole_part, whole_ask = CachePart.__init__, Lenders._ask
PLANTED: list[tuple[Any, str, Callable[..., Any], int, str]] = [
    (Conductor, "start", what_was_decided_before_counts_as_published, 41, "and never published"),
    (Core, "restore", staticmethod(a_move_is_not_in_the_snapshot), 442, "lent and not borrowed|differently"),
    (moves, "slow_mark", none_is_slow, 442, "moves to a slow one"),
    (cache_places, "slow_mark", none_is_slow, SLOW, "placed at a slow one"),
    (lending, "slow_mark", none_is_slow, 1881, "placed at a slow one"),
    (machine, "judge_places", whoever_is_a_little_quicker_is_well, 61, "slow and not marked"),
    (PlaceTimes, "take", nobody_is_told_of_waits, SLOW, "slow, and nobody says so"),
    (CachePart, "__init__", the_end_begins_a_block_too_early, 1392, "parts overlap, or leave a gap"),
    (Lenders, "_ask", a_part_is_asked_for_by_the_first_keys, SPLIT, "attends to KV of somebody else"),
    (admission, "_stands_behind", lambda *_: False, TURNS, "out of its turn"),
    (machine, "MAY_MAKE_ROOM", {}, ROOM, "waits beside room"),
    (State, "claimed_blocks", lambda *_: 0, ROOM, "takes room that is kept"),
    (orders, "wait_for_room", the_newest_goes_first, TURNS, "out of its turn"),
    (cache_places, "free_blocks", lambda worker: worker.kv_blocks, SPLIT, "promised twice"),
]


@pytest.mark.parametrize(
    ("owner", "name", "fault", "seed", "match"),
    [
        pytest.param(*planted, marks=[pytest.mark.slow] if number % 3 else [])
        for number, planted in enumerate(PLANTED)
    ],
    ids=[f"{p[0].__name__.rsplit('.', 1)[-1]}.{p[1]}" for p in PLANTED],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, seed: int, match: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    fails(seed, match)
