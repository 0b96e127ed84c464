"""One order of a prefill worker, on its way."""

from __future__ import annotations

import asyncio

from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.tokens import TakeReply
from halfmoon.workers.layer_loads import LayerLoads


class Job:
    """One StartPrefill order on its way. Times are monotonic ns."""

    def __init__(self, order: StartPrefill, now_ns: int) -> None:
        self.order = order
        self.arrived_ns = now_ns
        self.cancelled = False
        self.prepared: asyncio.Task[bool] | None = None
        self.token_ids: list[int] = []
        self.reply = TakeReply()
        self.slots: list[int] = []
        self.present: set[int] = set()
        self.cached_blocks = 0  # of the prefix, held here before anything was fetched
        self.fetched_blocks = 0
        self.fetch_node = ""
        self.fetched_bytes = 0
        self.fetch_ns = 0
        self.loads: LayerLoads | None = None
        self.fetching: asyncio.Task[None] | None = None
        self.transfer_ns = 0
        self.pushed = 0

    @property
    def order_id(self) -> str:
        return self.order.order_id


class Stop(Exception):
    """The order is not to be finished; `retryable`: elsewhere it may be."""

    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.retryable = retryable
