"""KV of arriving requests: from slots of the node's pool into the engine's own cache, layer by layer.

The loop hears what is readable (`note`), a copy thread moves it (`load`), the loop counts it (`on_copied`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np

from halfmoon.schemas.kv import KvReady, TransferOpened
from halfmoon.store.pool.segment import PoolView
from halfmoon.workers.decode.sequence import Sequence


class KvLoading:
    """`on_copied(sequence)` is called in the loop after each copy."""

    def __init__(
        self,
        engine: Any,
        pool: PoolView,
        copies: Executor,
        layers: int,
        on_copied: Callable[[Sequence], None],
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._copies = copies
        self._layers = layers
        self._on_copied = on_copied
        self._loop = asyncio.get_running_loop()

    def note(self, sequence: Sequence, message: TransferOpened | KvReady) -> None:
        """What the message says is readable. It may come again at any time: the bus repeats what may be lost."""
        match message:
            case TransferOpened():
                if sequence.arrived is not None:
                    return  # an order's KV has one place; what was copied from there stays copied
                sequence.slots = list(message.slots)
                sequence.arrived = np.zeros((self._layers, len(message.slots)), dtype=bool)
                for block in message.present:
                    sequence.to_load += [(layer, block) for layer in range(self._layers)]
            case KvReady():
                blocks = range(message.first_block, message.first_block + message.blocks)
                sequence.to_load += [(message.layer, block) for block in blocks]

    def load(self, sequence: Sequence) -> None:
        """Start copying what is readable and not yet copied, unless the cache has no room for the prompt."""
        if sequence.arrived is None or not sequence.to_load:
            return
        blocks = len(sequence.slots)
        if not sequence.table:
            if not self._engine.allocator.can_allocate(blocks):
                return
            sequence.table = list(self._engine.allocator.allocate(blocks))
        fresh = []
        for layer, block in sequence.to_load:
            if block < blocks and not sequence.arrived[layer, block]:
                sequence.arrived[layer, block] = True
                fresh.append((layer, block))
        sequence.to_load = []
        if fresh:
            sequence.loading += 1
            self._copies.submit(self._copy, sequence, fresh, list(sequence.slots), list(sequence.table))

    def take_back(self, sequence: Sequence) -> list[int]:
        """Forget the copies; the pool still holds them, and they are loaded again later. Returns the blocks
        to free.
        """
        assert sequence.loading == 0, sequence.loading
        assert sequence.arrived is not None
        sequence.to_load += [(int(layer), int(block)) for layer, block in np.argwhere(sequence.arrived)]
        sequence.arrived[:] = False
        sequence.loaded = 0
        table, sequence.table = sequence.table, []
        return table

    def _copy(
        self, sequence: Sequence, items: list[tuple[int, int]], slots: list[int], table: list[int]
    ) -> None:
        """On the copy thread."""
        for layer, block in items:
            self._engine.cache.write_block(layer, table[block], self._pool.layer_block(slots[block], layer))
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are being stopped
            self._loop.call_soon_threadsafe(self._copied, sequence, len(items))

    def _copied(self, sequence: Sequence, count: int) -> None:
        sequence.loading -= 1
        sequence.loaded += count
        self._on_copied(sequence)


def copy_out(cache: Any, layers: int, table: list[int]) -> list[np.ndarray]:
    """The bytes of these blocks, each `[layers, layer_block_bytes]`: a preempted sequence in host memory."""
    held = [np.empty((layers, cache.layer_block_bytes), dtype=np.uint8) for _ in table]
    for block, rows in zip(table, held, strict=True):
        for layer in range(layers):
            cache.read_block(layer, block, rows[layer])
    return held


def copy_in(cache: Any, layers: int, table: list[int], held: list[np.ndarray]) -> None:
    """The reverse of `copy_out`, perhaps into other blocks."""
    for block, rows in zip(table, held, strict=True):
        for layer in range(layers):
            cache.write_block(layer, block, rows[layer])
