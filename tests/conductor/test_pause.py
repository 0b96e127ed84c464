"""An operator pauses placements: what comes waits, what runs ends or is taken back, and all of it goes on."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_scripts import S, Script, arrived, finished, pair, prefilled

from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import CancelOrder, Decision, RejectRequest, StartDecode, StartPrefill
from halfmoon.schemas.events import TimerFired
from halfmoon.schemas.weights import PlacementsPaused

WAITING: dict[str, Any] = {"heartbeat_ns": 100 * S, "arrival_wait_ns_max": 10 * S}
PAUSE, RESUME = PlacementsPaused(), PlacementsPaused(paused=False)


def kinds(decisions: list[Decision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def fire(script: Script, key: str) -> list[Decision]:
    script.now_ns = script.core.timers[key]
    return script(TimerFired(key=key, at_ns=script.now_ns))


def start(script: Script, request_id: str) -> StartPrefill:
    first, _ = script.orders(arrived(request_id))
    assert isinstance(first, StartPrefill)
    return first


def test_what_comes_waits_and_what_runs_ends() -> None:
    script = pair(**WAITING)
    runs = start(script, "r0")
    assert script(PAUSE) == []
    assert script.orders(arrived("r1")) == []
    script(prefilled(runs.order_id, "r0", "p0"))
    script(finished(runs.order_id, "r0", "d0"))
    assert script.core.state.requests.keys() == {"r1"}
    assert kinds(script.orders(RESUME)) == ["StartPrefill", "StartDecode"]


def test_without_a_policy_that_lets_them_wait_new_ones_are_told_when_to_come_again() -> None:
    script = pair(heartbeat_ns=100 * S)
    script(PAUSE)
    (refused,) = script.orders(arrived("r1"))
    assert isinstance(refused, RejectRequest)
    assert (refused.reason, refused.message) == ("no_worker", "an operator has paused placements")
    assert refused.retry_after_ns > 0


def test_what_is_taken_back_goes_on_however_long_the_pause_and_however_often() -> None:
    script = pair(**WAITING, placements_max=2)
    start(script, "r0")
    for _ in range(4):
        taken_back = script.orders(PlacementsPaused(abort=True))
        assert kinds(taken_back) == ["CancelOrder", "CancelOrder", "ReleaseOrder", "ReleaseOrder"]
        (key,) = (key for key in script.core.timers if key.startswith("unplaced:r0"))
        for _ in range(3):  # it waits longer than it would for a worker
            assert kinds(fire(script, key)) == ["SetTimer"]
        assert kinds(script.orders(RESUME)) == ["StartPrefill", "StartDecode"]
    assert script.core.state.counters.failed == 0


def test_of_those_taken_back_none_is_placed_before_the_resume() -> None:
    script = pair(**WAITING)
    for number in range(3):
        start(script, f"r{number}")
    decisions = script(PlacementsPaused(abort=True))
    assert sum(isinstance(one, CancelOrder) for one in decisions) == 6
    assert not any(isinstance(one, StartPrefill | StartDecode) for one in decisions)
    assert list(script.core.state.parked) == ["r0", "r1", "r2"]
    started = script.orders(RESUME)
    assert [one.request_id for one in started if isinstance(one, StartPrefill)] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("again", [PAUSE, RESUME], ids=["paused twice", "resumed twice"])
def test_the_same_once_more_changes_nothing(again: PlacementsPaused) -> None:
    script = pair(**WAITING)
    script(again)
    before = script.core.state.paused
    assert script(again) == []
    assert script.core.state.paused == before


def test_a_core_that_is_restored_is_paused_as_well() -> None:
    script = pair(**WAITING)
    script(PAUSE)
    restored = Core.restore(script.core.snapshot())
    assert restored.state.paused
