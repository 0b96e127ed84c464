"""The prefill worker: computes the KV of prompts and streams it, layer by layer, to the decode node.

The shell of `PrefillState`: it obeys the machine's actions in their order, and feeds it an event when each one ends.
The machine decides; here are the bus, the store, the compute thread and the clock.

Source: Mooncake (FAST'25), section 5.2 (layer-wise prefill) and figure 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, assert_never

from halfmoon.bus.errors import BusError
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, StartPrefill, StartStage
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.store import reference_hold
from halfmoon.store.errors import ChannelError, StoreError, StoreFull
from halfmoon.workers.machines import (
    Announce,
    AnnounceRequested,
    AnswerResend,
    Deliver,
    OrderCancelled,
    Report,
    TakeTokens,
)
from halfmoon.workers.prefill.actions import (
    Action,
    BeginSpan,
    CommitPrompt,
    ComputePrompt,
    ComputeStage,
    DrawFirstToken,
    DropStage,
    EndOrder,
    EndPush,
    FailLoads,
    FailReference,
    FetchReference,
    LoadLayers,
    LoadReference,
    PauseOrder,
    ReserveReference,
    ReserveSlots,
    SendLayer,
    SendResult,
    StartFetch,
    StartPush,
    StopComputing,
)
from halfmoon.workers.prefill.cache_window import CacheWindow, PromptMemory
from halfmoon.workers.prefill.computation import OrderAborted, PromptComputation
from halfmoon.workers.prefill.events import (
    ComputingStopped,
    Event,
    FirstTokenDrawn,
    LoadFailed,
    OpenPushFailed,
    PrefillOrdered,
    PromptComputed,
    PushClosed,
    PushFailed,
    PushOpened,
    StageEnded,
    StageLost,
    StageOrdered,
)
from halfmoon.workers.prefill.kept_prompts import KeptPrompts
from halfmoon.workers.prefill.layer_progress import LayersMissing, StageGone
from halfmoon.workers.prefill.prompt_worker import PromptWorker
from halfmoon.workers.prefill.state import PrefillState
from halfmoon.workers.sample_requests import next_token

if TYPE_CHECKING:
    from halfmoon.workers.model.prompt_rows import PromptScores
    from halfmoon.workers.prefill.layer_stages.computation import StageComputation
    from halfmoon.workers.prefill.layer_stages.listener import StageListener


class PrefillWorker(PromptWorker):
    """See the module. Each action that takes time is a task, which ends in `hear`."""

    role = "prefill"
    answers = True
    state: PrefillState

    async def prepare(self) -> None:
        config = self.config
        self.state = PrefillState(
            self.facts(self.engine.config.eos_token_ids),
            prepared_max=config.prepared_max,
            chunk_tokens=config.chunk_tokens,
            stream_layers=not config.no_stream_layers,
        )
        await self.prepare_prompts()
        #: Of the order that has the turn: the logits of its last prompt token, and the scores of its other tokens.
        self._logits: object = None
        self._scores: PromptScores | None = None
        self._kept = KeptPrompts()
        #: Follows PromptComputed, and is done by the same task: a task of its own costs more than the draw.
        self._drawing: DrawFirstToken | None = None
        #: The one that has not begun, while another's task still runs; that task goes on with it.
        self._next: tuple[PromptComputation, int] | None = None
        self._computing = False
        self._computation: PromptComputation | StageComputation | None = None
        await self.serve_resends()
        self._stages: StageListener | None = None
        if (channels := self.config.stage_channels) is not None:
            # torch, which the null engine does without
            from halfmoon.workers.prefill.layer_stages.listener import StageListener

            self._stages = StageListener(channels.hello, channels.options)

    def obey(self, decision: Decision) -> None:
        now_ns = time.monotonic_ns()
        match decision:
            case StartPrefill():
                self.hear(PrefillOrdered(at_ns=now_ns, order=decision))
            case StartStage():
                self.hear(StageOrdered(at_ns=now_ns, order=decision))
            case CancelOrder():
                self.hear(OrderCancelled(at_ns=now_ns, order_id=decision.order_id))
            case AnnounceYourself():
                self.hear(AnnounceRequested(at_ns=now_ns))
            case _:
                pass  # not for a prefill worker

    def orders_open(self) -> int:
        return len(self.state.jobs)

    def prompt_tokens_max(self) -> int:
        return self.config.context_tokens_max if self.state.outgrows_cache else 0

    def stage_addresses(self) -> list[str]:
        return self._stages.addresses if self._stages is not None else []

    def activation_bytes(self) -> int:
        return int(self.engine.activation(1)[0].nbytes) if self._stages is not None else 0

    async def release_all(self) -> None:
        await super().release_all()
        if self._stages is not None:
            await asyncio.to_thread(self._stages.close)

    # --- the machine ----------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are being stopped
            self._loop.call_soon_threadsafe(self.hear, event)

    def obey_action(self, action: Action) -> None:
        match action:
            case SendLayer():
                self._push_layer(action)
            case StartPush():
                self.spawn(self._open_push(action))
            case ComputePrompt():
                self._begin_computing(action)
            case ComputeStage():
                self._begin_stage(action)
            case DropStage():
                if self._stages is not None:
                    self._stages.drop(action.order_id)
            case LoadLayers() | FailLoads() | LoadReference() | FailReference() | StopComputing():
                self._steer_computing(action)
            case DrawFirstToken():
                self._drawing = action
            case SendResult():
                self._send_result(action)
            case Deliver():
                self.deliver(action)
            case EndPush():
                self.spawn(self._close_push(action))
            case Report():
                self.report(action.event)
            case Announce():
                self.announce()
            case (
                CommitPrompt()
                | TakeTokens()
                | BeginSpan()
                | ReserveSlots()
                | PauseOrder()
                | StartFetch()
                | ReserveReference()
                | FetchReference()
                | EndOrder()
            ):
                self.prepare_further(action)
            case AnswerResend():
                raise AssertionError("a reply to nobody")
            case _:
                assert_never(action)

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
                tokens=action.prompt_tokens,
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
        self.hear(event)

    def _begin_computing(self, action: ComputePrompt) -> None:
        # Made at once: actions that follow may stop it before its task has begun.
        layout = self.config.layout
        window = CacheWindow(
            layout.blocks(len(action.token_ids)),
            room=self.config.kv_blocks,
            each=layout.segment_blocks,
        )
        computation = self._computation = PromptComputation(
            action,
            PromptMemory(engine=self.engine, pool=self._pool, layout=layout, window=window),
            copies=self._copies,
            tell=self._tell,
            channels=self.config.stage_channels,
            kept=self._kept,
        )
        self._next = computation, window.blocks
        if not self._computing:
            self._computing = True
            self.spawn(self._compute_prompts())

    async def _compute_prompts(self) -> None:
        """One after the other, until the machine has no other ready."""
        try:
            while self._next is not None:
                (computation, blocks), self._next = self._next, None
                await self._compute_prompt(computation, blocks)
        finally:
            self._computing = False

    async def _compute_prompt(self, computation: PromptComputation, blocks: int) -> None:
        order_id = computation.order_id
        cache = self.engine.allocator.allocate(blocks)
        event: PromptComputed | LoadFailed | ComputingStopped | StageLost
        try:
            self._logits, self._scores = await self.compute(computation.run, cache), computation.scores
            if self.store is not None:
                # A lease that ended meanwhile (the process stood still) gave others the slots that were read.
                self.store.require_unchanged(order_id)
                if computation.similar is not None:
                    self.store.require_unchanged(reference_hold(order_id))
            finished_at_ns = time.time_ns()
            event = PromptComputed(
                at_ns=time.monotonic_ns(),
                order_id=order_id,
                finished_at_ns=finished_at_ns,
                stage_wait_ns=computation.stage_wait_ns,
                kept=computation.was_kept,
                similar=computation.similar,
            )
        except (LayersMissing, StoreError) as problem:
            event = LoadFailed(at_ns=time.monotonic_ns(), order_id=order_id, reason=str(problem))
        except StageGone as gone:
            event = StageLost(
                at_ns=time.monotonic_ns(), order_id=order_id, stage_id=gone.worker_id, reason=str(gone)
            )
        except OrderAborted:
            event = ComputingStopped(at_ns=time.monotonic_ns(), order_id=order_id)
        finally:
            self.engine.allocator.free(cache)
        self.hear(event)
        if self._drawing is not None:
            drawing, self._drawing = self._drawing, None
            await self._draw_first_token(drawing)

    def _begin_stage(self, action: ComputeStage) -> None:
        from halfmoon.workers.prefill.layer_stages.computation import StageComputation

        # Without a listener no order of another worker's prompt comes.
        assert self._stages is not None, action
        computation = StageComputation(
            action, engine=self.engine, layout=self.config.layout, listener=self._stages
        )
        self._computation = computation
        self.spawn(self._compute_stage(computation, self.config.layout.blocks(action.prompt_tokens)))

    async def _compute_stage(self, computation: StageComputation, blocks: int) -> None:
        cache, reason = self.engine.allocator.allocate(blocks), ""
        try:
            await self.compute(computation.run, cache)
        except ChannelError as problem:
            reason = str(problem)
        finally:
            self.engine.allocator.free(cache)
        self.hear(
            StageEnded(
                at_ns=time.monotonic_ns(),
                order_id=computation.order_id,
                elapsed_ns=computation.elapsed_ns,
                compute_ns=computation.compute_ns,
                reason=reason,
            )
        )

    def _steer_computing(
        self, action: LoadLayers | FailLoads | LoadReference | FailReference | StopComputing
    ) -> None:
        computation = self._computation
        assert computation is not None, action
        assert computation.order_id == action.order_id, (computation.order_id, action)
        match action:
            case StopComputing():
                computation.stop()
            case _ if not isinstance(computation, PromptComputation):
                raise AssertionError(("a part of a prompt loads nothing", action))
            case LoadLayers():
                computation.loads.fetched_up_to(action.layer)
            case FailLoads():
                computation.loads.fail(action.reason)
            case LoadReference():
                computation.reference_loads.fetched_up_to(action.layer)
            case FailReference():
                computation.reference_loads.fail(action.reason)
            case _:
                assert_never(action)

    def _push_layer(self, action: SendLayer) -> None:
        assert self.store is not None
        self.store.push(
            action.order_id,
            layer=action.layer,
            layers=action.layers,
            first_block=action.first_block,
            blocks=action.blocks,
        )

    async def _draw_first_token(self, action: DrawFirstToken) -> None:
        (logits, scores), self._logits, self._scores = (self._logits, self._scores), None, None
        first = await self.compute(
            next_token, self.engine, logits, action.sampling, action.token_ids, [], scores
        )
        self.hear(FirstTokenDrawn(at_ns=time.monotonic_ns(), order_id=action.order_id, first=first))

    # --- ending ---------------------------------------------------------------------------------------------

    def _send_result(self, action: SendResult) -> None:
        subject = subjects.kv(action.decode_worker_id, PrefillResult.__name__, self.config.worker_id)
        self.bus.publish_soon(subject, action.result, message_id=f"{action.result.order_id}-result")

    async def _close_push(self, action: EndPush) -> None:
        assert self.store is not None
        order_id = action.order_id
        event: PushClosed | PushFailed
        try:
            pushed = await self.store.close_push(order_id, traceparent=self.traceparent(order_id))
        except (StoreError, BusError) as problem:
            event = PushFailed(at_ns=time.monotonic_ns(), order_id=order_id, reason=str(problem))
        else:
            event = PushClosed(
                at_ns=time.monotonic_ns(),
                order_id=order_id,
                moved_bytes=pushed.bytes,
                elapsed_ns=pushed.elapsed_ns,
            )
        self.hear(event)
