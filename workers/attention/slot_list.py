"""For which rows of a query the states over which segments are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.model.attention.kernel import Attention, StepRuns, runs_of
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.paged_cache import PagedCache


class SlotList:
    """A list of one channel. `wanted`: pairs of row and hold, in the order of the answer; `chunk`: all of the `rows`
    rows are of one sequence, and each is attended to over every segment.
    """

    def __init__(
        self,
        rows: int,
        wanted: Sequence[tuple[int, int]],
        holds: Mapping[int, HeldSegments],
        cache: PagedCache,
        *,
        chunk: bool,
        segment_tokens: int,
        heads: int,
    ) -> None:
        self.rows, self.chunk, self.segments = rows, chunk, 0
        self.held = {number: holds[number] for _, number in wanted}
        self._runs, self._cache = StepRuns(), cache
        for row, number in wanted:
            hold = self.held[number]
            found = runs_of(
                row, hold.blocks, hold.tokens, segment_tokens, cache.block_tokens, cache.device,
                part=self.segments, column=0,
            )  # fmt: skip
            self._runs.items += found
            self.segments += sum(run.segments for run in found)
        shape = (heads, int(cache.k.shape[-1]))
        each = rows if chunk else 1
        self.query = torch.empty(rows, *shape, dtype=cache.dtype)
        self.states = StateStack(self.segments, each, *shape, cache.device)
        #: In the model's dtype, as the kernel computes it.
        self.out = torch.empty(self.segments, each, *shape, dtype=cache.dtype)

    def attend(self, attention: Attention, layer: int) -> None:
        """`query` is here: `out` and `states.lse`."""
        k, v = self._cache.k[layer], self._cache.v[layer]
        if self.chunk:
            attention.chunk_states(self.query, k, v, self._runs.items, self.states)
        else:
            attention.segment_states(self.query, k, v, self._runs, self.states)
        self.out.copy_(self.states.out)
