"""What moves gain in simulation: one worker has a long request and a queue, or all requests are of a length."""

from __future__ import annotations

import pytest

from halfmoon.conductor.simulation.cluster_shape import ClusterShape
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import SMOLLM2_CPU
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.policy import Policy

MS, S = 1_000_000, 1_000_000_000
SKEW = [(3_330, 250), (3_330, 10), *[(30, 200)] * 10]


def tokens_s(load: list[tuple[int, int]], *, lend: bool) -> float:
    """Of all answers, from the first request to the last answer, at two decode workers of 16 blocks."""
    policy = Policy(
        name="round_robin",
        admission="none",
        ttft_slo_ns=10_000 * S,
        tbt_slo_ns=0,
        move_period_ns=200 * MS if lend else 0,
        move_answer_ns=300 * S,
        room_wait_ns_max=300 * S,
    )
    shape = ClusterShape(prefill=1, decode=2, lend=lend, block_tokens=256, kv_blocks=16)
    arrivals = [
        Arrival(at_ns=number * 50 * MS, prompt_tokens=prompt, output_tokens=answer, max_tokens=answer)
        for number, (prompt, answer) in enumerate(load)
    ]
    found: dict[str, Outcome] = {}
    simulate(arrivals, shape, policy, SMOLLM2_CPU, outcomes=found)
    assert {outcome.end for outcome in found.values()} == {"finished"}
    return sum(answer for _, answer in load) * S / max(outcome.ended_ns for outcome in found.values())


@pytest.mark.slow
def test_a_queue_of_short_requests_behind_a_long_one_is_answered_sooner() -> None:
    assert tokens_s(SKEW, lend=True) >= 1.2 * tokens_s(SKEW, lend=False)


@pytest.mark.slow
@pytest.mark.parametrize("load", [[(520, 100)] * 12, [(30, 200)] * 24])
def test_equal_lengths_gain_nothing(load: list[tuple[int, int]]) -> None:
    assert tokens_s(load, lend=True) == pytest.approx(tokens_s(load, lend=False), rel=0.02)
