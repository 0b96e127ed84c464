"""Simulated time: calls are made in the order of their time; calls of equal time in the order they were booked."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


class Clock:
    """`at` and `after` book a call, `run` makes them. ns, from 0."""

    def __init__(
        self, seed: int = 0, noise_percent: int = 0, cost_times: Sequence[tuple[int, float]] = ()
    ) -> None:
        """`cost_times`: pairs (ns, factor), ascending: from then on a computation takes its cost times `factor`."""
        self.now_ns = 0
        self._booked: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]] = []
        #: Calls for the present, made after all that were booked for this time before it came.
        self._at_once: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._count = 0
        self._draw = random.Random(seed)
        self._noise = noise_percent / 100
        self._cost_times = list(cost_times)

    def at(self, at_ns: int, call: Callable[..., Any], *args: Any) -> None:
        self._count += 1
        if at_ns > self.now_ns:
            heapq.heappush(self._booked, (at_ns, self._count, call, args))
        else:
            self._at_once.append((call, args))

    def after(self, delay_ns: int, call: Callable[..., Any], *args: Any) -> None:
        self.at(self.now_ns + delay_ns, call, *args)

    def step(self) -> bool:
        """Make the next call; False when nothing is booked."""
        if self._at_once and not (self._booked and self._booked[0][0] == self.now_ns):
            call, args = self._at_once.popleft()
        elif self._booked:
            self.now_ns, _, call, args = heapq.heappop(self._booked)
        else:
            return False
        call(*args)
        return True

    @property
    def calls(self) -> int:
        """The number of calls booked so far."""
        return self._count

    def jitter(self) -> float:
        """The factor by which the next computation is slower or faster than by its profile."""
        times = 1.0
        for since_ns, factor in self._cost_times:
            if since_ns <= self.now_ns:
                times = factor
        return times * (1.0 + self._noise * (2.0 * self._draw.random() - 1.0)) if self._noise else times
