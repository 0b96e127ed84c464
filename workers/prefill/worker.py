"""The prefill worker: computes the KV of prompts and streams it, layer by layer, to the decode node.

The shell of `PrefillState`: it obeys the machine's actions in their order, and tells it how each one ended. What is
to be done, and when, is decided there; here are the bus, the store, the compute thread and the clock.

Source: Mooncake (FAST'25), section 5.2 (layer-wise prefill) and figure 4.
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
from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, StartPrefill
from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.kv import KvLoaded, PrefillResult
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.store.errors import StoreError, StoreFull
from halfmoon.workers.machines import (
    Announce,
    AnnounceRequested,
    OrderCancelled,
    Report,
    TakeTokens,
    TokensTaken,
    WorkerStopped,
)
from halfmoon.workers.prefill.actions import (
    Action,
    BeginSpan,
    CommitPrompt,
    ComputePrompt,
    DrawFirstToken,
    EndOrder,
    EndPush,
    FailLoads,
    LoadLayers,
    PauseOrder,
    ReserveSlots,
    SendLayer,
    SendResult,
    StartFetch,
    StartPush,
    StopComputing,
)
from halfmoon.workers.prefill.cache_window import CacheWindow
from halfmoon.workers.prefill.computation import OrderAborted, PromptComputation
from halfmoon.workers.prefill.events import (
    BlocksFetched,
    ComputingStopped,
    Event,
    FetchFailed,
    FirstTokenDrawn,
    LayersFetched,
    LoadFailed,
    OpenPushFailed,
    PauseEnded,
    PrefillOrdered,
    PromptComputed,
    PushClosed,
    PushFailed,
    PushOpened,
    ReserveSlotsFailed,
    SlotsReserved,
)
from halfmoon.workers.prefill.layer_progress import LayersMissing
from halfmoon.workers.prefill.spans import begin_prefill, end_prefill
from halfmoon.workers.prefill.state import PrefillState
from halfmoon.workers.sample_requests import next_token
from halfmoon.workers.worker import Worker

log = logging.getLogger("halfmoon.prefill")


class PrefillWorker(Worker):
    """See the module. Each action that takes time is a task, which ends in `_hear`."""

    role = "prefill"

    async def prepare(self) -> None:
        config = self.config
        self.state = PrefillState(
            worker_id=config.worker_id,
            incarnation=self.incarnation,
            layout=config.layout,
            kv_blocks=config.kv_blocks,
            has_store=self.store is not None,
            prepared_max=config.prepared_max,
            chunk_tokens=config.chunk_tokens,
            stream_layers=config.stream_layers,
        )
        #: By order: what is asked for it and ends with it.
        self._asking: dict[str, set[asyncio.Task[None]]] = {}
        self._spans: dict[str, OpenSpan] = {}
        #: Of the order that has the turn: the logits of its last prompt token.
        self._logits: object = None
        #: Follows PromptComputed, and is done by the same task: a task of its own costs more than the draw.
        self._drawing: DrawFirstToken | None = None
        self._computation: PromptComputation | None = None
        self._releasing: set[asyncio.Task[None]] = set()
        self._pool = await self.store.attach() if self.store else None
        if self.store:
            await self.bus.subscribe(
                subjects.kv(config.worker_id, KvLoaded.__name__, config.node_id), KvLoaded, self._on_loaded
            )

    def obey(self, decision: Decision) -> None:
        now_ns = time.monotonic_ns()
        match decision:
            case StartPrefill():
                self._hear(PrefillOrdered(at_ns=now_ns, order=decision))
            case CancelOrder():
                self._hear(OrderCancelled(at_ns=now_ns, order_id=decision.order_id))
            case AnnounceYourself():
                self._hear(AnnounceRequested(at_ns=now_ns))
            case _:
                pass  # not for a prefill worker

    def heartbeat(self) -> WorkerHeartbeat:
        return self.state.heartbeat(self.obeyed_seq)

    def orders_open(self) -> int:
        return len(self.state.jobs)

    def prompt_tokens_max(self) -> int:
        return self.config.context_tokens_max if self.state.outgrows_cache else 0

    def kv_blocks_used(self) -> int:
        return self.state.kv_blocks_used

    async def release_all(self) -> None:
        self._hear(WorkerStopped(at_ns=time.monotonic_ns()))
        await asyncio.gather(*self._releasing)

    def _on_loaded(self, message: KvLoaded) -> None:
        self._hear(LayersFetched(at_ns=time.monotonic_ns(), order_id=message.order_id, layer=message.layer))

    # --- the machine ----------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        """On the loop. No action calls back before it returns."""
        for action in self.state.on(event):
            self._obey_action(action)

    def _tell(self, event: Event) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are being stopped
            self._loop.call_soon_threadsafe(self._hear, event)

    def _obey_action(self, action: Action) -> None:
        match action:
            case SendLayer():
                self._push_layer(action)
            case CommitPrompt():
                self.spawn(self._commit(action))
            case TakeTokens():
                self._ask(action.order_id, self._take_tokens(action))
            case BeginSpan():
                self._begin_span(action)
            case ReserveSlots():
                self._ask(action.order_id, self._open_put(action))
            case PauseOrder():
                self._ask(action.order_id, self._pause(action))
            case StartFetch():
                self._ask(action.order_id, self._fetch(action))
            case StartPush():
                self.spawn(self._open_push(action))
            case ComputePrompt():
                self._begin_computing(action)
            case LoadLayers() | FailLoads() | StopComputing():
                self._steer_computing(action)
            case DrawFirstToken():
                self._drawing = action
            case SendResult():
                self._send_result(action)
            case EndPush():
                self.spawn(self._close_push(action))
            case Report():
                self.report(action.event)
            case EndOrder():
                self._end_order(action)
            case Announce():
                self.announce()
            case _:
                assert_never(action)

    def _ask(self, order_id: str, work: Coroutine[None, None, None]) -> None:
        """As a task that ends with the order."""
        asking = self._asking.setdefault(order_id, set())
        task = self.spawn(work)
        asking.add(task)
        task.add_done_callback(asking.discard)

    def _traceparent(self, order_id: str) -> str:
        span = self._spans.get(order_id)
        return span.traceparent if span is not None else ""

    # --- preparing ------------------------------------------------------------------------------------------

    async def _take_tokens(self, action: TakeTokens) -> None:
        reply = await self.inbox.take(action.frontend_id, action.request_id, action.order_id, "prefill")
        self._hear(TokensTaken(at_ns=time.monotonic_ns(), order_id=action.order_id, reply=reply))

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
                action.order_id, action.block_keys, blocks=action.blocks, tenant=action.tenant
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
        self._hear(event)

    async def _pause(self, action: PauseOrder) -> None:
        await asyncio.sleep(action.pause_ns / SECOND_NS)
        self._hear(PauseEnded(at_ns=time.monotonic_ns(), order_id=action.order_id))

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
                traceparent=self._traceparent(order_id),
            )
        except (StoreError, BusError) as problem:
            log.warning("order %s: fetch from %s failed (%s): computed instead", order_id, source, problem)
            event = FetchFailed(at_ns=time.monotonic_ns(), order_id=order_id, reason=str(problem))
        else:
            event = BlocksFetched(
                at_ns=time.monotonic_ns(),
                order_id=order_id,
                source_node_id=fetched.source_node_id,
                moved_bytes=fetched.bytes,
                elapsed_ns=fetched.elapsed_ns,
            )
        self._hear(event)

    # --- computing ------------------------------------------------------------------------------------------

    async def _open_push(self, action: StartPush) -> None:
        assert self.store is not None
        event: PushOpened | OpenPushFailed
        try:
            await self.store.open_push(
                action.order_id,
                action.request_id,
                target_node_id=action.target_node_id,
                decode_worker_id=action.decode_worker_id,
            )
        except (StoreError, BusError) as problem:
            event = OpenPushFailed(
                at_ns=time.monotonic_ns(),
                order_id=action.order_id,
                reason=str(problem),
                full=isinstance(problem, StoreFull),
            )
        else:
            event = PushOpened(at_ns=time.monotonic_ns(), order_id=action.order_id)
        self._hear(event)

    def _begin_computing(self, action: ComputePrompt) -> None:
        # Made at once: actions that follow may stop it before its task has begun.
        layout = self.config.layout
        window = CacheWindow(
            layout.blocks(len(action.token_ids)),
            room=self.config.kv_blocks,
            each=layout.segment_tokens // layout.block_tokens,
        )
        computation = self._computation = PromptComputation(
            action,
            engine=self.engine,
            pool=self._pool,
            layout=layout,
            window=window,
            copies=self._copies,
            tell=self._tell,
        )
        self.spawn(self._compute_prompt(computation, window.blocks))

    async def _compute_prompt(self, computation: PromptComputation, blocks: int) -> None:
        order_id = computation.order_id
        cache = self.engine.allocator.allocate(blocks)
        event: PromptComputed | LoadFailed | ComputingStopped
        try:
            self._logits = await self.compute(computation.run, cache)
            if computation.reads_pool:
                # A lease that ended meanwhile (the process stood still) gave others the slots that were attended to.
                assert self.store is not None
                await self.store.require_held(order_id)
            finished_at_ns = time.time_ns()
            event = PromptComputed(
                at_ns=time.monotonic_ns(), order_id=order_id, finished_at_ns=finished_at_ns
            )
        except (LayersMissing, StoreError) as problem:
            event = LoadFailed(at_ns=time.monotonic_ns(), order_id=order_id, reason=str(problem))
        except OrderAborted:
            event = ComputingStopped(at_ns=time.monotonic_ns(), order_id=order_id)
        finally:
            self.engine.allocator.free(cache)
        self._hear(event)
        if self._drawing is not None:
            drawing, self._drawing = self._drawing, None
            await self._draw_first_token(drawing)

    def _steer_computing(self, action: LoadLayers | FailLoads | StopComputing) -> None:
        computation = self._computation
        assert computation is not None, action
        assert computation.order_id == action.order_id, (computation.order_id, action)
        match action:
            case LoadLayers():
                computation.loads.fetched_up_to(action.layer)
            case FailLoads():
                computation.loads.fail(action.reason)
            case StopComputing():
                computation.stop()
            case _:
                assert_never(action)

    def _push_layer(self, action: SendLayer) -> None:
        assert self.store is not None
        self.store.push(
            action.order_id, layer=action.layer, first_block=action.first_block, blocks=action.blocks
        )

    async def _commit(self, action: CommitPrompt) -> None:
        assert self.store is not None
        with contextlib.suppress(StoreError, BusError):  # not shared, then; the request itself goes on
            await self.store.commit(action.order_id, first_block=action.first_block, blocks=action.blocks)

    async def _draw_first_token(self, action: DrawFirstToken) -> None:
        logits, self._logits = self._logits, None
        first = await self.compute(next_token, self.engine, logits, action.sampling, action.token_ids, [])
        self._hear(FirstTokenDrawn(at_ns=time.monotonic_ns(), order_id=action.order_id, first=first))

    # --- ending ---------------------------------------------------------------------------------------------

    def _send_result(self, action: SendResult) -> None:
        subject = subjects.kv(action.decode_worker_id, PrefillResult.__name__, self.config.worker_id)
        self.bus.publish_soon(subject, action.result, message_id=f"{action.result.order_id}-result")

    async def _close_push(self, action: EndPush) -> None:
        assert self.store is not None
        order_id = action.order_id
        event: PushClosed | PushFailed
        try:
            pushed = await self.store.close_push(order_id, traceparent=self._traceparent(order_id))
        except (StoreError, BusError) as problem:
            event = PushFailed(at_ns=time.monotonic_ns(), order_id=order_id, reason=str(problem))
        else:
            event = PushClosed(
                at_ns=time.monotonic_ns(),
                order_id=order_id,
                moved_bytes=pushed.bytes,
                elapsed_ns=pushed.elapsed_ns,
            )
        self._hear(event)

    def _end_order(self, action: EndOrder) -> None:
        span = self._spans.pop(action.order_id, None)
        if span is not None and self.tracing is not None:
            end_prefill(self.tracing, span, action)
        asking = self._asking.pop(action.order_id, set())
        if asking or self.store is not None:
            releasing = self.spawn(self._release(action.order_id, asking))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    async def _release(self, order_id: str, asking: set[asyncio.Task[None]]) -> None:
        """Slots asked for after the release would stay reserved: first nothing is asked any more."""
        under_way = [task for task in asking if not task.done()]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        if self.store is not None:
            with contextlib.suppress(StoreError, BusError):  # the lease's own end takes care of it
                await self.store.release(order_id)
