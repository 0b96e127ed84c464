"""Recomputing: blocks of KV computed again by the model, as a prefill worker computes them in exact numerics."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfmoon.cli.audit.cached_blocks import Chain
from halfmoon.workers.model.engine import Engine


class Recomputing:
    """One sequence at a time in the engine's cache; blocks that the next chain shares with the last one stay there."""

    def __init__(self, engine: Engine, *, blocks_max: int) -> None:
        """`blocks_max`: of the longest chain; the engine's cache has room for them."""
        self._engine = engine
        self._table = engine.allocator.allocate(blocks_max)
        self._cached: list[bytes] = []
        #: Blocks that were computed.
        self.computed = 0

    def last_block(self, chain: Chain) -> npt.NDArray[np.uint8]:
        """u8 `[layers, layer_block_bytes]`: the KV of the chain's last block."""
        engine, size = self._engine, self._engine.block_tokens
        shared = 0
        while shared < min(len(self._cached), len(chain.keys)) and self._cached[shared] == chain.keys[shared]:
            shared += 1
        for number in range(shared, len(chain.keys)):
            engine.prefill_chunk(chain.token_ids[number], number * size, self._table)
            self.computed += 1
        self._cached = list(chain.keys)
        found = np.empty((engine.config.layers, engine.cache.layer_block_bytes), np.uint8)
        for layer in range(engine.config.layers):
            engine.cache.read_block(layer, self._table[len(chain.keys) - 1], found[layer])
        return found
