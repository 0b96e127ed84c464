"""The orders of a decode worker: their tokens, their KVCache, their admission, their end.

An order waits for its tokens (from the frontend), its KV (`TransferOpened` names slots of the node's pool,
`KvReady` says which layers of which blocks are readable there; a second thread copies them into the engine's
cache while the batch steps) and its first token (`PrefillResult`). Then the worker checks the SLO once more,
sends the first token on, and lets the sequence join the batch (`halfmoon.workers.decode.worker`). Exactly one
of RequestFinished, DecodeRefused and DecodeFailed answers it, unless it was cancelled.

Source: Mooncake (FAST'25), section 3 (double check before decode).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque

from halfmoon.bus.errors import BusError
from halfmoon.bus.tail import StreamTail
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, StartDecode
from halfmoon.schemas.events import DecodeFailed, DecodeRefused, RequestFinished, WorkerHeartbeat
from halfmoon.schemas.keys import unpack_tokens
from halfmoon.schemas.kv import KvMessage, KvReady, PrefillResult, TransferFailed, TransferOpened
from halfmoon.schemas.tokens import ResendReply, ResendRequest
from halfmoon.store.errors import StoreError
from halfmoon.workers.decode.deliveries import Deliveries
from halfmoon.workers.decode.kv_loader import KvLoading
from halfmoon.workers.decode.sequence import Sequence, Stage
from halfmoon.workers.decode.shared_output import share_output, shares_output
from halfmoon.workers.decode.spans import decoded
from halfmoon.workers.decode.step_times import StepTimes
from halfmoon.workers.sample_requests import end_ids, params_of
from halfmoon.workers.token_inbox import refusal
from halfmoon.workers.worker import Worker

#: KV messages may overtake the StartDecode order they belong to (another stream): so many orders' are kept.
EARLY_ORDERS_MAX = 256
#: Finished orders whose tokens can still be sent again.
FINISHED_MAX = 512
#: A request that ends with its first token lets the last layers of its KV arrive (they join the pool).
LAST_LAYERS_S = 0.5


class DecodeOrders(Worker):
    """See the module; `DecodeWorker` adds the batch."""

    role = "decode"

    async def prepare(self) -> None:
        self._open: dict[str, Sequence] = {}
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: list[Sequence] = []
        #: The batch that the compute thread works on: what ends meanwhile keeps its blocks until the step is
        #: over.
        self._in_step: list[Sequence] = []
        self._swapped: deque[Sequence] = deque()
        self._finished_orders: OrderedDict[str, Sequence] = OrderedDict()
        self._early: OrderedDict[str, list[KvMessage]] = OrderedDict()
        self._wake = asyncio.Event()
        self._times = StepTimes(self.config.profile)
        self._deliveries = Deliveries(self.bus, self.config.worker_id)
        if self.store is not None:
            self.store.restarted.append(self._memory_gone)
        self._pool = await self.store.attach() if self.store else None
        self._loading = (
            KvLoading(self.engine, self._pool, self._copies, self.config.layout.layers, self._copied)
            if self._pool is not None
            else None
        )
        await self.bus.serve(subjects.resend(self.config.worker_id), ResendRequest, self._resend)
        self.spawn(self._follow_kv(await self.bus.open_kv(self.config.worker_id)))

    def obey(self, decision: Decision) -> None:
        match decision:
            case StartDecode():
                if decision.order_id not in self._open and decision.order_id not in self._finished_orders:
                    self._begin(decision)
            case CancelOrder():
                if (sequence := self._open.get(decision.order_id)) is not None:
                    self._drop(sequence)
                self._early.pop(decision.order_id, None)
            case AnnounceYourself():
                for sequence in list(self._open.values()):
                    self._drop(sequence)
                self.announce()
            case _:
                pass  # not for a decode worker

    def heartbeat(self) -> WorkerHeartbeat:
        steps, step_ns, sequences, context = self._times.take()
        return WorkerHeartbeat(
            worker_id=self.config.worker_id,
            incarnation=self.incarnation,
            queued=len(self._waiting) + len(self._swapped),
            running=len(self._running),
            kv_blocks_used=self.config.kv_blocks - self.engine.allocator.free_blocks,
            steps=steps,
            step_ns=step_ns,
            step_sequences=sequences,
            step_context_tokens=context,
            orders=list(self._open),
            lacking=[order_id for order_id, sequence in self._waiting.items() if self._lacks(sequence)],
            obeyed_seq=self.obeyed_seq,
        )

    def _lacks(self, sequence: Sequence) -> bool:
        """Whether something of it has yet to be heard of."""
        if sequence.result is None:
            return True
        return self._loading is not None and not sequence.kv_announced(self.config.layout.layers)

    def orders_open(self) -> int:
        return len(self._open)

    async def release_all(self) -> None:
        for sequence in list(self._open.values()):
            self._drop(sequence)
            await self._release(sequence.order_id)

    # --- an order arrives -----------------------------------------------------------------------------------

    def _begin(self, order: StartDecode) -> None:
        sequence = Sequence(order, time.monotonic_ns())
        self._open[order.order_id] = sequence
        self._waiting[order.order_id] = sequence
        self.spawn(self._take(sequence))
        for message in self._early.pop(order.order_id, ()):
            self._on_kv(sequence, message)

    async def _take(self, sequence: Sequence) -> None:
        order = sequence.order
        reply = await self.inbox.take(order.frontend_id, order.request_id, order.order_id, "decode")
        if sequence.stage is Stage.ENDED:
            return
        if reply is None or reply.gone:
            self._fail(sequence, refusal(reply), retryable=reply is None)
            return
        sequence.prompt = unpack_tokens(reply.token_ids)
        sequence.replay = unpack_tokens(reply.output_ids)
        sequence.sampling = reply.sampling
        sequence.params = params_of(reply.sampling)
        sequence.end_ids = end_ids(self.engine, reply.sampling)
        sequence.block_keys, sequence.root_key = reply.block_keys, reply.root_key
        sequence.tenant, sequence.traceparent = reply.tenant, reply.traceparent
        sequence.max_tokens = reply.max_tokens or order.max_tokens
        sequence.taken = True
        self._advance(sequence)

    async def _follow_kv(self, reader: StreamTail) -> None:
        async for message in self.bus.follow_kv(reader):
            sequence = self._open.get(message.order_id)
            if sequence is not None:
                self._on_kv(sequence, message)
            elif message.order_id not in self._finished_orders:
                self._early.setdefault(message.order_id, []).append(message)
                while len(self._early) > EARLY_ORDERS_MAX:
                    self._early.popitem(last=False)

    def _on_kv(self, sequence: Sequence, message: KvMessage) -> None:
        match message:
            case TransferOpened() | KvReady():
                if self._loading is not None:
                    self._loading.note(sequence, message)
            case PrefillResult():
                sequence.result = message
            case TransferFailed():
                self._fail(sequence, f"transfer: {message.reason}", retryable=True)
                return
            case _:
                return
        self._advance(sequence)

    def _advance(self, sequence: Sequence) -> None:
        """Do whatever has become possible for a waiting sequence."""
        if sequence.stage is not Stage.WAITING:
            return
        if sequence.taken and sequence.result is not None and not sequence.output:
            if not self._admit(sequence):
                return
            self._emit_first(sequence)
            if sequence.finish_reason:
                self._finish(sequence)
                return
        if self._loading is not None and (sequence.table or not self._swapped):
            self._loading.load(sequence)
        if sequence.taken and sequence.output and self._kv_here(sequence):
            if not sequence.ready_wall_ns:
                sequence.ready_wall_ns = time.time_ns()
            self._wake.set()

    def _kv_here(self, sequence: Sequence) -> bool:
        layers = self.config.layout.layers
        return layers == 0 or sequence.kv_complete(layers)

    def _memory_gone(self) -> None:
        """The node's store agent restarted: what was on its way through the pool is lost, what runs is not."""
        for sequence in list(self._waiting.values()):
            if not self._kv_here(sequence):
                self._fail(sequence, "the node's store agent restarted", retryable=True)

    def _admit(self, sequence: Sequence) -> bool:
        """The double check: would the batch still hold this request's SLO, by what steps take here and now?"""
        order = sequence.order
        if sequence.refusal_checked or order.placement > 1 or not order.tbt_slo_ns:
            return True
        sequence.refusal_checked = True
        context = sum(s.length for s in self._running) + len(sequence.prompt)
        predicted_ns = self._times.predict(len(self._running) + 1, context)
        if predicted_ns <= order.tbt_slo_ns:
            return True
        self._end(sequence)
        decoded(self.tracing, sequence, self.config.worker_id, error="over the SLO")
        self.report(
            DecodeRefused(
                order_id=order.order_id,
                request_id=order.request_id,
                worker_id=self.config.worker_id,
                reason=f"a step would take {predicted_ns // 1_000_000} ms, over the SLO",
                predicted_tbt_ns=predicted_ns,
            )
        )
        return False

    def _emit_first(self, sequence: Sequence) -> None:
        assert sequence.result is not None
        first = sequence.next_known() or sequence.result.first
        if sequence.add(first, time.monotonic_ns()):
            self._deliveries.send([(sequence, 0)])

    def _copied(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.ENDED:
            if sequence.loading == 0:
                self._free(sequence)
            return
        if self._kv_here(sequence):
            self.spawn(self._release(sequence.order_id))  # the pool's slots have done their duty
        self._advance(sequence)

    def _resend(self, request: ResendRequest) -> ResendReply:
        sequence = self._open.get(request.order_id) or self._finished_orders.get(request.order_id)
        return self._deliveries.again(request, sequence)

    # --- the end of an order --------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence) -> None:
        result = sequence.result
        assert result is not None
        decoded(self.tracing, sequence, self.config.worker_id)
        self.report(
            RequestFinished(
                order_id=sequence.order_id,
                request_id=sequence.order.request_id,
                worker_id=self.config.worker_id,
                finish_reason=sequence.finish_reason,  # type: ignore[arg-type]
                completion_tokens=len(sequence.output),
                ttft_ns=result.queue_ns + result.compute_ns,  # transfers overlap both
                tbt_ns=sequence.tbt_ns(),
                decode_ns=time.monotonic_ns() - sequence.started_ns if sequence.started_ns else 0,
                preemptions=sequence.preemptions,
            )
        )
        self._finished_orders[sequence.order_id] = sequence
        while len(self._finished_orders) > FINISHED_MAX:
            self._finished_orders.popitem(last=False)
        if self.store is not None and shares_output(self.config.layout, sequence):
            sequence.stage = Stage.ENDED
            self._forget(sequence)
            self.spawn(self._share_output(sequence))
        else:
            self._end(sequence)

    def _fail(self, sequence: Sequence, reason: str, *, retryable: bool) -> None:
        if sequence.stage is Stage.ENDED:
            return
        self._end(sequence)
        decoded(self.tracing, sequence, self.config.worker_id, error=reason)
        self.report(
            DecodeFailed(
                order_id=sequence.order_id,
                request_id=sequence.order.request_id,
                worker_id=self.config.worker_id,
                reason=reason[:500],
                retryable=retryable,
            )
        )

    def _drop(self, sequence: Sequence) -> None:
        """Cancelled by the conductor: no answer."""
        decoded(self.tracing, sequence, self.config.worker_id, cancelled=True)
        sequence.finish_reason = sequence.finish_reason or "abort"
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.ENDED:
            return
        sequence.stage = Stage.ENDED
        self._forget(sequence)
        if sequence.loading == 0 and sequence not in self._in_step:
            self._free(sequence)
        if self.store is not None and not self._kv_here(sequence):
            pause_s = LAST_LAYERS_S if sequence.finish_reason in ("stop", "length") else 0.0
            self.spawn(self._release(sequence.order_id, pause_s))

    def _forget(self, sequence: Sequence) -> None:
        self._open.pop(sequence.order_id, None)
        self._waiting.pop(sequence.order_id, None)
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence in self._swapped:
            self._swapped.remove(sequence)
        sequence.swapped = []

    def _free(self, sequence: Sequence) -> None:
        if sequence.table:
            self.engine.allocator.free(sequence.table)
            sequence.table = []
        self._load_waiting()
        self._wake.set()

    def _load_waiting(self) -> None:
        for waiting in list(self._waiting.values()):
            if waiting.to_load:
                self._advance(waiting)

    async def _release(self, order_id: str, pause_s: float = 0.0) -> None:
        if pause_s:
            await asyncio.sleep(pause_s)
        if self.store is not None:
            with contextlib.suppress(StoreError, BusError):  # the lease's own end takes care of it
                await self.store.release(order_id)

    async def _share_output(self, sequence: Sequence) -> None:
        assert self.store is not None
        assert self._pool is not None
        try:
            await share_output(
                self.store,
                self._pool,
                self.engine.cache,
                self.config.layout,
                sequence,
                lambda copy: self._loop.run_in_executor(self._copies, copy),
            )
        finally:
            self._free(sequence)
