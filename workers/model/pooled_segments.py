"""Segments of a prompt that do not fit the engine's cache: attended to from where they were put while it was computed.

Every block of a prompt is in the pool of the worker's node as soon as it is computed, in shared memory that the worker
has mapped. So a chunk's queries need its past in the cache only as far as there is room: the other segments are
copied, one after the other, to room for one segment of one layer, and attended to there. Their states are the same
bits, as they are at any other place (`attention.exact`).
"""

from __future__ import annotations

from collections.abc import Callable

from halfmoon.workers.model.attention.kernel import Attention, StepRuns, Tensor, runs_of
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.paged_cache import LayerBytes, PagedCache


class PooledSegments:
    """The `Elsewhere` of one prompt's chunks. `block(number, layer)` is one layer of a block.

    `segments` are those that are not in the cache; the computation sets them, chunk by chunk.
    """

    def __init__(
        self, attention: Attention, scratch: PagedCache, block: Callable[[int, int], LayerBytes]
    ) -> None:
        self.segments = range(0)
        self._attention, self._scratch, self._block = attention, scratch, block
        self._layer = 0
        self._queries: Tensor | None = None

    def ask(self, layer: int, q: Tensor) -> None:
        self._layer, self._queries = layer, q

    def collect(self, states: StateStack) -> None:
        scratch, q = self._scratch, self._queries
        assert q is not None, "nothing was asked"
        each, blocks = scratch.num_blocks, list(range(scratch.num_blocks))
        tokens = each * scratch.block_tokens
        for segment in self.segments:
            for i in blocks:
                scratch.write_block(0, i, self._block(segment * each + i, self._layer))
            runs = runs_of(0, blocks, tokens, tokens, scratch.block_tokens, scratch.device, part=segment)
            k, v = scratch.k[0], scratch.v[0]
            # One row is attended to as a token in decode, here as where its past is in the cache.
            if len(q) == 1:
                self._attention.segment_states(q, k, v, StepRuns(runs), states)
            else:
                self._attention.chunk_states(q, k, v, runs, states)
