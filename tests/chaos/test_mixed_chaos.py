"""Worlds with mixed workers: faults planted in their machine and in the core are found there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from halfmoon.conductor.core import booking
from halfmoon.workers.mixed.state import MixedState
from tests.chaos.mixed_workers import MixedWorker
from tests.chaos.searching import fails, shows


def test_worlds_with_mixed_workers_keep_their_promises() -> None:
    shows(["prompts computed again"], "mixed")


def test_a_table_that_is_read_when_its_request_may_be_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MixedWorker.end

    def late(self: MixedWorker, step: Any, *others: Any) -> None:
        rows = [msgspec.structs.replace(row, table=row.sequence.table) for row in step.decodes]
        whole(self, msgspec.structs.replace(step, decodes=rows), *others)

    monkeypatch.setattr(MixedWorker, "end", late)
    fails("I102 ", "mixed")


def test_a_prompt_whose_time_stays_booked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = booking.free_prefill

    def forgets(state: Any, order: Any) -> None:
        if order.mixed and order.phase == "prefill":
            order.phase = "decode"
        else:
            whole(state, order)

    monkeypatch.setattr(booking, "free_prefill", forgets)
    fails("I4 ", "mixed")


def test_an_order_that_is_cancelled_for_one_half_and_runs_on_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MixedState, "_drop", lambda self, request: None)
    fails("I89 |I87 orders at m", "mixed")
