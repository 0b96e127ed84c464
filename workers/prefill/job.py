"""One order of a prefill worker, on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from halfmoon.bus.errors import BusError
from halfmoon.bus.telemetry.tracing import OpenSpan
from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.tokens import TakeReply
from halfmoon.store.errors import StoreError, StoreFull
from halfmoon.workers.prefill.layer_progress import LayerLoads

T = TypeVar("T")

#: How long a full store, and one that does not answer, is asked again.
STORE_FULL_S = 10.0
STORE_BACK_S = 3.0
STORE_PAUSE_S = 0.1


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
        self.fetch_replicas: list[str] = []
        self.fetched_bytes = 0
        self.fetch_ns = 0
        self.loads: LayerLoads | None = None
        self.fetching: asyncio.Task[None] | None = None
        self.transfer_ns = 0
        self.pushed = 0
        #: Where it is traced.
        self.span: OpenSpan | None = None

    @property
    def order_id(self) -> str:
        return self.order.order_id

    @property
    def traceparent(self) -> str:
        return self.span.traceparent if self.span is not None else ""


class Stop(Exception):
    """The order is not to be finished; `retryable`: elsewhere it may be."""

    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.retryable = retryable


async def patiently(job: Job, where: str, ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` gives; asked again while a store is full of leased blocks, or its agent is just coming back.

    Without patience a node that restarts would use up all placements of a request within milliseconds.
    """
    loop = asyncio.get_running_loop()
    full_until = loop.time() + STORE_FULL_S
    back_until = loop.time() + STORE_BACK_S
    while True:
        try:
            return await ask()
        except (StoreError, BusError) as problem:
            until = full_until if isinstance(problem, StoreFull) else back_until
            if job.cancelled:
                raise Stop("cancelled", retryable=False) from None
            if loop.time() > until:
                raise Stop(f"{where}: {problem}", retryable=True) from None
        await asyncio.sleep(STORE_PAUSE_S)
