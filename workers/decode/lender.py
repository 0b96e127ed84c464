"""The thread of a decode worker that attends for others, over channels, to the segments that it holds of theirs."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.pool.segment import PoolView
from halfmoon.workers.attention.server import HeldSegments, SegmentServer
from halfmoon.workers.decode.actions import LoadHold
from halfmoon.workers.decode.cache_copies import copy_layers


class Lender:
    """Serves from its start until `close`. `offer` and `drop` are called from any one thread."""

    def __init__(self, engine: Any, layout: Layout, hello: ChannelHello, options: ChannelOptions) -> None:
        """Raises ChannelError: it cannot listen there."""
        self._segment_tokens = layout.segment_tokens
        self._block_tokens = layout.block_tokens
        self._server = SegmentServer(
            engine.attention, engine.cache, segment_tokens=layout.segment_tokens, heads=engine.config.heads
        )
        self._listener = ChannelListener(hello, options)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attend-for-others", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        return list(self._listener.addresses)

    @property
    def holds(self) -> int:
        return len(self._server.holds)

    def offer(self, hold: int, blocks: list[int]) -> None:
        self._server.holds[hold] = HeldSegments(blocks, len(blocks) * self._block_tokens)

    def drop(self, hold: int) -> None:
        """From its return on, no answer goes out that was computed with its blocks."""
        self._server.holds.pop(hold, None)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        self._server.run(self._listener, self._over.is_set)


async def load_hold(
    store: AgentClient,
    pool: PoolView,
    cache: Any,
    layout: Layout,
    load: LoadHold,
    on_thread: Callable[[Callable[[], None]], Awaitable[None]],
) -> None:
    """Brings the blocks here, a segment at a time: the pool need not have room for more.

    Raises StoreError, BusError.
    """
    request, step = load.request, layout.segment_tokens // layout.block_tokens
    for first in range(0, len(load.blocks), step):
        begin = request.first_block + first
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
            copies = [
                (layer, slot, block)
                for slot, block in zip(put.slots, blocks, strict=True)
                for layer in range(layout.layers)
            ]

            def copy(copies: list[tuple[int, int, int]] = copies) -> None:
                copy_layers(cache, pool, copies)

            await on_thread(copy)
        finally:
            await store.release(order_id)
