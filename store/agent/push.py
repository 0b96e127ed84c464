"""One order's KV on its way to the decode node, layer by layer, while the next layer is computed.

::

    open ──pushes──▶ (moved, KvReady published, in order) ──close──▶ settled      blocks with keys are committed at
    the target
      └──────────────▶ failed / released ──▶ dropped at the target, TransferFailed to the decode worker

One task moves for each order. Pushes that queue up while it copies are moved together, so that a slow link
costs throughput and not a round trip for each layer. A push to the own node moves nothing: both workers hold
the same slots. Of the block that a prompt ends in only its tokens move: the rest of the slot at the target keeps the
bytes of its previous order, which nobody reads.

Source: Mooncake (2407.00079), section 5.2 (layer-wise prefill); section 4 (messenger).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError
from halfmoon.schemas import subjects
from halfmoon.schemas.kv import KvReady, TransferFailed, TransferOpened
from halfmoon.schemas.store import (
    Done,
    DropBlocks,
    OpenPush,
    Pushed,
    PushLayer,
    RenewBlocks,
    Reserved,
    SettleBlocks,
)
from halfmoon.store.agent.peers import Peers
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import OrderUnknown, StoreError, TransferError, TransferTimeout
from halfmoon.store.pool.guard import peer_writer
from halfmoon.store.pool.slots import Hold
from halfmoon.store.transports.base import BlockMover, Call, Peer, Slice, moved_bytes

#: Moved in one call, so that the first of many queued layers is not announced after the last.
BATCH_BYTES = 32 * 1024 * 1024


class PushTarget(NamedTuple):
    """Another node with room for the order's blocks; `transport` moves them there, `peers` asks its agent."""

    peer: Peer
    reserved: Reserved
    transport: BlockMover
    peers: Peers


class Push:
    """`hold`: the order's blocks here; `target`: where they go, None when they stay. `hears_runs`: the decode worker
    understands `KvReady.layers`.
    """

    def __init__(
        self,
        bus: Bus,
        config: StoreConfig,
        opened: OpenPush,
        hold: Hold,
        *,
        target: PushTarget | None,
        hears_runs: bool,
        on_failure: Callable[[StoreError], None],
    ) -> None:
        self.opened = opened
        self.opened_ns = time.time_ns()
        self.failure: StoreError | None = None
        self.finished = False
        self._bus = bus
        self._hold = hold
        self._node_id = config.node_id
        self._layer_block_bytes = config.layout.layer_block_bytes
        self._transfer_ns_max = config.transfer_ns_max
        self._target = target
        self._hears_runs = hears_runs
        self._on_failure = on_failure
        self._queue: deque[PushLayer] = deque()
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._present = frozenset(target.reserved.present) if target else frozenset()
        # The block that the prompt ends in, and how many bytes its tokens fill of that block's keys in a layer.
        self._last, filled = divmod(opened.tokens, config.layout.block_tokens)
        takes_part = target is not None and target.reserved.takes_part
        self._fill = filled * config.layout.token_layer_bytes // 2 if takes_part else 0
        self._numbers: set[int] = set()
        self._received = self._done = self._bytes = self._elapsed_ns = 0
        self._writable_until_ns = time.monotonic_ns() + (target.reserved.lease_ttl_ns if target else 0)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Sends the decode worker the places of its blocks, and begins to move."""
        place = self._target.reserved if self._target is not None else self._hold
        message = TransferOpened(
            order_id=self.opened.order_id,
            request_id=self.opened.request_id,
            slots=place.slots,
            epochs=place.epochs,
            present=place.present,
        )
        await self._bus.publish(self._subject("TransferOpened"), message)
        self._tasks.append(asyncio.create_task(self._run()))
        if self._target is not None:
            self._tasks.append(asyncio.create_task(self._renew(self._target)))

    def push(self, layer: PushLayer) -> None:
        """Queues the push. One that comes after the end, or for a second time, changes nothing."""
        if layer.number:
            if layer.number in self._numbers:
                return
            self._numbers.add(layer.number)
        self._received += 1
        if self.failure is None and not self.finished:
            self._queue.append(layer)
            self._wake.set()
            self._progress.set()

    def lost(self, pushes: int) -> int:
        """How many of `pushes`, which were all published, have not come. None is missed when the push has failed."""
        return max(0, pushes - self._received) if self.failure is None else 0

    async def close(self, pushes: int) -> Pushed:
        """Waits until `pushes` of them are readable at the target, and commits there. Raises the push's failure."""
        deadline_ns = time.monotonic_ns() + self._transfer_ns_max
        while self._done < pushes and self.failure is None:
            self._progress.clear()
            if self._done >= pushes:
                break
            remaining_s = (deadline_ns - time.monotonic_ns()) / 1e9
            try:
                async with asyncio.timeout(max(0.0, remaining_s)):  # `wait_for` may swallow a cancellation
                    await self._progress.wait()
            except TimeoutError:
                self.fail(TransferTimeout(f"{self._done} of {pushes} pushes done, {self._received} received"))
        if self.failure is not None:
            raise self.failure
        if (target := self._target) is not None:
            settle = SettleBlocks(
                order_id=self.opened.order_id,
                decode_worker_id=self.opened.decode_worker_id,
                writer_node_id=self._node_id,
            )
            try:
                timeout_s = self._transfer_ns_max / 1e9
                await target.peers.ask(target.peer.node_id, "settle", settle, Done, timeout_s=timeout_s)
            except StoreError as problem:
                self.fail(problem)
                raise
        self.finished = True
        await self._end_tasks()
        return Pushed(bytes=self._bytes, elapsed_ns=self._elapsed_ns)

    def fail(self, problem: StoreError) -> None:
        """The push has failed: notify the decode worker and drop the target's reservation. Idempotent."""
        if self.failure is None and not self.finished:
            self.failure = problem
            self._queue.clear()
            self._progress.set()
            self._on_failure(problem)

    async def end(self, reason: str) -> None:
        """Stops moving, now, and clears up at the target when it was not closed. When this returns nothing is
        touched any more.
        """
        if self.failure is None:
            self.failure = OrderUnknown(reason)
        self._progress.set()
        await self._end_tasks()
        if self.finished:
            return
        self.finished = True
        failed = TransferFailed(
            order_id=self.opened.order_id, request_id=self.opened.request_id, reason=str(self.failure)[:500]
        )
        with contextlib.suppress(BusError):
            await self._bus.publish(self._subject("TransferFailed"), failed)
        if (target := self._target) is not None:
            drop = DropBlocks(
                order_id=self.opened.order_id,
                decode_worker_id=self.opened.decode_worker_id,
                writer_node_id=self._node_id,
            )
            with contextlib.suppress(StoreError):  # it is dead, or its lease ends by itself
                await target.peers.ask(target.peer.node_id, "drop", drop, Done)

    def _subject(self, kind: str) -> str:
        return subjects.kv(self.opened.decode_worker_id, kind, self._node_id)

    async def _end_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                try:
                    await self._move(self._take())
                except StoreError as problem:
                    self.fail(problem)
                    return

    def _take(self) -> list[tuple[PushLayer, list[Slice]]]:
        batch = []
        total = 0
        while self._queue and total < BATCH_BYTES:
            push = self._queue.popleft()
            items = self._items(push)
            total += moved_bytes(items, self._layer_block_bytes)
            batch.append((push, items))
        return batch

    def _items(self, push: PushLayer) -> list[Slice]:
        if self._target is None:
            return []
        mine, theirs = self._hold.slots, self._target.reserved.slots
        end = push.first_block + push.blocks
        if end > len(mine):
            raise TransferError(f"push of blocks {push.first_block}..{end - 1}, the order has {len(mine)}")
        wanted = [i for i in range(push.first_block, end) if i not in self._present]
        fill = {self._last: self._fill}
        return [Slice(mine[i], theirs[i], push.layer, push.layers, fill.get(i, 0)) for i in wanted]

    async def _move(self, batch: list[tuple[PushLayer, list[Slice]]]) -> None:
        items = [item for _, some in batch for item in some]
        if items:
            assert self._target is not None
            started_ns = time.monotonic_ns()
            deadline_ns = min(started_ns + self._transfer_ns_max, self._writable_until_ns)
            call = Call(self.opened.order_id, peer_writer(self._node_id), deadline_ns)
            await self._target.transport.write(self._target.peer, items, call)
            self._elapsed_ns += time.monotonic_ns() - started_ns
        for ready in self._announced(batch):
            await self._bus.publish(self._subject("KvReady"), ready)
            self._bytes += ready.moved_bytes
        self._done += len(batch)
        self._progress.set()

    def _announced(self, batch: list[tuple[PushLayer, list[Slice]]]) -> list[KvReady]:
        """Layers of the same blocks that follow each other are one message, if the decode worker understands that."""
        told: list[KvReady] = []
        for push, some in batch:
            moved = moved_bytes(some, self._layer_block_bytes)
            ready = KvReady(
                order_id=push.order_id,
                request_id=self.opened.request_id,
                layer=push.layer,
                first_block=push.first_block,
                blocks=push.blocks,
                moved_bytes=moved,
                layers=push.layers,
            )
            last = told[-1] if told else None
            if not self._hears_runs:
                each = replace(ready, layers=1, moved_bytes=moved // push.layers)
                told += [replace(each, layer=push.layer + i) for i in range(push.layers)]
            elif (
                last is not None
                and last.layer + last.layers == push.layer
                and (last.first_block, last.blocks) == (push.first_block, push.blocks)
            ):
                told[-1] = replace(
                    last, layers=last.layers + push.layers, moved_bytes=last.moved_bytes + moved
                )
            else:
                told.append(ready)
        return told

    async def _renew(self, target: PushTarget) -> None:
        """Renews the reservation: over shared memory the target sees nothing of a push, and would let it expire."""
        ttl_ns = target.reserved.lease_ttl_ns
        renew = RenewBlocks(
            order_id=self.opened.order_id,
            decode_worker_id=self.opened.decode_worker_id,
            writer_node_id=self._node_id,
        )
        while True:
            await asyncio.sleep(ttl_ns / 4e9)
            asked_ns = time.monotonic_ns()
            try:
                await target.peers.ask(target.peer.node_id, "renew", renew, Done)
                self._writable_until_ns = asked_ns + ttl_ns
            except OrderUnknown as problem:
                self.fail(problem)
                return
            except StoreError:
                # The writer's deadline stands, and the next move fails with the reason.
                continue
