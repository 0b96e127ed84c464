"""The prefill worker: computes the KV of prompts and streams it, layer by layer, to the decode node.

An order goes through: *take* (tokens from the frontend), *open* (slots in the own node's pool; blocks held
already are leased), *fetch* (blocks of other nodes, while earlier orders compute), *compute* (chunk by chunk;
cached layers are loaded by a second thread just ahead of the layer that computes; each finished layer is
copied to the pool and pushed),
*close* (everything pushed is readable at the decode node). PrefillFinished or PrefillFailed answers it, exactly once.

Source: Mooncake (FAST'25), section 5.2 (layer-wise prefill) and figure 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

from halfmoon.bus.errors import BusError
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, StartPrefill
from halfmoon.schemas.events import PrefillFailed, PrefillFinished, WorkerHeartbeat
from halfmoon.schemas.keys import unpack_tokens
from halfmoon.schemas.kv import KvLoaded, PrefillResult
from halfmoon.store.errors import StoreError
from halfmoon.workers.machines import refusal
from halfmoon.workers.prefill.job import Job, Stop, patiently
from halfmoon.workers.prefill.layer_progress import LayerLoads, LoadFailed
from halfmoon.workers.prefill.spans import begin_prefill, end_prefill
from halfmoon.workers.sample_requests import next_token
from halfmoon.workers.worker import Worker

log = logging.getLogger("halfmoon.prefill")


class PrefillWorker(Worker):
    """See the module. One order computes at a time; up to `prepared_max` more have their KV fetched
    meanwhile.
    """

    role = "prefill"

    async def prepare(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._queue: deque[Job] = deque()
        self._wake = asyncio.Event()
        self._pool = await self.store.attach() if self.store else None
        if self.store:
            await self.bus.subscribe(
                subjects.kv(self.config.worker_id, KvLoaded.__name__), KvLoaded, self._on_loaded
            )
        self.spawn(self._run())

    def obey(self, decision: Decision) -> None:
        match decision:
            case StartPrefill():
                if decision.order_id not in self._jobs and not self._stopped:
                    job = Job(decision, time.monotonic_ns())
                    self._jobs[decision.order_id] = job
                    self._queue.append(job)
                    self._prepare_some()
                    self._wake.set()
            case CancelOrder():
                if (known := self._jobs.get(decision.order_id)) is not None:
                    self._cancel(known)
            case AnnounceYourself():
                for open_job in list(self._jobs.values()):
                    self._cancel(open_job)
                self.announce()
            case _:
                pass  # not for a prefill worker

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            worker_id=self.config.worker_id,
            incarnation=self.incarnation,
            queued=len(self._queue),
            running=len(self._jobs) - len(self._queue),
            kv_blocks_used=self.kv_blocks_used(),
            orders=list(self._jobs),
            obeyed_seq=self.obeyed_seq,
        )

    def orders_open(self) -> int:
        return len(self._jobs)

    def kv_blocks_used(self) -> int:
        return self.config.kv_blocks - int(self.engine.allocator.free_blocks)

    async def release_all(self) -> None:
        for job in list(self._jobs.values()):
            self._cancel(job)
            await self._release(job)

    def _cancel(self, job: Job) -> None:
        """One that waits is dropped at once; one that runs stops before its next layer."""
        job.cancelled = True
        if job.loads is not None:
            job.loads.fail("cancelled")
        if job in self._queue:
            self._queue.remove(job)
            self._prepare_some()
            self._fail(job, Stop("cancelled", retryable=False))

    def _on_loaded(self, message: KvLoaded) -> None:
        job = self._jobs.get(message.order_id)
        if job is not None and job.loads is not None:
            job.loads.fetched_up_to(message.layer)

    # --- preparing ------------------------------------------------------------------------------------------

    def _prepare_some(self) -> None:
        for job in list(self._queue)[: self.config.prepared_max]:
            if job.prepared is None:
                job.prepared = self.spawn(self._prepare(job))

    async def _prepare(self, job: Job) -> bool:
        """Tokens, slots, fetches under way. False when the order has been answered already."""
        order = job.order
        taken = await self.inbox.take(order.frontend_id, order.request_id, order.order_id, "prefill")
        if taken is None or taken.gone:
            self._fail(job, Stop(refusal(taken), retryable=taken is None))
            return False
        job.reply = taken
        begin_prefill(self.tracing, job, self.config.worker_id)
        job.token_ids = unpack_tokens(taken.token_ids)
        if len(job.token_ids) != order.prompt_tokens:
            self._fail(job, Stop("the frontend's tokens are not those of the order", retryable=False))
            return False
        if self.store is None:
            return True
        try:
            await self._open(job)
        except Stop as stop:
            self._fail(job, stop)
            return False
        return True

    async def _open(self, job: Job) -> None:
        store = self.store
        assert store is not None
        layout = self.config.layout
        started_ns = time.monotonic_ns()
        blocks = layout.blocks(job.order.prompt_tokens)
        keys, whose = job.reply.block_keys, job.reply.tenant
        put = await patiently(
            job, "own store", lambda: store.open_put(job.order_id, keys, blocks=blocks, tenant=whose)
        )
        job.slots = list(put.slots)
        job.present = set(put.present)
        usable = (job.order.prompt_tokens - 1) // layout.block_tokens  # one token is always computed
        while job.cached_blocks < usable and job.cached_blocks in job.present:
            job.cached_blocks += 1
        job.transfer_ns = time.monotonic_ns() - started_ns
        for ordered in job.order.fetches:
            fetch = ordered.clipped(job.cached_blocks, usable)
            if fetch is not None:
                job.fetch_node, job.fetch_replicas = fetch.node_id, fetch.replicas
                job.fetched_blocks = fetch.blocks
                break
        if job.fetched_blocks:
            job.loads = LayerLoads(layout.layers)
            job.fetching = self.spawn(self._fetch(job, job.loads))

    async def _fetch(self, job: Job, loads: LayerLoads) -> None:
        assert self.store is not None
        try:
            first, blocks, others, trace = (
                job.cached_blocks,
                job.fetched_blocks,
                job.fetch_replicas,
                job.traceparent,
            )
            fetched = await self.store.fetch(
                job.order_id,
                job.fetch_node,
                first_block=first,
                blocks=blocks,
                replicas=others,
                traceparent=trace,
            )
        except (StoreError, BusError) as problem:
            loads.fail(str(problem))
            return
        job.fetch_node, job.fetched_bytes = fetched.source_node_id or job.fetch_node, fetched.bytes
        job.fetch_ns = fetched.elapsed_ns
        loads.fetched_up_to(self.config.layout.layers - 1)

    # --- running --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            job = self._queue[0]
            self._prepare_some()
            assert job.prepared is not None
            if not job.prepared.done():
                await asyncio.wait({job.prepared})
            if job.cancelled:
                continue
            self._queue.popleft()
            self._prepare_some()
            if not job.prepared.result():
                continue
            try:
                await self._prefill(job)
            except Stop as stop:
                self._fail(job, stop)

    async def _prefill(self, job: Job) -> None:
        if job.cancelled:
            raise Stop("cancelled", retryable=False)
        order, layout = job.order, self.config.layout
        if (store := self.store) is not None:
            await patiently(
                job,
                f"decode node {order.decode_node_id}",
                lambda: store.open_push(
                    order.order_id,
                    order.request_id,
                    target_node_id=order.decode_node_id,
                    decode_worker_id=order.decode_worker_id,
                ),
            )
        started_ns = time.monotonic_ns()
        table = self.engine.allocator.allocate(layout.blocks(order.prompt_tokens))
        try:
            logits = await self._compute_all(job, table)
            finished_ns = time.time_ns()
            compute_ns = time.monotonic_ns() - started_ns
        finally:
            self.engine.allocator.free(table)
        first = await self.compute(next_token, self.engine, logits, job.reply.sampling, job.token_ids, [])
        if job.cancelled:
            raise Stop("cancelled", retryable=False)
        result = PrefillResult(
            order_id=order.order_id,
            request_id=order.request_id,
            first=first,
            queue_ns=started_ns - job.arrived_ns,
            transfer_ns=job.transfer_ns + job.fetch_ns,
            compute_ns=compute_ns,
            cached_tokens=(job.cached_blocks + job.fetched_blocks) * layout.block_tokens,
            finished_at_ns=finished_ns,
        )
        subject = subjects.kv(order.decode_worker_id, PrefillResult.__name__)
        self.bus.publish_soon(subject, result, message_id=f"{order.order_id}-result")
        if self.store is None:
            self._finish(job, result, 0, 0)
        else:
            self.spawn(self._close(job, result))

    async def _compute_all(self, job: Job, table: list[int]) -> object:
        """Logits of the last token. A fetch that fails on the way costs a restart from what is here, nothing
        else.
        """
        try:
            return await self.compute(self._chunks, job, table)
        except LoadFailed as problem:
            if job.cancelled:
                raise Stop("cancelled", retryable=False) from None
            log.warning(
                "order %s: fetch from %s failed (%s): computed instead", job.order_id, job.fetch_node, problem
            )
            if job.fetching is not None:
                await job.fetching
            job.fetched_blocks = 0
            job.loads = None
            return await self.compute(self._chunks, job, table)

    def _chunks(self, job: Job, table: list[int]) -> object:
        """On the compute thread: every chunk that is not cached, in order."""
        engine, layout = self.engine, self.config.layout
        prefix_blocks = job.cached_blocks + job.fetched_blocks
        step = layout.block_tokens if layout.numerics == "exact" else self.config.chunk_tokens
        total = len(job.token_ids)
        begin = prefix_blocks * layout.block_tokens
        loader = before = None
        if prefix_blocks and self._pool is not None:
            loads = job.loads or LayerLoads(layout.layers, fetched=True)
            loader = self._copies.submit(self._load_prefix, job, loads, table, prefix_blocks)
            before = loads.wait_loaded
        logits = None
        late: list[tuple[int, int, int]] = []
        try:
            for start in range(begin, total, step):
                end = min(start + step, total)
                blocks = range(start // layout.block_tokens, layout.blocks(end))
                logits = engine.prefill_chunk(
                    job.token_ids[start:end],
                    start,
                    table,
                    before_layer=before if start == begin else None,
                    after_layer=(lambda layer, b=blocks: self._store_layer(job, table, layer, b, late))
                    if self._pool is not None
                    else None,
                    want_logits=end == total,
                    should_stop=lambda: job.cancelled,
                )
                if job.cancelled:
                    raise Stop("cancelled", retryable=False)
                if self._pool is not None:
                    self._soon(self._commit, job, blocks)
        finally:
            if loader is not None:
                if job.loads is not None and job.cancelled:
                    job.loads.fail("cancelled")
                with contextlib.suppress(LoadFailed):
                    loader.result()
        for layer, first, count in late:
            self._soon(self._push, job, layer, first, count)
        return logits

    def _load_prefix(self, job: Job, loads: LayerLoads, table: list[int], prefix_blocks: int) -> None:
        """On the copy thread: layer by layer, from the pool into the engine's cache, and on to the decode
        node.
        """
        assert self._pool is not None
        for layer in range(self.config.layout.layers):
            loads.wait_fetched(layer)
            for block in range(prefix_blocks):
                self.engine.cache.write_block(
                    layer, table[block], self._pool.layer_block(job.slots[block], layer)
                )
            loads.loaded_up_to(layer)
            if self.config.stream_layers:
                self._soon(self._push, job, layer, 0, prefix_blocks)
        if not self.config.stream_layers:
            for layer in range(self.config.layout.layers):
                self._soon(self._push, job, layer, 0, prefix_blocks)

    def _store_layer(
        self, job: Job, table: list[int], layer: int, blocks: range, late: list[tuple[int, int, int]]
    ) -> None:
        """On the compute thread: one layer of one chunk into the pool's slots (committed ones stay as they
        are).
        """
        assert self._pool is not None
        for block in blocks:
            if block not in job.present:
                self.engine.cache.read_block(
                    layer, table[block], self._pool.layer_block(job.slots[block], layer)
                )
        if self.config.stream_layers:
            self._soon(self._push, job, layer, blocks.start, len(blocks))
        else:
            late.append((layer, blocks.start, len(blocks)))

    def _soon(self, call: object, *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are being stopped
            self._loop.call_soon_threadsafe(call, *args)  # type: ignore[arg-type]

    def _push(self, job: Job, layer: int, first_block: int, blocks: int) -> None:
        if self.store is not None and not job.cancelled and job.order_id in self._jobs:
            self.store.push(job.order_id, layer=layer, first_block=first_block, blocks=blocks)

    def _commit(self, job: Job, blocks: range) -> None:
        keyed = min(blocks.stop, len(job.reply.block_keys) // 16) - blocks.start
        if keyed > 0 and not job.cancelled:
            self.spawn(self._commit_blocks(job, blocks.start, keyed))

    async def _commit_blocks(self, job: Job, first_block: int, blocks: int) -> None:
        assert self.store is not None
        with contextlib.suppress(StoreError, BusError):  # not shared, then; the request itself goes on
            await self.store.commit(job.order_id, first_block=first_block, blocks=blocks)

    # --- ending ---------------------------------------------------------------------------------------------

    async def _close(self, job: Job, result: PrefillResult) -> None:
        assert self.store is not None
        try:
            pushed = await self.store.close_push(job.order_id, traceparent=job.traceparent)
        except (StoreError, BusError) as problem:
            self._fail(job, Stop(f"push to {job.order.decode_node_id}: {problem}", retryable=True))
            return
        if job.order_id in self._jobs:
            self._finish(job, result, pushed.bytes, pushed.elapsed_ns)
            await self._release(job)

    def _finish(self, job: Job, result: PrefillResult, pushed_bytes: int, push_ns: int) -> None:
        if self._jobs.pop(job.order_id, None) is None:
            return
        end_prefill(self.tracing, job, result, block_tokens=self.config.layout.block_tokens)
        self.report(
            PrefillFinished(
                order_id=job.order_id,
                request_id=job.order.request_id,
                worker_id=self.config.worker_id,
                queue_ns=result.queue_ns,
                transfer_ns=result.transfer_ns,
                compute_ns=result.compute_ns,
                cached_local_tokens=job.cached_blocks * self.config.layout.block_tokens,
                cached_fetched_tokens=job.fetched_blocks * self.config.layout.block_tokens,
                fetched_bytes=job.fetched_bytes,
                fetch_node_id=job.fetch_node if job.fetched_blocks else "",
                fetch_ns=job.fetch_ns,
                pushed_bytes=pushed_bytes,
                push_ns=push_ns,
            )
        )

    def _fail(self, job: Job, stop: Stop) -> None:
        if self._jobs.pop(job.order_id, None) is None:
            return
        end_prefill(self.tracing, job, error=str(stop))
        if not job.cancelled:
            self.report(
                PrefillFailed(
                    order_id=job.order_id,
                    request_id=job.order.request_id,
                    worker_id=self.config.worker_id,
                    reason=str(stop)[:500],
                    retryable=stop.retryable,
                )
            )
        self.spawn(self._release(job))

    async def _release(self, job: Job) -> None:
        if job.prepared is not None and not job.prepared.done():
            job.prepared.cancel()
            await asyncio.wait({job.prepared})
        if self.store is None:
            return
        if job.fetching is not None and not job.fetching.done():
            job.fetching.cancel()
        with contextlib.suppress(StoreError, BusError):  # the lease's own end takes care of it
            await self.store.release(job.order_id)
