"""Copies of single layers of blocks between the engine's cache, the node's pool and host memory.

Called on the worker's threads. A cache is `PagedCache` or its like; `layers`, `layer_block_bytes` are its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfmoon.store.errors import LeaseLost
from halfmoon.store.pool.segment import PoolView
from halfmoon.workers.decode.actions import CopyLayers


def copy_layers(cache: Any, pool: PoolView, order: CopyLayers) -> str:
    """From the pool into the cache. "": it is the order's KV; otherwise why it may be another's."""
    for layer, slot, block in order.copies:
        cache.write_block(layer, block, pool.layer_block(slot, layer))
    try:
        # A lease that ended meanwhile (the process stood still) gave others the slots that were copied.
        pool.require_unchanged(*zip(*order.epochs, strict=True))
    except LeaseLost as lost:
        return str(lost)
    return ""


def copy_out(cache: Any, table: list[int]) -> list[np.ndarray]:
    """The bytes of these blocks, each `[layers, layer_block_bytes]`: a preempted sequence in host memory."""
    held = [np.empty((cache.layers, cache.layer_block_bytes), dtype=np.uint8) for _ in table]
    for block, rows in zip(table, held, strict=True):
        for layer in range(cache.layers):
            cache.read_block(layer, block, rows[layer])
    return held


def copy_in(cache: Any, table: list[int], held: list[np.ndarray]) -> None:
    """The reverse of `copy_out`, perhaps into other blocks."""
    for block, rows in zip(table, held, strict=True):
        for layer in range(cache.layers):
            cache.write_block(layer, block, rows[layer])
