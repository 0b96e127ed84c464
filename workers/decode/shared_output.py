"""Generated blocks join the pool, so that the next turn of a conversation finds them.

Only in fast numerics: in exact ones generated KV is not, bit for bit, what a prefill of the same tokens would
give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from halfmoon.bus.errors import BusError
from halfmoon.schemas.keys import chain_keys
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.errors import StoreError
from halfmoon.store.pool.segment import PoolView
from halfmoon.workers.decode.sequence import Sequence


def shares_output(layout: Layout, sequence: Sequence) -> bool:
    """Whether a finished sequence has whole blocks beyond its prompt's that others may use."""
    return bool(
        layout.numerics == "fast"
        and layout.block_bytes
        and sequence.root_key
        and sequence.table
        and sequence.length // layout.block_tokens > len(sequence.block_keys) // KEY_BYTES
    )


async def share_output(
    store: AgentClient,
    pool: PoolView,
    cache: Any,
    layout: Layout,
    sequence: Sequence,
    on_thread: Callable[[Callable[[], None]], Awaitable[None]],
) -> None:
    """Put them under the keys that the next turn will have. What cannot be shared is not: the answer was
    given.
    """
    known = len(sequence.block_keys) // KEY_BYTES
    tokens = (sequence.prompt + sequence.output)[: sequence.length]
    keys = chain_keys(sequence.root_key, tokens, layout.block_tokens)
    order_id = f"{sequence.order_id}-out"
    with contextlib.suppress(StoreError, BusError):
        try:
            put = await store.open_put(
                order_id,
                keys[KEY_BYTES * known :],
                blocks=len(keys) // KEY_BYTES - known,
                head_keys=keys[: KEY_BYTES * known],
                tenant=sequence.tenant,
            )

            def copy() -> None:
                for index, slot in enumerate(put.slots):
                    if index not in put.present:
                        for layer in range(layout.layers):
                            cache.read_block(
                                layer, sequence.table[known + index], pool.layer_block(slot, layer)
                            )

            await on_thread(copy)
            await store.commit(order_id, first_block=0, blocks=len(put.slots))
        finally:
            await store.release(order_id)
