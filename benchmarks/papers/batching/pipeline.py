"""Bubbles of pipeline parallelism: stages that hold a range of layers each, through which iterations flow.

As many iterations are under way as there are stages, each formed by a batch former of its own from requests of its own,
since the next token of a sequence waits for the last stage. A stage takes iterations in the order in which they come.
Iterations of unequal length make a stage wait: these are the bubbles.

Source: SARATHI (arXiv 2308.16369), sections 3.3 and 5.3.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.papers.batching.iteration_times import IterationTimes
from benchmarks.papers.batching.ways import Batching, ComparedFormer
from halfmoon.workers.batch_former import BlockRoom


class PipelineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """From the first iteration's arrival at the last stage to the first time that a flow has nothing more to do."""

    tokens_s: float
    #: Of the last stage, waiting between two iterations, and of its time in all.
    bubble_s: float
    span_s: float

    @property
    def bubble_share(self) -> float:
        return self.bubble_s / self.span_s


class _Flow:
    """Iterations of one set of requests, one after the other."""

    def __init__(self, former: ComparedFormer, requests: Sequence[tuple[int, int]]) -> None:
        self.former = former
        self.left = {str(number): answer for number, (_, answer) in enumerate(requests)}
        self._cached: dict[str, int] = {}
        for number, (prompt, _) in enumerate(requests):
            former.add(str(number), prompt)

    def iterations(self, times: IterationTimes, stages: int) -> Iterator[tuple[float, int]]:
        """(ns in one stage, tokens that are new) of each."""
        while True:
            made = self.former.form()
            if not made.tokens:
                return
            for name in made.decodes:
                self._cached[name] += 1
            context = sum(self._cached[name] for name in made.decodes)
            chunks = [(chunk.start, chunk.tokens) for chunk in made.chunks]
            yield times.iteration_ns(chunks, len(made.decodes), context) / stages, made.tokens
            self.former.made()
            for chunk in made.chunks:
                self._cached[chunk.name] = chunk.start + chunk.tokens
            for name in (*made.decodes, *(chunk.name for chunk in made.chunks if chunk.last)):
                self.left[name] -= 1
                if not self.left[name]:
                    self.former.remove(name)


def run_pipeline(
    requests: Sequence[tuple[int, int]],
    times: IterationTimes,
    *,
    stages: int,
    batching: Batching,
    budget_tokens: int,
    sequences_max: int,
) -> PipelineFigures:
    """`requests`: prompt and answer, all there at the beginning, dealt to the flows in turn; room for all that run."""
    room = max(prompt + answer for prompt, answer in requests) * sequences_max
    flows = []
    for place in range(stages):
        former = ComparedFormer(
            BlockRoom(room, 1), budget_tokens=budget_tokens, sequences_max=sequences_max, batching=batching
        )
        flows.append(_Flow(former, requests[place::stages]).iterations(times, stages))
    #: When each flow's next iteration may enter the first stage, and when each stage is free.
    ready = [(0.0, place) for place in range(stages)]
    free = [0.0] * stages
    bubble = began = ended = 0.0
    tokens = 0
    while True:
        at, place = heapq.heappop(ready)
        iteration = next(flows[place], None)
        if iteration is None:
            break
        took, made = iteration
        for stage in range(stages):
            begins = max(at, free[stage])
            if stage == stages - 1:
                bubble += begins - free[stage] if free[stage] else 0.0
                began = began or begins
            at = free[stage] = begins + took
        ended, tokens = at, tokens + made
        heapq.heappush(ready, (at, place))
    span = (ended - began) / 1e9
    return PipelineFigures(tokens_s=tokens / span, bubble_s=bubble / 1e9, span_s=span)
