"""The bounds of a mixed worker's iterations: tokens, and the time that they take by the worker's cost.

A number of tokens alone bounds no time: a chunk late in a long prompt attends to all that came before it, and takes
several times as long as the same number of tokens at its start; and a budget that holds for the fullest batch leaves a
small one nearly idle. So an iteration takes as many tokens as its time allows beside the decodes that it has.

Source: Sarathi-Serve (OSDI'24, arXiv 2403.02310), section 4.3, for a budget that keeps the objective of time between
tokens; Medha (arXiv 2409.17264) for chunks that become smaller as their prompt goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from halfmoon.schemas.cost_profile import CostProfile

#: Rows of a chunk are padded to this in fast numerics.
TILE_ROWS = 16
#: Of the objective, in percent: what an iteration may take. The rest is for what it takes longer than predicted.
_SHARE_PERCENT = 90


def iteration_ns_of(tbt_slo_ns: int) -> int:
    """The time of an iteration that holds the objective."""
    return tbt_slo_ns * _SHARE_PERCENT // 100


def time_bound(cost: CostProfile, iteration_ns: int, grain_tokens: int) -> IterationBound | None:
    """A bound of iterations whose chunks end at multiples of `grain_tokens`; None for an `iteration_ns` of 0."""
    tile = grain_tokens if grain_tokens > 1 else TILE_ROWS
    return IterationBound(cost, iteration_ns, tile) if iteration_ns else None


class IterationBound(NamedTuple):
    """The time that one iteration may take."""

    cost: CostProfile
    iteration_ns: int
    #: Of chunks, but for the last one of a prompt.
    tile_tokens: int

    def beside_ns(self, sequences: int, context_tokens: int) -> int:
        """Time for chunks of prompts beside a batch that decodes; negative where that takes too long alone."""
        return self.cost.beside_ns(self.iteration_ns, sequences, context_tokens)

    def tokens_within(self, left_ns: int, start: int, tokens_max: int) -> int:
        """Tokens of a chunk from `start` on that take no longer than `left_ns`: whole tiles, or `tokens_max`."""
        if self.cost.chunk_ns(start, tokens_max) <= left_ns:
            return tokens_max
        tile = self.tile_tokens
        tiles = range(1, tokens_max // tile + 1)
        return tile * bisect_right(tiles, left_ns, key=lambda count: self.cost.chunk_ns(start, count * tile))
