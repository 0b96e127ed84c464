"""Worlds whose prefill workers compute prompts together: they keep their promises, and faults planted in the core and
in the machine of a part are found there.
"""

from __future__ import annotations

from typing import Any

import pytest

from halfmoon.conductor.core import booking
from halfmoon.workers.prefill.job import Job
from halfmoon.workers.prefill.layer_stages.job import StageJob
from tests.chaos.searching import fails, shows


def test_worlds_keep_their_promises() -> None:
    shows(["prompts given to two", "stages computed", "stages ended early"], "stages")


def a_parts_time_stays_booked(state: Any, order: Any, worker_id: str) -> None:
    worker = state.workers.get(worker_id)
    before = worker.prompts.reserved_ns if worker is not None else 0
    whole_free(state, order, worker_id)
    if worker is not None:
        worker.prompts.reserved_ns = before


def a_part_is_free_before_its_time(state: Any, order: Any, worker_id: str) -> None:
    whole_free(state, order, worker_id)
    order.prefill.staged.append(worker_id)


def a_part_is_never_given(order: Any, prompt_tokens: int, out: Any) -> None:
    """Only the worker that has the last layers is told."""


def a_cancelled_part_is_answered(self: StageJob, out: Any) -> None:
    whole_cancel(self, out)
    self.cancelled = False


def a_part_that_is_over_keeps_its_turn(self: StageJob, event: Any, out: Any) -> None:
    """Whatever it hears."""


def a_stage_that_is_gone_is_waited_for(self: Job, event: Any, out: Any) -> None:
    """Nobody is told."""


whole_free, whole_cancel = booking.free_stage, StageJob.cancel
PLANTED = [
    (booking, "free_stage", a_parts_time_stays_booked, "I18 "),
    (booking, "free_stage", a_part_is_free_before_its_time, "I5 |I6 "),
    (booking, "give_stages", a_part_is_never_given, "I94 parts"),
    (StageJob, "cancel", a_cancelled_part_is_answered, "I89 "),
    (StageJob, "step", a_part_that_is_over_keeps_its_turn, "I87 orders at [pd]"),
    (Job, "_stage_lost", a_stage_that_is_gone_is_waited_for, "I87 orders at [pd]"),
]


#: A dozen worlds are played before each.
FOUND_LATE = {a_stage_that_is_gone_is_waited_for, a_part_that_is_over_keeps_its_turn}


@pytest.mark.parametrize(
    ("owner", "name", "fault", "match"),
    [pytest.param(*one, marks=[pytest.mark.slow] if one[2] in FOUND_LATE else []) for one in PLANTED],
    ids=[one[2].__name__ for one in PLANTED],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, match: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    fails(match, "stages")
