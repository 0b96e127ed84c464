"""Copies of single layers of blocks between the engine's cache, the node's pool and host memory.

Called on the worker's threads. A cache is `PagedCache` or its like; `layers`, `layer_block_bytes` are its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from halfmoon.bus.errors import BusError
from halfmoon.schemas.keys import chain_keys, pack_tokens
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.errors import LeaseLost, StoreError
from halfmoon.store.pool.segment import PoolView
from halfmoon.workers.decode.actions import CopyLayers, ShareOutput


def copy_layers(cache: Any, pool: PoolView, order: CopyLayers) -> str:
    """From the pool into the cache. "": it is the order's KV; otherwise why it may be another's."""
    tail, tokens = order.tail
    for layer, slot, block in order.copies:
        cache.write_block(layer, block, pool.layer_block(slot, layer), tokens if slot == tail else 0)
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


async def share_output(
    store: AgentClient,
    pool: PoolView,
    cache: Any,
    layout: Layout,
    output: ShareOutput,
    on_thread: Callable[[Callable[[], None]], Awaitable[None]],
) -> None:
    """Puts generated blocks into the pool, under the keys that the next turn of a conversation will have.

    Blocks that the pool does not take are not shared: the answer was given.
    """
    known, table = output.known_blocks, output.table
    keys = chain_keys(output.root_key, output.tokens, layout.block_tokens)
    order_id = f"{output.order_id}-out"
    with contextlib.suppress(StoreError, BusError):
        try:
            put = await store.open_put(
                order_id,
                keys[KEY_BYTES * known :],
                blocks=len(keys) // KEY_BYTES - known,
                head_keys=keys[: KEY_BYTES * known],
                tenant=output.tenant,
                token_ids=pack_tokens(output.tokens[known * layout.block_tokens :]),
            )

            def copy() -> None:
                for index, slot in enumerate(put.slots):
                    if index not in put.present:
                        for layer in range(layout.layers):
                            with pool.writing(slot, order_id):
                                cache.read_block(layer, table[known + index], pool.layer_block(slot, layer))

            await on_thread(copy)
            await store.commit(order_id, first_block=0, blocks=len(put.slots))
        finally:
            await store.release(order_id)
