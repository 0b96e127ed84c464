"""Brings KV that a hold is to have from a node's pool, through the own node's, into this worker's cache."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.pool.segment import PoolView
from halfmoon.workers.attention.actions import LoadHold


async def load_hold(
    store: AgentClient,
    pool: PoolView,
    cache: Any,
    layout: Layout,
    load: LoadHold,
    on_thread: Callable[[Callable[[], None]], Awaitable[None]],
) -> None:
    """A segment at a time: the pool need not have room for more. Of a cache of some KV heads, theirs.

    Raises StoreError, BusError.
    """
    request, segment_blocks = load.request, layout.segment_blocks
    count = len(request.block_keys) // KEY_BYTES - request.first_block
    for first in range(0, count, segment_blocks):
        step, begin = min(segment_blocks, count - first), request.first_block + first
        keys = request.block_keys[: (begin + step) * KEY_BYTES]
        blocks = load.blocks[first : first + step]
        order_id = f"{request.order_id}-hold-{load.hold}-{first}"
        try:
            put = await store.open_put(
                order_id,
                keys[begin * KEY_BYTES :],
                blocks=step,
                head_keys=keys[: begin * KEY_BYTES],
                tenant=request.tenant,
            )
            if len(put.present) < step:
                source, *replicas = request.source_node_ids
                await store.fetch(order_id, source, first_block=0, blocks=step, replicas=replicas)
            pairs = list(zip(put.slots, blocks, strict=True))

            def copy(pairs: list[tuple[int, int]] = pairs) -> None:
                for slot, block in pairs:
                    for layer in range(layout.layers):
                        here = heads_of(
                            pool.layer_block(slot, layer), layout, request.first_kv_head, request.kv_heads
                        )
                        cache.write_block(layer, block, here)

            await on_thread(copy)
            store.require_unchanged(order_id)
        finally:
            await store.release(order_id)


def heads_of(layer_block: Any, layout: Layout, first: int, count: int) -> Any:
    """`count` KV heads, from `first` on, of one layer of one block; 0: all of them, which takes no copy."""
    if count in (0, layout.kv_heads):
        return layer_block
    raw = np.asarray(layer_block).reshape(2, layout.block_tokens, layout.kv_heads, -1)
    return np.ascontiguousarray(raw[:, :, first : first + count])
