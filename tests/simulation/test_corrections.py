"""Predictions in a simulated world whose costs are not the profile's come true, on loads that nothing was chosen on."""

from __future__ import annotations

import pytest

from benchmarks.papers.experiments.corrections import (
    COSTS,
    LOADS,
    SHOWN_ON,
    WINDOW,
    Offering,
    predicted,
)
from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.simulation.simulate import cost_times
from halfmoon.conductor.simulation.clock import Clock

CHANGING = "1, 3, 0.7"
STEADY = [
    (drawn, times, load) for drawn in SHOWN_ON for times in COSTS for load in LOADS if times != CHANGING
]
#: A few of them for every run.
FEW = [(SHOWN_ON[1], "0.5", 0.7), (SHOWN_ON[1], "3", 2.0)]


@pytest.mark.parametrize(
    ("drawn", "times", "load"),
    [pytest.param(*one, marks=[] if one in FEW else [pytest.mark.slow]) for one in STEADY],
)
def test_where_costs_are_steady_half_is_within_ten_percent_and_nine_tenths_near_a_quarter(
    drawn: Offering, times: str, load: float
) -> None:
    found = predicted(drawn, COSTS[times], load, WINDOW)
    assert found.ttft.p50 <= 0.10
    assert found.ttft.p90 <= 0.25
    assert found.tbt.p50 <= 0.10
    assert found.tbt.p90 <= 0.29
    assert found.late <= 1


@pytest.mark.parametrize("drawn", [pytest.param(those, marks=pytest.mark.slow) for those in SHOWN_ON])
def test_a_change_of_costs_is_followed(drawn: Offering) -> None:
    without, corrected = (predicted(drawn, COSTS[CHANGING], 0.7, window) for window in (0, WINDOW))
    assert corrected.ttft.p90 <= min(0.25, without.ttft.p90)
    assert corrected.tbt.p90 <= min(0.28, without.tbt.p90)
    assert corrected.late <= without.late


def test_the_clock_s_factor_is_the_newest_that_holds() -> None:
    clock, found = Clock(cost_times=[(0, 2.0), (10, 0.5)]), []
    for at_ns in (0, 5, 10, 20):
        clock.at(at_ns, lambda: found.append(clock.jitter()))
    while clock.step():
        pass
    assert found == [2.0, 2.0, 0.5, 0.5]


def test_cost_times_are_read_and_nonsense_is_named() -> None:
    assert cost_times("") == []
    assert cost_times("3") == [(0, 3.0)]
    assert cost_times("0:1,600:0.5") == [(0, 1.0), (600_000_000_000, 0.5)]
    for text in ("x", "1:", "5:1,2:1", "-1:2", "0:0", "0:nan", "inf:1"):
        with pytest.raises(OptionInvalid, match=r"--cost-times"):
            cost_times(text)
