"""How fast a trace may be replayed before too few requests hold their objectives; how few workers hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.report import Slo

#: Share of requests that must hold both objectives (FAST, section 5.1).
HELD_MIN = 0.9
#: The answer is within this share of the true one.
PRECISION = 0.01
SPEED_MIN, SPEED_MAX = 1 / 64, 256.0

#: What became of each request at a speed.
RunAt = Callable[[float], Mapping[str, Outcome]]


class CapacityUnknown(ValueError):
    """No speed between SPEED_MIN and SPEED_MAX holds the objectives, or every one does."""


class Capacity(msgspec.Struct, frozen=True):
    """The highest speed that holds, with what it holds; `first_failing` is the lowest speed seen that does not."""

    speed: float
    held: float
    first_failing: float


class Runs:
    """Simulations of one system by speed, each made once. Objectives may differ between questions."""

    def __init__(self, run_at: RunAt) -> None:
        self._run_at = run_at
        #: By speed: (TTFT, TBT) in ns of each finished request, and the number of all.
        self._seen: dict[float, tuple[list[tuple[int, int]], int]] = {}

    def held(self, speed: float, slo: Slo) -> float:
        """Share of all requests that held both objectives at this speed."""
        if speed not in self._seen:
            outcomes = self._run_at(speed)
            times = [(one.ttft_ns, one.tbt_ns) for one in outcomes.values() if one.end == "finished"]
            self._seen[speed] = (times, len(outcomes))
        times, count = self._seen[speed]
        return sum(ttft <= slo.ttft_ns and tbt <= slo.tbt_ns for ttft, tbt in times) / max(1, count)

    def capacity(self, slo: Slo, *, begin: float = 1.0) -> Capacity:
        """By doubling or halving from `begin`, then by bisection. Raises CapacityUnknown.

        The share that holds is taken to fall with speed. It does, but for single requests.
        """
        low = high = begin
        if self.held(begin, slo) >= HELD_MIN:
            while self.held(high := high * 2, slo) >= HELD_MIN:
                low = high
                if high >= SPEED_MAX:
                    raise CapacityUnknown(f"the objectives hold even at {high:g} times the trace's speed")
        else:
            while self.held(low := low / 2, slo) < HELD_MIN:
                high = low
                if low <= SPEED_MIN:
                    raise CapacityUnknown(f"the objectives do not hold even at {low:g} times the trace's speed")
        while high / low > 1 + PRECISION:
            middle = round((low * high) ** 0.5, 4)
            if self.held(middle, slo) >= HELD_MIN:
                low = middle
            else:
                high = middle
        return Capacity(low, round(self.held(low, slo), 4), high)
