"""Search for the highest speed and the smallest cluster, over made-up answers."""

from __future__ import annotations

import pytest

from halfmoon.conductor.simulation.capacity import PRECISION, CapacityUnknown, Runs, smallest
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.report import Objectives

S = 1_000_000_000


def runs(limit: float) -> tuple[Runs, list[float]]:
    """A hundred requests, all of which take `speed / limit` seconds to the first token but five."""
    asked: list[float] = []

    def at(speed: float) -> dict[str, Outcome]:
        asked.append(speed)
        outcomes = {}
        for number in range(100):
            taken = 10**6 if number < 5 else speed / limit
            outcomes[str(number)] = Outcome(
                arrived_ns=0,
                prompt_tokens=1,
                output_tokens=2,
                end="finished",
                first_token_ns=int(taken * S),
                tbt_ns=1,
            )
        return outcomes

    return Runs(at), asked


@pytest.mark.parametrize("limit", [0.03, 0.9, 1.0, 7.3, 100.0])
def test_the_highest_speed_that_holds_is_found(limit: float) -> None:
    search, asked = runs(limit)
    found = search.capacity(Objectives(ttft_ns=1 * S, tbt_ns=1 * S))
    assert found.speed <= limit * 1.0001 < found.first_failing * 1.0002
    assert found.first_failing / found.speed <= 1 + PRECISION
    assert found.held == 0.95
    assert len(asked) == len(set(asked)) < 30


def test_other_objectives_use_the_same_runs() -> None:
    search, asked = runs(2.0)
    first = search.capacity(Objectives(ttft_ns=1 * S, tbt_ns=1 * S))
    count = len(asked)
    assert search.capacity(Objectives(ttft_ns=1 * S, tbt_ns=1 * S)) == first
    assert len(asked) == count
    assert search.capacity(Objectives(ttft_ns=2 * S, tbt_ns=1 * S)).speed == pytest.approx(4.0, rel=0.011)


def test_objectives_that_nothing_or_everything_holds_are_said_to_be_so() -> None:
    for ttft_ns, message in ((1, "do not hold even at"), (10**15, "hold even at")):
        with pytest.raises(CapacityUnknown, match=message):
            runs(1.0)[0].capacity(Objectives(ttft_ns=ttft_ns, tbt_ns=1 * S))


def test_the_smallest_cluster_is_the_smallest() -> None:
    def held(prefill: int, decode: int) -> float:
        return 1.0 - 0.34 / prefill - 0.06 / decode

    best = min(
        ((p + d, -p, p, d) for p in range(1, 17) for d in range(1, 17) if held(p, d) >= 0.9),
    )
    assert smallest(held, 16)[:2] == best[2:] == (5, 2)
    with pytest.raises(CapacityUnknown, match="16 prefill and 16 decode"):
        smallest(lambda prefill, decode: 0.5, 16)
