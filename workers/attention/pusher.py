"""Pushes to lenders, each over a channel of its own, on a thread of their own: a lender that is silent holds up neither
steps nor arriving KV.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelError
from halfmoon.workers import hold_points
from halfmoon.workers.attention.errors import LenderLost
from halfmoon.workers.attention.push import push_tokens
from halfmoon.workers.attention.worker_channels import WorkerChannels


class Pusher:
    """One for a cache. A channel to a lender stays open for the next push."""

    def __init__(self, cache: Any, hello: ChannelHello, options: ChannelOptions) -> None:
        self._cache, self._channels = cache, WorkerChannels(hello, options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-push")

    async def push(
        self, worker_id: str, addresses: list[str], hold: int, blocks: list[int], first: int, tokens: int
    ) -> int:
        """Sends `tokens` tokens, from the hold's token `first` on, which begin in the first of `blocks`. Returns the
        bytes of their KV. Raises LenderLost, PartRefused.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, self._push, worker_id, addresses, hold, blocks, first, tokens
        )

    def _push(
        self, worker_id: str, addresses: list[str], hold: int, blocks: list[int], first: int, tokens: int
    ) -> int:
        hold_points.reached(hold_points.MOVE, first, worker_id)
        channel = self._channels.reach(worker_id, addresses)
        offset = first % self._cache.block_tokens
        try:
            return push_tokens(channel, hold, self._cache, blocks, first, tokens, offset=offset)
        except ChannelError as lost:
            self._channels.forget(worker_id)
            raise LenderLost(worker_id, str(lost)) from None

    def close(self) -> None:
        """Waits for the push that is under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._channels.close()
