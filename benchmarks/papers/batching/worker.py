"""A simulated worker that obeys the batch former, one iteration after the other.

Requests take a cache's blocks as they grow, and give them up when they are preempted; what they had drawn is then
computed anew as part of their prompt. A token counts when its iteration is over.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from benchmarks.papers.batching.iteration_times import IterationTimes
from halfmoon.conductor.simulation.clock import Clock
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.schemas.numbers import tbt_ns
from halfmoon.workers.batch_former import BatchFormer, Iteration


class _Served:
    """One request: the tokens that the cache holds of it, and the times of those that it drew."""

    __slots__ = ("cached", "drawn", "intervals", "last_ns", "outcome")

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.cached = self.drawn = self.last_ns = 0
        self.intervals: list[int] = []


class IterationWorker:
    """`start` takes a request, which fits into the cache alone; `ended` is called with the name of who has ended."""

    def __init__(
        self,
        worker_id: str,
        clock: Clock,
        times: IterationTimes,
        former: BatchFormer,
        ended: Callable[[str], None],
    ) -> None:
        self.worker_id = worker_id
        self._clock, self.times, self.former, self._ended = clock, times, former, ended
        self._served: dict[str, _Served] = {}
        self._busy = False
        #: Of every interval between two tokens, and of every iteration that had both kinds of rows.
        self.intervals_ns = array("q")
        self.mixed_ns = array("q")
        self.prefill_ns = self.decode_ns = self.preemptions = 0
        #: Prompt tokens that are not computed yet.
        self.prompt_tokens = 0

    @property
    def queue_ns(self) -> int:
        """Time to compute the prompts in hand, as if they were one."""
        return int(self.times.iteration_ns([(0, self.prompt_tokens)], 0, 0)) if self.prompt_tokens else 0

    @property
    def running(self) -> int:
        return len(self.former.running)

    @property
    def queued(self) -> int:
        return len(self.former.waiting)

    def step_ns(self) -> float:
        """A step of those who run now."""
        return self.times.iteration_ns([], self.running, sum(one.cached for one in self._served.values()))

    def start(self, name: str, outcome: Outcome) -> None:
        self._served[name] = _Served(outcome)
        self.prompt_tokens += outcome.prompt_tokens
        self.former.add(name, outcome.prompt_tokens)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        made = self.former.form()
        self._busy = made.tokens > 0
        for name in made.preempted:
            served = self._served[name]
            if not served.drawn:
                self.prompt_tokens += served.cached
            served.cached = 0
            self.preemptions += 1
        for name in made.admitted:
            outcome = self._served[name].outcome
            if outcome.first_token_ns < 0:
                outcome.queue_ns = self._clock.now_ns - outcome.arrived_ns
        if not self._busy:
            self.former.made()
            return
        for name in made.decodes:
            self._served[name].cached += 1
        context = sum(self._served[name].cached for name in made.decodes)
        chunks = [(chunk.start, chunk.tokens) for chunk in made.chunks]
        took = int(self.times.iteration_ns(chunks, len(made.decodes), context) * self._clock.jitter())
        if chunks:
            self.prefill_ns += took
        else:
            self.decode_ns += took
        if chunks and made.decodes:
            self.mixed_ns.append(took)
        self._clock.after(took, self._over, made)

    def _over(self, made: Iteration) -> None:
        self.former.made()
        for chunk in made.chunks:
            served = self._served[chunk.name]
            served.cached = chunk.start + chunk.tokens
            if not served.drawn:
                self.prompt_tokens -= chunk.tokens
            if chunk.last:
                self._draw(chunk.name)
        for name in made.decodes:
            self._draw(name)
        self._next()

    def _draw(self, name: str) -> None:
        served, now_ns = self._served[name], self._clock.now_ns
        if served.drawn:
            served.intervals.append(now_ns - served.last_ns)
        else:
            served.outcome.first_token_ns = now_ns
        served.drawn += 1
        served.last_ns = now_ns
        if served.drawn == served.outcome.output_tokens:
            outcome = served.outcome
            outcome.tbt_ns = tbt_ns(served.intervals) if served.intervals else 0
            outcome.end, outcome.ended_ns = "finished", now_ns
            self.intervals_ns.extend(served.intervals)
            del self._served[name]
            self.former.remove(name)
            self._ended(name)
