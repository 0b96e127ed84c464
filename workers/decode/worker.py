"""The decode worker: continuous batching. Requests join and leave between two steps; each step makes one
token of each.

When the cache has no free block for a running sequence, the one that joined last is swapped out to host
memory, bit by bit as it is, and rejoins first: nothing is lost and nothing is computed twice. A request whose
earlier decode worker died comes with the tokens that its client has. They are fed through decode again, not
delivered: so the rest is, bit for bit, what it would have been.

Source: Orca (OSDI'22), section 3 (joining between steps); vLLM (SOSP'23), section 4.5 (preemption by
swapping).
"""

from __future__ import annotations

import asyncio
import time

from halfmoon.schemas.events import DecodeStarted
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.decode.kv_loader import copy_in, copy_out
from halfmoon.workers.decode.orders import DecodeOrders
from halfmoon.workers.decode.sequence import Sequence, Stage
from halfmoon.workers.sample_requests import request_of, token_of


class DecodeWorker(DecodeOrders):
    """See the module."""

    async def prepare(self) -> None:
        await super().prepare()
        self.spawn(self._run())

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
            taken = now_ns - started_ns, len(batch), sum(s.length for s in batch)
            self._times.observe(*taken)
            self.metrics.stepped(*taken)
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
                self.metrics.joined(sequence.ready_wall_ns)
                self.report(
                    DecodeStarted(
                        order_id=sequence.order_id,
                        request_id=sequence.order.request_id,
                        worker_id=self.config.worker_id,
                        wait_ns=max(
                            0, (sequence.ready_wall_ns or time.time_ns()) - sequence.result.finished_at_ns
                        ),
                    )
                )

    async def _make_room(self) -> None:
        """Every running sequence gets the block that its next token needs; the last that joined gives way."""
        if self.config.layout.layers == 0:
            return
        for sequence in list(self._running):
            while (
                sequence.stage is Stage.RUNNING
                and sequence.length // self.config.layout.block_tokens >= len(sequence.table)
            ):
                if self.engine.allocator.can_allocate(1):
                    self.engine.allocator.extend(sequence.table)
                elif not self._take_from_waiting():
                    await self._swap_out(self._running[-1])

    def _take_from_waiting(self) -> bool:
        """Blocks of a sequence that waits with a part of its KV; it loads again from the pool."""
        for sequence in reversed(self._waiting.values()):
            if sequence.table and sequence.loading == 0 and not self._kv_here(sequence):
                assert self._loading is not None
                self.engine.allocator.free(self._loading.take_back(sequence))
                return True
        return False

    async def _swap_out(self, sequence: Sequence) -> None:
        layers = self.config.layout.layers
        sequence.swapped = await self.compute(copy_out, self.engine.cache, layers, list(sequence.table))
        if sequence.stage is Stage.ENDED:  # cancelled meanwhile
            return
        self._running.remove(sequence)
        self._free(sequence)
        sequence.stage = Stage.SWAPPED
        sequence.preemptions += 1
        self._swapped.appendleft(sequence)

    async def _swap_in(self, sequence: Sequence) -> None:
        layers, held = self.config.layout.layers, sequence.swapped
        table = list(self.engine.allocator.allocate(len(held)))
        await self.compute(copy_in, self.engine.cache, layers, table, held)
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
            if index == 1:
                self.metrics.first_step(now_ns - sequence.started_ns)
        self._deliveries.send(fresh)
        for sequence in batch:
            if sequence.stage is Stage.ENDED:
                self._free(sequence)
        for sequence in batch:
            if sequence.finish_reason and sequence.stage is Stage.RUNNING:
                self._finish(sequence)
