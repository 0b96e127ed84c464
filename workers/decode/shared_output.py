"""Generated blocks join the pool, so that the next turn of a conversation finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from halfmoon.bus.errors import BusError
from halfmoon.schemas.keys import chain_keys, pack_tokens
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.errors import StoreError
from halfmoon.store.pool.segment import PoolView
from halfmoon.workers.decode.actions import ShareOutput


async def share_output(
    store: AgentClient,
    pool: PoolView,
    cache: Any,
    layout: Layout,
    output: ShareOutput,
    on_thread: Callable[[Callable[[], None]], Awaitable[None]],
) -> None:
    """Put the blocks under the keys that the next turn will have.

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
