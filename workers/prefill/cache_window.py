"""Which blocks of a prompt lie in the engine's cache while it is computed, and which segments in the node's pool alone.

A prompt that fits lies there whole. Of a longer one the first segments stay, as many as leave room for one more; the
segments behind them use that room one after the other. The first chunk of a segment needs the one before it in the
pool only, where it is since its last block was computed. Every chunk attends to all that is before it, so no
segment is worth more in the cache than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfmoon.schemas.policy import Layout
from halfmoon.workers.model.segments import AWAY


def outgrows_cache(layout: Layout, kv_blocks: int) -> bool:
    """True: prompts may be longer than a cache of `kv_blocks`. Exact numerics only: their attention is split."""
    return layout.numerics == "exact" and 0 < layout.segment_tokens <= kv_blocks * layout.block_tokens


class CacheWindow:
    """A prompt of `blocks` in a cache with room for `room` of them; `each`: blocks of a segment (0: it must fit)."""

    def __init__(self, blocks: int, *, room: int, each: int) -> None:
        assert blocks <= room or 0 < each <= room, (blocks, room, each)
        self._each, self._stay = each, blocks
        #: Blocks of the cache that it needs.
        self.blocks = blocks
        if blocks > room:
            self._stay = (room // each - 1) * each
            self.blocks = self._stay + each

    def away(self, block: int) -> range:
        """The segments that are in the pool alone while the chunk that begins with `block` is computed."""
        if block < self._stay or not self._each:
            return range(0)
        return range(self._stay // self._each, block // self._each)

    def table(self, cache: Sequence[int], block: int, blocks: int = 1) -> list[int]:
        """Block table of the chunk that begins with `block`: where it and its past lie among the blocks `cache`."""
        away = len(self.away(block)) * self._each
        if not away:
            return list(cache[: block + blocks])
        own = block + blocks - self._stay - away
        assert own <= self._each, (block, blocks)
        return [*cache[: self._stay], *[AWAY] * away, *cache[self._stay : self._stay + own]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMemory:
    """The places of a prompt's KV while it is computed: the engine's cache, as far as `window` reaches, and the slots
    of the node's pool.
    """

    engine: Any
    #: None: nothing is stored, nothing is cached.
    pool: Any
    layout: Layout
    window: CacheWindow
