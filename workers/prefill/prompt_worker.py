"""The shell of a worker that computes prompts: tokens, slots of the node's pool and fetches for its orders, their end.

The prefill worker and the mixed worker obey these actions of their machines in the same way. Each that takes time is a
task, which ends in `hear`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import assert_never

from halfmoon.bus.errors import BusError
from halfmoon.bus.telemetry.tracing import OpenSpan
from halfmoon.schemas import subjects
from halfmoon.schemas.kv import KvLoaded
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.store import order_of_hold, reference_hold
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.store.errors import BytesCorrupted, LeaseLost, StoreError, StoreFull
from halfmoon.workers.machines import TakeTokens, WorkerStopped
from halfmoon.workers.prefill.actions import (
    BeginSpan,
    CommitPrompt,
    EndOrder,
    FetchReference,
    PauseOrder,
    ReserveReference,
    ReserveSlots,
    StartFetch,
)
from halfmoon.workers.prefill.events import (
    BlocksFetched,
    FetchFailed,
    LayersFetched,
    PauseEnded,
    ReferenceFetched,
    ReferenceLayers,
    ReferenceLost,
    ReferenceReserved,
    ReserveSlotsFailed,
    SlotsReserved,
)
from halfmoon.workers.prefill.spans import begin_prefill, end_prefill
from halfmoon.workers.worker import Worker

log = logging.getLogger("halfmoon.prefill")


class PromptWorker(Worker):
    """See the module. `hear` feeds the machine."""

    async def prepare_prompts(self) -> None:
        """Before the first order."""
        #: By order: its open questions, which end with it.
        self._asking: dict[str, set[asyncio.Task[None]]] = {}
        #: By order: its commits that are under way.
        self._committing: dict[str, set[asyncio.Task[None]]] = {}
        self._spans: dict[str, OpenSpan] = {}
        #: Orders that have a hold on a similar prompt too, or ask for one.
        self._referring: set[str] = set()
        self._releasing: set[asyncio.Task[None]] = set()
        self._pool = await self.store.attach() if self.store else None
        if self.store:
            loaded = subjects.kv(self.config.worker_id, KvLoaded.__name__, self.config.node_id)
            await self.bus.subscribe(loaded, KvLoaded, self._on_loaded)

    async def release_all(self) -> None:
        self.hear(WorkerStopped(at_ns=time.monotonic_ns()))
        # Returns when all that ended orders held was given back.
        await asyncio.gather(*self._releasing)

    def prepare_further(
        self,
        action: TakeTokens
        | BeginSpan
        | ReserveSlots
        | PauseOrder
        | StartFetch
        | ReserveReference
        | FetchReference
        | CommitPrompt
        | EndOrder,
    ) -> None:
        """Begin an action of an order's preparation or of its end."""
        match action:
            case CommitPrompt():
                self._note(self._committing, action.order_id, self.spawn(self._commit(action)))
            case TakeTokens():
                if not self.hear_given(action):
                    self._ask(action.order_id, self.take_tokens(action))
            case BeginSpan():
                self._begin_span(action)
            case ReserveSlots():
                self._ask(action.order_id, self._open_put(action))
            case PauseOrder():
                self._ask(action.order_id, self._pause(action))
            case StartFetch():
                self._ask(action.order_id, self._fetch(action))
            case ReserveReference():
                self._referring.add(action.order_id)
                self._ask(action.order_id, self._reserve_reference(action))
            case FetchReference():
                self._ask(action.order_id, self._fetch_reference(action))
            case EndOrder():
                self._end_order(action)
            case _:
                assert_never(action)

    def _on_loaded(self, message: KvLoaded) -> None:
        order_id = order_of_hold(message.order_id)
        kind = LayersFetched if order_id == message.order_id else ReferenceLayers
        self.hear(kind(at_ns=time.monotonic_ns(), order_id=order_id, layer=message.layer))

    def _ask(self, order_id: str, work: Coroutine[None, None, None]) -> None:
        """As a task that ends with the order."""
        self._note(self._asking, order_id, self.spawn(work))

    @staticmethod
    def _note(tasks: dict[str, set[asyncio.Task[None]]], order_id: str, task: asyncio.Task[None]) -> None:
        of_order = tasks.setdefault(order_id, set())
        of_order.add(task)
        task.add_done_callback(of_order.discard)

    def traceparent(self, order_id: str) -> str:
        span = self._spans.get(order_id)
        return span.traceparent if span is not None else ""

    def _begin_span(self, action: BeginSpan) -> None:
        if self.tracing is not None:
            span = begin_prefill(self.tracing, action, self.config.worker_id)
            if span is not None:
                self._spans[action.order_id] = span

    async def _open_put(self, action: ReserveSlots) -> None:
        assert self.store is not None
        event: SlotsReserved | ReserveSlotsFailed
        try:
            put = await self.store.open_put(
                action.order_id,
                action.block_keys,
                blocks=action.blocks,
                tenant=action.tenant,
                token_ids=action.token_ids,
            )
        except (StoreError, BusError) as problem:
            event = ReserveSlotsFailed(
                at_ns=time.monotonic_ns(),
                order_id=action.order_id,
                reason=str(problem),
                full=isinstance(problem, StoreFull),
            )
        else:
            event = SlotsReserved(
                at_ns=time.monotonic_ns(),
                order_id=action.order_id,
                slots=list(put.slots),
                present=list(put.present),
            )
        self.hear(event)

    async def _pause(self, action: PauseOrder) -> None:
        await asyncio.sleep(action.pause_ns / SECOND_NS)
        self.hear(PauseEnded(at_ns=time.monotonic_ns(), order_id=action.order_id))

    async def _fetch(self, action: StartFetch) -> None:
        assert self.store is not None
        order_id, source = action.order_id, action.source_node_id
        event: BlocksFetched | FetchFailed
        try:
            fetched = await self.store.fetch(
                order_id,
                source,
                first_block=action.first_block,
                blocks=action.blocks,
                replicas=action.replicas,
                traceparent=self.traceparent(order_id),
            )
        except (StoreError, BusError) as problem:
            log.warning("order %s: fetch from %s failed (%s): computed instead", order_id, source, problem)
            event = FetchFailed(
                at_ns=time.monotonic_ns(),
                order_id=order_id,
                reason=str(problem),
                corrupted=isinstance(problem, BytesCorrupted | LeaseLost),
            )
        else:
            event = BlocksFetched(
                at_ns=time.monotonic_ns(),
                order_id=order_id,
                source_node_id=fetched.source_node_id,
                moved_bytes=fetched.bytes,
                elapsed_ns=fetched.elapsed_ns,
            )
        self.hear(event)

    async def _reserve_reference(self, action: ReserveReference) -> None:
        assert self.store is not None
        event: ReferenceReserved | ReferenceLost
        try:
            put = await self.store.open_put(
                reference_hold(action.order_id),
                action.block_keys,
                blocks=len(action.block_keys) // KEY_BYTES,
                tenant=action.tenant,
            )
        except (StoreError, BusError) as problem:
            event = self._lost_reference(action.order_id, problem)
        else:
            event = ReferenceReserved(
                at_ns=time.monotonic_ns(),
                order_id=action.order_id,
                slots=list(put.slots),
                present=list(put.present),
            )
        self.hear(event)

    async def _fetch_reference(self, action: FetchReference) -> None:
        assert self.store is not None
        event: ReferenceFetched | ReferenceLost
        try:
            await self.store.fetch(
                reference_hold(action.order_id),
                action.source_node_id,
                first_block=action.first_block,
                blocks=action.blocks,
                replicas=action.replicas,
                traceparent=self.traceparent(action.order_id),
            )
        except (StoreError, BusError) as problem:
            event = self._lost_reference(action.order_id, problem)
        else:
            event = ReferenceFetched(at_ns=time.monotonic_ns(), order_id=action.order_id)
        self.hear(event)

    @staticmethod
    def _lost_reference(order_id: str, problem: Exception) -> ReferenceLost:
        log.warning("order %s: no KV of a similar prompt (%s): computed instead", order_id, problem)
        return ReferenceLost(at_ns=time.monotonic_ns(), order_id=order_id, reason=str(problem))

    async def _commit(self, action: CommitPrompt) -> None:
        assert self.store is not None
        with contextlib.suppress(StoreError, BusError):  # not shared, then; the request itself goes on
            await self.store.commit(action.order_id, first_block=action.first_block, blocks=action.blocks)

    def _end_order(self, action: EndOrder) -> None:
        span = self._spans.pop(action.order_id, None)
        if span is not None and self.tracing is not None:
            end_prefill(self.tracing, span, action)
        asking = self._asking.pop(action.order_id, set())
        committing = self._committing.pop(action.order_id, set())
        if asking or self.store is not None:
            releasing = self.spawn(self._release(action.order_id, asking, committing))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    async def _release(
        self, order_id: str, asking: set[asyncio.Task[None]], committing: set[asyncio.Task[None]]
    ) -> None:
        """Slots asked for after the release would stay reserved: first nothing is asked any more. And computed blocks
        are shared only if they were committed before.
        """
        if committing:
            await asyncio.wait(committing)
        under_way = [task for task in asking if not task.done()]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        if self.store is not None:
            with contextlib.suppress(StoreError, BusError):  # the lease's own end takes care of it
                await self.store.release(order_id)
            if order_id in self._referring:
                self._referring.discard(order_id)
                with contextlib.suppress(StoreError, BusError):
                    await self.store.release(reference_hold(order_id))
