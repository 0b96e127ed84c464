"""What a decode worker tells of those who attend for it: the middle of several steps, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from decode_script import MS, PROFILE, Script
from msgspec.structs import replace
from test_decode_elsewhere import of_kind, running, script

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.decode import events
from halfmoon.workers.decode.actions import RunStep
from halfmoon.workers.decode.step_times import LEAST, WINDOW

#: 1 ms of attention a token, 1 ms a round trip.
COST = replace(PROFILE, attention_token_ps=10**9, channel_trip_ns=MS)


def machine(profile: CostProfile = COST) -> Script:
    one = script(profile=profile)
    running(one)
    one.sequence().max_tokens = 10_000
    return one


def steps(one: Script, waits: Sequence[dict[str, int]]) -> None:
    for waits_ns in waits:
        (step,) = of_kind(one.on(events.EngineIdled), RunStep)
        tokens = [SampledToken(token_id=9)] * len(step.batch)
        one.on(events.StepEnded, tokens=tokens, step_ns=MS, waits_ns=waits_ns)


def told(one: Script) -> dict[str, tuple[int, int]]:
    return {each.worker_id: (each.waited_ns, each.expected_ns) for each in one.state.heartbeat(0).places}


def test_the_middle_of_several_steps_is_told_beside_what_it_was_to_take() -> None:
    one = machine()
    waits = {"a0": 100 * MS, "a1": 1 * MS}
    steps(one, [waits] * (LEAST - 1))
    assert told(one) == {}
    steps(one, [waits])
    found = told(one)
    # Two round trips, and a prompt of ten tokens that has grown.
    assert {place: waited_ns for place, (waited_ns, _) in found.items()} == waits
    assert all((2 + 10) * MS <= expected_ns <= (2 + 10 + LEAST) * MS for _, expected_ns in found.values())
    # Nothing was asked since.
    assert told(one) == {}


def test_one_step_that_came_at_a_bad_moment_counts_for_nothing() -> None:
    one = machine()
    quick, bad = {"a0": MS, "a1": MS}, {"a0": 10_000 * MS, "a1": MS}
    steps(one, [*[quick] * (WINDOW - 1), bad])
    assert told(one)["a0"][0] == MS
    steps(one, [bad] * (WINDOW // 2))
    assert told(one)["a0"][0] == 10_000 * MS
    steps(one, [quick] * (WINDOW // 2 + 1))
    assert told(one)["a0"][0] == MS


@pytest.mark.parametrize("unmeasured", ["attention_token_ps", "channel_trip_ns"])
def test_where_nothing_was_measured_nothing_is_told(unmeasured: str) -> None:
    one = machine(replace(COST, **{unmeasured: 0}))
    steps(one, [{"a0": 10_000 * MS}] * WINDOW)
    assert told(one) == {}
