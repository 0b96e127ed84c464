"""Continuous batching, many steps at a time.

Between two changes of the batch every step takes a little longer than the one before (each sequence has one
token more), so a run of steps is one sum: `k·first + growth·k(k-1)/2`. A run ends where a sequence ends or one joins,
at the end of a step. A sequence keeps its share of each run, for its time between tokens.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.numbers import TBT_WORST_PERCENT


def tbt_ns(intervals: list[tuple[float, int]]) -> int:
    """As `schemas.numbers.tbt_ns`, of intervals given as (ns, how many)."""
    count = sum(times for _, times in intervals)
    if not count:
        return 0
    left = wanted = max(1, count * TBT_WORST_PERCENT // 100)
    total = 0.0
    for length, times in sorted(intervals, reverse=True):
        taken = min(times, left)
        total += length * taken
        left -= taken
        if not left:
            break
    return int(total / wanted)


class StepMeans:
    """Means of the steps since the last heartbeat: `add` steps, `take` their means."""

    def __init__(self) -> None:
        self._steps = self._ns = self._sequences = self._context_tokens = 0

    def add(self, steps: int, took_ns: int, sequences: int, context_tokens: int) -> None:
        """All of them sums over the steps, but `steps` itself."""
        self._steps += steps
        self._ns += took_ns
        self._sequences += sequences
        self._context_tokens += context_tokens

    def take(self) -> tuple[int, int, int, int]:
        """(steps, mean ns, mean sequences, mean context tokens) since the last call."""
        steps, sums = self._steps, (self._ns, self._sequences, self._context_tokens)
        self._steps = self._ns = self._sequences = self._context_tokens = 0
        ns, sequences, context_tokens = (each // steps if steps else 0 for each in sums)
        return steps, ns, sequences, context_tokens


class Steps:
    """The running batch of one worker. The owner books the ends of runs and calls `advance`."""

    def __init__(self, cost: CostProfile) -> None:
        self._base = float(cost.decode_base_ns)
        self._per_sequence = float(cost.decode_per_sequence_ns)
        self._per_token = cost.decode_per_context_token_ps / 1e3
        self.sequences = 0
        self.context_tokens = 0
        #: Steps made so far; sequences by the step after which they end.
        self.made = 0
        self._ends: list[tuple[int, str]] = []
        self._left: dict[str, int] = {}
        #: Runs so far: steps made before each, and the mean length of its steps, ns.
        self._starts: list[int] = []
        self._lengths: list[float] = []
        # The run that goes on.
        self.since_ns = 0
        self._first = 0.0
        self._growth = 0.0

    def step_ns(self, sequences: int, context_tokens: int) -> float:
        return self._base + self._per_sequence * sequences + self._per_token * context_tokens

    def start_run(self, now_ns: int, jitter: float) -> None:
        """With the batch as it is."""
        self.since_ns = now_ns
        self._first = self.step_ns(self.sequences, self.context_tokens) * jitter
        self._growth = self._per_token * self.sequences * jitter

    def run_ns(self, steps: int) -> int:
        return int(steps * self._first + self._growth * steps * (steps - 1) / 2)

    def steps_to_end(self) -> int:
        """Until the first sequence ends."""
        while self._ends and self._left.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.made

    def steps_until(self, now_ns: int) -> int:
        """Steps of this run that are over, or under way, at `now_ns`; at least one."""
        elapsed = now_ns - self.since_ns
        first, growth = self._first, self._growth
        if growth > 1e-9:
            half = first - growth / 2
            steps = (math.sqrt(half * half + 2 * growth * elapsed) - half) / growth
        else:
            steps = elapsed / first if first else 0.0
        whole = max(1, int(steps))
        while self.run_ns(whole) < elapsed:
            whole += 1
        return whole

    def advance(self, steps: int) -> list[str]:
        """`steps` of this run are over: the requests that ended with them, in order."""
        return self._record(steps, self.run_ns(steps) / steps) if steps else []

    def single(self, length_ns: float) -> list[str]:
        """One step that took `length_ns`, whatever its prediction: the requests that ended with it."""
        return self._record(1, length_ns)

    def _record(self, steps: int, length_ns: float) -> list[str]:
        self._starts.append(self.made)
        self._lengths.append(length_ns)
        self.made += steps
        self.context_tokens += steps * self.sequences
        ended = []
        while self._ends and self._ends[0][0] <= self.made:
            end, name = heapq.heappop(self._ends)
            if self._left.get(name) == end:
                ended.append(name)
        return ended

    def join(self, name: str, context_tokens: int, steps: int) -> None:
        """Between two runs. It ends after `steps` steps."""
        self.sequences += 1
        self.context_tokens += context_tokens
        self._left[name] = self.made + steps
        heapq.heappush(self._ends, (self.made + steps, name))

    def leave(self, name: str, context_tokens: int) -> None:
        """`context_tokens`: its context now."""
        del self._left[name]
        self.sequences -= 1
        self.context_tokens -= context_tokens
        if not self._left:
            assert self.context_tokens == 0, self.context_tokens
            self._starts.clear()
            self._lengths.clear()

    def intervals(self, joined: int) -> list[tuple[float, int]]:
        """Steps since `joined` steps had been made, as (ns, how many)."""
        place = bisect_right(self._starts, joined) - 1
        found = []
        for run in range(max(place, 0), len(self._starts)):
            begin = max(self._starts[run], joined)
            end = self._starts[run + 1] if run + 1 < len(self._starts) else self.made
            if end > begin:
                found.append((self._lengths[run], end - begin))
        return found
