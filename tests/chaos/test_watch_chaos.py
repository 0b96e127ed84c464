"""What a world watches beside the invariants of core, pools and machines: where these are blind, it finds a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from halfmoon.conductor.core import machine, moves
from halfmoon.schemas.sampling import Sampling
from halfmoon.store.pool.pool import Pool
from halfmoon.workers.prefill.actions import DrawFirstToken
from halfmoon.workers.prefill.job import Job
from halfmoon.workers.prefill.state import PrefillState
from tests.chaos.frontends import Frontend
from tests.chaos.searching import fails
from tests.chaos.stages import StageChannel
from tests.chaos.wishes import Feature


def the_end_is_told_twice(self: Frontend, request_id: str, how: str) -> None:
    known = request_id in self.open
    whole_end(self, request_id, how)
    if known:
        self.world.ended(request_id, how)


def a_block_stays_booked_for_good(state: Any, order: Any, move: Any) -> None:
    whole_book(state, order, move)
    state.workers[move.loan.worker_id].reserved_blocks += 1


def a_chunk_is_told_by_the_next_number(self: StageChannel, box: Any, message: Any) -> None:
    number, *marks = message if isinstance(message, tuple) else (None,)
    whole_send(self, box, message if number is None else (number + 1, *marks))


def a_slot_is_taken_and_stays_free(self: Pool) -> int:
    return self._free[-1]


def an_ended_job_asks_for_its_first_token(self: PrefillState, event: Any) -> Any:
    ended = [job for job in self.jobs.values() if isinstance(job, Job)]
    out = whole_on(self, event)
    ended = [job for job in ended if job.order_id not in self.jobs]
    return out + [DrawFirstToken(order_id=job.order_id, sampling=Sampling(), token_ids=[]) for job in ended]


whole_end, whole_book, whole_send, whole_on = (
    Frontend.end,
    moves.book_move,
    StageChannel.send,
    PrefillState.on,
)
PLANTED: list[tuple[Any, str, Callable[..., Any], tuple[Feature, ...], str]] = [
    (Frontend, "end", the_end_is_told_twice, (), "I86 a second end"),
    (moves, "book_move", a_block_stays_booked_for_good, ("moves",), "I88 "),
    (StageChannel, "send", a_chunk_is_told_by_the_next_number, ("stages",), "I95 "),
    (Pool, "_take_free", a_slot_is_taken_and_stays_free, (), "I98 "),
    (PrefillState, "on", an_ended_job_asks_for_its_first_token, (), "I103 "),
]
#: Dozens of worlds are played before it.
FOUND_LATE = a_slot_is_taken_and_stays_free


@pytest.mark.parametrize(
    ("owner", "name", "fault", "wants", "match"),
    [pytest.param(*one, marks=[pytest.mark.slow] if one[2] is FOUND_LATE else []) for one in PLANTED],
    ids=[one[2].__name__ for one in PLANTED],
)
def test_a_fault_is_found_without_the_invariants(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, wants: tuple[Feature, ...], match: str
) -> None:
    monkeypatch.setattr(machine, "check", lambda state: None)
    monkeypatch.setattr(Pool, "check", lambda self: None)
    monkeypatch.setattr(owner, name, fault)
    fails(match, *wants)
