"""Worlds in which prompts wait for each other, and short ones pass longer ones."""

from __future__ import annotations

import pytest

from halfmoon.conductor.core import booking
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Order
from tests.chaos.searching import fails, shows


def test_worlds_keep_their_promises() -> None:
    shows(["prompts passed"], "crowds")


def all_that_wait_are_passed(state: State, order: Order) -> list[str]:
    duty = state.workers[order.prefill_id].prompts
    return list(duty.orders) if duty is not None else []


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(booking, "passed_by", all_that_wait_are_passed)
    fails("I121 passes one that is prepared", "crowds")
