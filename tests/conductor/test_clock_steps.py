"""The server's clock is set back and forth by hours: timers, heartbeats and predictions go on as if it were not."""

from __future__ import annotations

import pytest
from conductor_scripts import MS, S, Script, arrived, pair

from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import Decision, FailRequest, StartDecode, StartPrefill
from halfmoon.schemas.events import (
    FrontendHeartbeat,
    StoreHeartbeat,
    TimerFired,
    WorkerHeartbeat,
    WorkerLeft,
)

HOUR = 3_600 * S
STEPS = {"clock_step_ns_max": 60 * S}


def beats(script: Script, *silent: str) -> None:
    """One round of heartbeats, a second later, of everybody but `silent`."""
    script.now_ns += S
    for worker_id in ("p0", "d0"):
        if worker_id not in silent:
            script(
                WorkerHeartbeat(worker_id=worker_id, incarnation="i1", queued=0, running=0, kv_blocks_used=0)
            )
        script(StoreHeartbeat(node_id=f"n-{worker_id}", incarnation="i1"))
    script(FrontendHeartbeat(frontend_id="f1", incarnation="i1"))


def fire_due(script: Script) -> list[Decision]:
    """What follows from the timers that a conductor's shell would fire now."""
    core, out = script.core, []
    for key, at_ns in sorted(core.timers.items(), key=lambda timer: timer[1]):
        if at_ns <= core.state.at_ns:
            out += script(TimerFired(key=key, at_ns=at_ns))
    return out


@pytest.mark.parametrize("step_ns", [-3 * HOUR, -2 * S, 3 * HOUR])
def test_who_falls_silent_after_a_step_is_lost_in_its_time_and_nobody_else(step_ns: int) -> None:
    script = pair(**STEPS)
    beats(script)
    script.now_ns += step_ns
    for _ in range(6):
        beats(script, "d0")
        fire_due(script)
    assert list(script.core.state.workers) == ["p0"]
    assert sorted(script.core.state.stores) == ["n-d0", "n-p0"]
    assert list(script.core.state.frontends) == ["f1"]


@pytest.mark.parametrize("step_ns", [-3 * HOUR, 3 * HOUR])
def test_a_request_without_a_worker_waits_as_long_as_it_may(step_ns: int) -> None:
    script = pair(**STEPS)
    script(arrived(tokens=100))
    script(WorkerLeft(worker_id="d0", incarnation="i1"))
    assert list(script.core.state.parked) == ["r1"]
    script.now_ns += step_ns
    for _ in range(20):
        beats(script, "d0")
        assert not any(isinstance(decision, FailRequest) for decision in fire_due(script))
    for _ in range(12):
        beats(script, "d0")
        fire_due(script)
    assert list(script.core.state.requests) == []


@pytest.mark.parametrize("step_ns", [-3 * HOUR, 3 * HOUR])
def test_the_same_is_predicted_on_both_sides_of_a_step(step_ns: int) -> None:
    def predictions(step_ns: int) -> list[int]:
        script, found = pair(**STEPS), []
        for number in range(4):
            if number == 2:
                script.now_ns += step_ns
            placed = script.orders(arrived(f"r{number}"), 10 * MS)
            assert [type(decision) for decision in placed] == [StartPrefill, StartDecode]
            found.append(next(d.predicted.ttft_ns for d in placed if isinstance(d, StartPrefill)))
        return found

    # The step itself is no time, so the ten milliseconds beside it are not seen either.
    calm, stepped = predictions(0), predictions(step_ns)
    assert stepped[:2] == calm[:2]
    assert [stepped[2] - calm[2], stepped[3] - calm[3]] == [10 * MS, 10 * MS]


def test_logs_without_the_field_are_read_as_they_were_decided() -> None:
    script = pair()
    before_ns = script.core.state.at_ns
    script.now_ns -= HOUR
    beats(script)
    assert script.core.state.at_ns == before_ns
    script.now_ns += 2 * HOUR
    beats(script)
    assert script.core.state.at_ns == before_ns + HOUR + 2 * S
    assert script.core.state.clock_lead_ns == 0


def test_a_core_that_was_restored_knows_of_the_steps_before() -> None:
    script = pair(**STEPS)
    script.now_ns -= HOUR
    beats(script)
    restored = Core.restore(script.core.snapshot())
    assert restored.state.clock_lead_ns == script.core.state.clock_lead_ns
    # What people are shown is the server's clock as it is.
    assert restored.state.server_ns == script.now_ns
