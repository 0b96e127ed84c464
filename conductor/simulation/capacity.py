"""Capacity: the highest speed of a trace, or the fewest workers, at which enough requests hold their objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.report import Objectives

#: Share of requests that must hold both objectives (FAST, section 5.1).
HELD_MIN = 0.9
#: The answer is within this share of the true one, unless another is asked for.
PRECISION = 0.01
SPEED_MIN, SPEED_MAX = 1 / 64, 256.0
#: The first step in the search for a speed that holds and one that does not; each next one is its square.
WIDEN = 1.1

#: The outcome of each request at a speed.
RunAt = Callable[[float], Mapping[str, Outcome]]


class CapacityUnknown(ValueError):
    """No speed between SPEED_MIN and SPEED_MAX holds the objectives, or every one does."""


class Capacity(msgspec.Struct, frozen=True):
    """The highest speed that holds, and its share; `first_failing` is the lowest speed seen that does not hold."""

    speed: float
    held: float
    first_failing: float


class Runs:
    """Simulations of one system by speed, each made once. Objectives may differ between questions."""

    def __init__(self, run_at: RunAt) -> None:
        self._run_at = run_at
        #: By speed: (TTFT, TBT) in ns of each finished request, and the number of all.
        self._seen: dict[float, tuple[list[tuple[int, int]], int]] = {}

    def held(self, speed: float, slo: Objectives) -> float:
        """Share of all requests that held both objectives at this speed."""
        if speed not in self._seen:
            outcomes = self._run_at(speed)
            times = [(one.ttft_ns, one.tbt_ns) for one in outcomes.values() if one.end == "finished"]
            self._seen[speed] = (times, len(outcomes))
        times, count = self._seen[speed]
        return sum(ttft <= slo.ttft_ns and tbt <= slo.tbt_ns for ttft, tbt in times) / max(1, count)

    def capacity(self, slo: Objectives, *, start: float = 1.0, precision: float = PRECISION) -> Capacity:
        """The highest speed that holds: growing steps from `start` (or a speed tried before), then bisection.

        The share that holds is taken to fall with speed. It does, but for single requests. Raises CapacityUnknown.
        """
        holding = [speed for speed in self._seen if self.held(speed, slo) >= HELD_MIN]
        low = max(holding, default=0.0)
        high = min((speed for speed in self._seen if speed > low), default=0.0)
        speed, widen = low or high or start, WIDEN
        while not (low and high):
            if self.held(speed, slo) >= HELD_MIN:
                low, speed = speed, round(speed * widen, 4)
            else:
                high, speed = speed, round(speed / widen, 4)
            widen *= widen
            if low > SPEED_MAX:
                raise CapacityUnknown(f"the objectives hold even at {low:g} times the trace's speed")
            if 0 < high < SPEED_MIN:
                raise CapacityUnknown(f"the objectives do not hold even at {high:g} times the trace's speed")
        while high / low > 1 + precision:
            middle = round((low * high) ** 0.5, 4)
            if self.held(middle, slo) >= HELD_MIN:
                low = middle
            else:
                high = middle
        return Capacity(low, round(self.held(low, slo), 4), high)


def smallest(held: Callable[[int, int], float], workers_max: int) -> tuple[int, int, float]:
    """The fewest (prefill, decode) workers for which `held` is at least HELD_MIN, and its value there.

    First the fewest of each pool beside the most of the other, by bisection; these may not do together, since
    both take from the same allowance of failures: then the totals above them are tried in turn, most prefill
    workers first. Raises CapacityUnknown.
    """
    seen: dict[tuple[int, int], float] = {}

    def holds(prefill: int, decode: int) -> bool:
        if (prefill, decode) not in seen:
            seen[prefill, decode] = held(prefill, decode)
        return seen[prefill, decode] >= HELD_MIN

    if not holds(workers_max, workers_max):
        raise CapacityUnknown(
            f"{workers_max} prefill and {workers_max} decode workers do not hold the objectives"
        )
    prefill_min = _least(workers_max, lambda count: holds(count, workers_max))
    decode_min = _least(workers_max, lambda count: holds(workers_max, count))
    for total in range(prefill_min + decode_min, 2 * workers_max + 1):
        for prefill in range(min(workers_max, total - decode_min), prefill_min - 1, -1):
            if total - prefill <= workers_max and holds(prefill, total - prefill):
                return prefill, total - prefill, seen[prefill, total - prefill]
    raise AssertionError("the largest cluster holds")


def fewest(held: Callable[[int], float], workers_max: int) -> int:
    """The fewest workers, all of one kind, for which `held` is at least HELD_MIN. Raises CapacityUnknown."""
    if held(workers_max) < HELD_MIN:
        raise CapacityUnknown(f"{workers_max} workers do not hold the objectives")
    return _least(workers_max, lambda count: held(count) >= HELD_MIN)


def _least(count_max: int, holds: Callable[[int], bool]) -> int:
    low, high = 1, count_max
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
