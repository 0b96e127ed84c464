"""The decode worker: receives KV layer by layer, joins requests to the running batch between two steps, streams tokens.

An order waits for its tokens (from the frontend), its KV (`TransferOpened` names slots of the node's pool, `KvReady` says which
layers of which blocks are readable there; they are copied into the engine's cache by a second thread while the batch
steps) and its first token (`PrefillResult`). Then the worker checks the SLO once more and lets it join. When the cache has
no free block for a running sequence, the one that joined last is swapped out to host memory, bit by bit as it is, and
rejoins first: nothing is lost and nothing is computed twice.

A request whose earlier decode worker died comes with the tokens that the client has already. They are fed through decode
again, not delivered: so the rest is bit for bit what it would have been (see numerics in ARCHITECTURE.md).

Source: Mooncake (FAST'25), section 3 (continuous batching, double check); Orca (OSDI'22) for joining between steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, defaultdict, deque

import numpy as np

from halfmoon.bus.errors import BusError
from halfmoon.bus.reader import StreamReader
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, StartDecode
from halfmoon.schemas.events import DecodeFailed, DecodeRefused, DecodeStarted, RequestFinished, WorkerHeartbeat
from halfmoon.schemas.keys import chain_keys, unpack_tokens
from halfmoon.schemas.kv import KvMessage, KvReady, PrefillResult, TransferFailed, TransferOpened
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import Delivery, ResendReply, ResendRequest, TokensSampled
from halfmoon.store.errors import StoreError
from halfmoon.workers.sampled import end_ids, params_of, request_of, token_of
from halfmoon.workers.sequence import Sequence, Stage
from halfmoon.workers.step_times import StepTimes
from halfmoon.workers.worker import Worker

#: KV messages may overtake the StartDecode order they belong to (another stream): kept this many orders, at most.
EARLY_ORDERS_MAX = 256
#: Finished orders whose tokens can still be sent again.
FINISHED_MAX = 512
#: A request that ends with its first token lets the last layers of its KV arrive (they join the pool) before it releases.
LAST_LAYERS_S = 0.5


class DecodeWorker(Worker):
    """See the module."""

    role = "decode"

    async def prepare(self) -> None:
        self._open: dict[str, Sequence] = {}
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: list[Sequence] = []
        #: The batch that the compute thread works on: what ends meanwhile keeps its blocks until the step is over.
        self._in_step: list[Sequence] = []
        self._swapped: deque[Sequence] = deque()
        self._finished_orders: OrderedDict[str, Sequence] = OrderedDict()
        self._early: OrderedDict[str, list[KvMessage]] = OrderedDict()
        self._wake = asyncio.Event()
        self._times = StepTimes(self.config.profile)
        self._pool = await self.store.attach() if self.store else None
        await self.bus.serve(subjects.resend(self.config.worker_id), ResendRequest, self._resend)
        self.spawn(self._follow_kv(await self.bus.open_kv(self.config.worker_id)))
        self.spawn(self._run())

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
        )

    def orders_open(self) -> int:
        return len(self._open)

    async def release_all(self) -> None:
        for sequence in list(self._open.values()):
            self._drop(sequence)
            await self._release(sequence.order_id)

    # --- an order arrives -------------------------------------------------------------------------------------

    def _begin(self, order: StartDecode) -> None:
        sequence = Sequence(order, time.monotonic_ns())
        self._open[order.order_id] = sequence
        self._waiting[order.order_id] = sequence
        self.spawn(self._take(sequence))
        for message in self._early.pop(order.order_id, ()):
            self._on_kv(sequence, message)

    async def _take(self, sequence: Sequence) -> None:
        order = sequence.order
        reply = await self.take(order.frontend_id, order.request_id, order.order_id, "decode")
        if sequence.stage is Stage.ENDED:
            return
        if reply.gone:
            self._fail(sequence, "the frontend no longer wants it", retryable=False)
            return
        sequence.prompt = unpack_tokens(reply.token_ids)
        sequence.replay = unpack_tokens(reply.output_ids)
        sequence.sampling = reply.sampling
        sequence.params = params_of(reply.sampling)
        sequence.end_ids = end_ids(self.engine, reply.sampling)
        sequence.block_keys, sequence.root_key = reply.block_keys, reply.root_key
        sequence.max_tokens = reply.max_tokens or order.max_tokens
        sequence.taken = True
        self._advance(sequence)

    async def _follow_kv(self, reader: StreamReader) -> None:
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
            case TransferOpened():
                sequence.slots = list(message.slots)
                sequence.arrived = np.zeros((self.config.layout.layers, len(message.slots)), dtype=bool)
                for block in message.present:
                    sequence.to_load += [(layer, block) for layer in range(self.config.layout.layers)]
            case KvReady():
                for block in range(message.first_block, message.first_block + message.blocks):
                    sequence.to_load.append((message.layer, block))
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
        if sequence.arrived is not None and sequence.to_load:
            self._load(sequence)
        if sequence.taken and sequence.output and self._kv_here(sequence):
            if not sequence.ready_wall_ns:
                sequence.ready_wall_ns = time.time_ns()
            self._wake.set()

    def _kv_here(self, sequence: Sequence) -> bool:
        layers = self.config.layout.layers
        return layers == 0 or sequence.kv_complete(layers)

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
            self._deliver([(sequence, 0)])

    # --- KV from the node's pool into the engine's cache ------------------------------------------------------

    def _load(self, sequence: Sequence) -> None:
        assert sequence.arrived is not None
        blocks = len(sequence.slots)
        if not sequence.table:
            if self._swapped or not self.engine.allocator.can_allocate(blocks):
                return  # tried again whenever blocks become free
            sequence.table = list(self.engine.allocator.allocate(blocks))
        fresh = []
        for layer, block in sequence.to_load:
            if block < blocks and not sequence.arrived[layer, block]:
                sequence.arrived[layer, block] = True
                fresh.append((layer, block))
        sequence.to_load = []
        if fresh:
            sequence.loading += 1
            self._copies.submit(self._copy, sequence, fresh, list(sequence.slots), list(sequence.table))

    def _copy(self, sequence: Sequence, items: list[tuple[int, int]], slots: list[int], table: list[int]) -> None:
        """On the copy thread."""
        assert self._pool is not None
        for layer, block in items:
            self.engine.cache.write_block(layer, table[block], self._pool.layer_block(slots[block], layer))
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are being stopped
            self._loop.call_soon_threadsafe(self._copied, sequence, len(items))

    def _copied(self, sequence: Sequence, count: int) -> None:
        sequence.loading -= 1
        sequence.loaded += count
        if sequence.stage is Stage.ENDED:
            if sequence.loading == 0:
                self._free(sequence)
            return
        if sequence.kv_complete(self.config.layout.layers):
            self.spawn(self._release(sequence.order_id))  # the pool's slots have done their duty
        self._advance(sequence)

    # --- the batch --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._join()
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._make_room()
            batch = list(self._running)
            if not batch:
                continue
            self._in_step = batch
            started_ns = time.monotonic_ns()
            sampled = await self.compute(self._step, batch)
            now_ns = time.monotonic_ns()
            self._in_step = []
            self._times.observe(now_ns - started_ns, len(batch), sum(s.length for s in batch))
            self._after_step(batch, sampled, now_ns)
            if self.config.layout.layers == 0:
                await asyncio.sleep(0)  # an engine that computes nothing must not starve the loop

    async def _join(self) -> None:
        """Between two steps: swapped-out sequences first, then those whose KV is here, oldest first."""
        while self._swapped and len(self._running) < self.config.batch_max:
            sequence = self._swapped[0]
            if not self.engine.allocator.can_allocate(sequence.length // self.config.layout.block_tokens + 1):
                break
            self._swapped.popleft()
            await self._swap_in(sequence)
        if not self._swapped:
            self._load_waiting()
        for sequence in list(self._waiting.values()):
            if len(self._running) >= self.config.batch_max or self._swapped:
                break
            if sequence.taken and sequence.output and self._kv_here(sequence):
                del self._waiting[sequence.order_id]
                sequence.stage = Stage.RUNNING
                sequence.started_ns = time.monotonic_ns()
                self._running.append(sequence)
                assert sequence.result is not None
                self.report(
                    DecodeStarted(
                        order_id=sequence.order_id,
                        request_id=sequence.order.request_id,
                        worker_id=self.config.worker_id,
                        wait_ns=max(0, (sequence.ready_wall_ns or time.time_ns()) - sequence.result.finished_at_ns),
                    )
                )

    async def _make_room(self) -> None:
        """Every running sequence gets the block that its next token needs; the last that joined gives way."""
        if self.config.layout.layers == 0:
            return
        for sequence in list(self._running):
            while sequence.stage is Stage.RUNNING and sequence.length // self.config.layout.block_tokens >= len(
                sequence.table
            ):
                if self.engine.allocator.can_allocate(1):
                    self.engine.allocator.extend(sequence.table)
                elif not self._take_from_waiting():
                    await self._swap_out(self._running[-1])

    def _take_from_waiting(self) -> bool:
        """Blocks of a sequence that waits with a part of its KV: it loads again from the pool, whose slots it still holds."""
        for sequence in reversed(self._waiting.values()):
            if sequence.table and sequence.loading == 0 and not self._kv_here(sequence):
                assert sequence.arrived is not None
                loaded = np.argwhere(sequence.arrived)
                sequence.to_load += [(int(layer), int(block)) for layer, block in loaded]
                sequence.arrived[:] = False
                sequence.loaded = 0
                self._free(sequence)
                return True
        return False

    async def _swap_out(self, sequence: Sequence) -> None:
        cache = self.engine.cache
        layers = self.config.layout.layers

        def copy() -> list[np.ndarray]:
            held = [np.empty((layers, cache.layer_block_bytes), dtype=np.uint8) for _ in sequence.table]
            for block, rows in zip(sequence.table, held, strict=True):
                for layer in range(layers):
                    cache.read_block(layer, block, rows[layer])
            return held

        sequence.swapped = await self.compute(copy)
        if sequence.stage is Stage.ENDED:  # cancelled meanwhile
            return
        self._running.remove(sequence)
        self._free(sequence)
        sequence.stage = Stage.SWAPPED
        sequence.preemptions += 1
        self._swapped.appendleft(sequence)

    async def _swap_in(self, sequence: Sequence) -> None:
        cache, held = self.engine.cache, sequence.swapped
        table = list(self.engine.allocator.allocate(len(held)))

        def copy() -> None:
            for block, rows in zip(table, held, strict=True):
                for layer in range(self.config.layout.layers):
                    cache.write_block(layer, block, rows[layer])

        await self.compute(copy)
        if sequence.stage is Stage.ENDED:  # cancelled meanwhile
            self.engine.allocator.free(table)
            return
        sequence.table, sequence.swapped = table, []
        sequence.stage = Stage.RUNNING
        self._running.append(sequence)

    def _step(self, batch: list[Sequence]) -> list[SampledToken]:
        """On the compute thread: one token of each sequence. Known tokens (a replay) are not drawn."""
        logits = self.engine.decode(
            [s.output[-1] for s in batch], [s.length for s in batch], [s.table for s in batch]
        )
        requests = [request_of(self.engine, s.params, s.sampling, s.prompt, s.output) for s in batch]
        sampled = self.engine.sample_rows(logits, requests)
        return [
            s.next_known() or token_of(self.engine, one, s.sampling, logits[row])
            for row, (s, one) in enumerate(zip(batch, sampled, strict=True))
        ]

    def _after_step(self, batch: list[Sequence], sampled: list[SampledToken], now_ns: int) -> None:
        fresh: list[tuple[Sequence, int]] = []
        for sequence, token in zip(batch, sampled, strict=True):
            if sequence.stage is not Stage.RUNNING:
                continue  # ended during the step
            index = len(sequence.output)
            if sequence.add(token, now_ns):
                fresh.append((sequence, index))
        self._deliver(fresh)
        for sequence in batch:
            if sequence.stage is Stage.ENDED:
                self._free(sequence)
        for sequence in batch:
            if sequence.finish_reason and sequence.stage is Stage.RUNNING:
                self._finish(sequence)

    # --- deliveries -------------------------------------------------------------------------------------------

    def _deliver(self, fresh: list[tuple[Sequence, int]]) -> None:
        by_frontend: dict[str, list[Delivery]] = defaultdict(list)
        for sequence, index in fresh:
            by_frontend[sequence.order.frontend_id].append(sequence.delivery(index, self.config.worker_id))
        for frontend_id, deliveries in by_frontend.items():
            message = TokensSampled(worker_id=self.config.worker_id, deliveries=deliveries)
            self.spawn(self._send(subjects.tokens(frontend_id), message))

    async def _send(self, subject: str, message: TokensSampled) -> None:
        with contextlib.suppress(Exception):  # lost in a reconnect: the frontend asks again (`_resend`)
            await self.bus.publish(subject, message)

    def _resend(self, request: ResendRequest) -> ResendReply:
        sequence = self._open.get(request.order_id) or self._finished_orders.get(request.order_id)
        if sequence is None:
            return ResendReply(known=False)
        if len(sequence.output) <= request.index and not sequence.finish_reason:
            return ResendReply(known=True)
        return ResendReply(known=True, delivery=sequence.delivery(request.index, self.config.worker_id))

    # --- the end of an order ----------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence) -> None:
        result = sequence.result
        assert result is not None
        self.report(
            RequestFinished(
                order_id=sequence.order_id,
                request_id=sequence.order.request_id,
                worker_id=self.config.worker_id,
                finish_reason=sequence.finish_reason,  # type: ignore[arg-type]
                completion_tokens=len(sequence.output),
                ttft_ns=result.queue_ns + result.transfer_ns + result.compute_ns,
                tbt_ns=sequence.tbt_ns(),
                decode_ns=time.monotonic_ns() - sequence.started_ns if sequence.started_ns else 0,
                preemptions=sequence.preemptions,
            )
        )
        self._finished_orders[sequence.order_id] = sequence
        while len(self._finished_orders) > FINISHED_MAX:
            self._finished_orders.popitem(last=False)
        if self._shares_output(sequence):
            sequence.stage = Stage.ENDED
            self._forget(sequence)
            self.spawn(self._share_output(sequence))
        else:
            self._end(sequence)

    def _fail(self, sequence: Sequence, reason: str, *, retryable: bool) -> None:
        if sequence.stage is Stage.ENDED:
            return
        self._end(sequence)
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

    # --- generated blocks join the pool -----------------------------------------------------------------------

    def _shares_output(self, sequence: Sequence) -> bool:
        """In exact numerics generated KV is not what a prefill would give, so it is not shared."""
        layout = self.config.layout
        return bool(
            self.store is not None
            and layout.numerics == "fast"
            and sequence.root_key
            and sequence.table
            and sequence.length // layout.block_tokens > len(sequence.block_keys) // 16
        )

    async def _share_output(self, sequence: Sequence) -> None:
        """Whole blocks beyond the prompt's, as the next turn of the conversation will name them."""
        assert self.store is not None and self._pool is not None
        layout = self.config.layout
        known = len(sequence.block_keys) // 16
        tokens = (sequence.prompt + sequence.output)[: sequence.length]
        keys = chain_keys(sequence.root_key, tokens, layout.block_tokens)
        order_id = f"{sequence.order_id}-out"
        pool, cache = self._pool, self.engine.cache

        def copy(slots: list[int], present: set[int]) -> None:
            for index, slot in enumerate(slots):
                if index not in present:
                    for layer in range(layout.layers):
                        cache.read_block(layer, sequence.table[known + index], pool.layer_block(slot, layer))

        try:
            put = await self.store.open_put(order_id, keys[16 * known :], blocks=len(keys) // 16 - known)
            await self._loop.run_in_executor(self._copies, copy, list(put.slots), set(put.present))
            await self.store.commit(order_id, first_block=0, blocks=len(put.slots))
        except (StoreError, BusError):
            pass  # not shared, then; the answer has long been given
        finally:
            self._free(sequence)
            await self._release(order_id)

