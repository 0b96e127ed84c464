"""KvSender: the KV of prompts that an engine computes, layer by layer on its way to the engine that asked for it.

::

    begin ──▶ slots of the node's pool ──layer written──▶ ... ──▶ end ──▶ blocks with keys stay in the store
                     │
       wanted (before, meanwhile or after) ──▶ the agent pushes what is written, and each layer as it comes

Whoever wants the KV asks by the order's name; until then it waits in the pool. So it makes no difference which of the
two engines has its request first, and nobody need know where the other one's pool is.

Source: Mooncake (2407.00079), section 5.2 (layer-wise prefill).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from nats.errors import Error as NatsError

from halfmoon.bus.errors import BusError
from halfmoon.schemas import subjects
from halfmoon.schemas.kv import TransferFailed, WantKv
from halfmoon.store.adapters.kv_link import KvDoor, KvLink
from halfmoon.store.adapters.link import FAILURES, BlockKeys
from halfmoon.store.errors import OrderUnknown, StoreError
from halfmoon.store.pool.segment import PoolView

#: Questions for orders that have not begun, and names of orders that failed.
REMEMBERED_MAX = 4096
Bytes = npt.NDArray[np.uint8]


class Sent(NamedTuple):
    """A prompt whose KV is sent: `blocks` blocks of `tokens` tokens, of which the first have `keys`."""

    order_id: str
    request_id: str
    tokens: int
    blocks: int
    keys: Sequence[bytes]


class _Run(NamedTuple):
    layer: int
    layers: int
    first_block: int
    blocks: int


@dataclass(slots=True)
class _Order:
    """On the loop, but for `slots`, `present` and `view`, which do not change."""

    sent: Sent
    view: PoolView
    slots: list[int]
    present: frozenset[int]
    runs: list[_Run] = field(default_factory=list)
    want: WantKv | None = None
    ended: bool = False
    dropped: str = ""
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self) -> None:
        """Raises StoreError when it is dropped."""
        if self.dropped:
            raise StoreError(self.dropped)


class KvSender:
    """See the module. Methods without an underscore are the engine's thread's, and raise nothing."""

    def __init__(self, link: KvLink, *, namespace: bytes) -> None:
        """`namespace`: see `BlockKeys`."""
        self._link = link
        self._keys = BlockKeys(namespace, link.options.tenant)
        self._orders: dict[str, _Order] = {}
        self._wanted: OrderedDict[str, WantKv] = OrderedDict()
        self._gone: OrderedDict[str, str] = OrderedDict()
        link.on_want = self._on_want

    # --- the engine's thread --------------------------------------------------------------------------------

    def begin(self, sent: Sent) -> bool:
        """Slots for the prompt's blocks; waits `lookup_s` at most. False: its KV is not sent."""

        async def opened(door: KvDoor) -> bool:
            return await self._open(door, sent)

        if self._link.ask(opened, within_s=self._link.options.lookup_s):
            return True
        # It may have been opened, and heard of too late.
        self._link.spawn(self._give_back, sent.order_id)
        return False

    def write(
        self, order_id: str, layer: int, first_block: int, blocks: int, fill: Callable[[int, Bytes], None]
    ) -> None:
        """`fill(block, slot)` copies a layer of a block into its slot, u8 `[layer_bytes]`, for each that is not there
        already.
        """
        order = self._orders.get(order_id)
        if order is None:
            return
        missing = [block for block in range(first_block, first_block + blocks) if block not in order.present]
        try:
            for block in missing:
                with order.view.writing(order.slots[block], order_id):
                    place = order.view.layer_block(order.slots[block], layer)
                    fill(block, place[: self._link.shape.layer_bytes])
        except OrderUnknown as problem:
            self.drop(order_id, str(problem))
            return
        # What is there already is pushed with the push's beginning. Those are the first blocks, but for a hole that
        # an eviction may have left.
        if missing and missing[-1] - missing[0] == len(missing) - 1:
            self._on_loop(lambda: self._written(order, [_Run(layer, 1, missing[0], len(missing))]))
        else:
            self._on_loop(lambda: self._written(order, [_Run(layer, 1, block, 1) for block in missing]))

    def end(self, order_id: str) -> None:
        """All is written."""
        self._on_loop(lambda: self._end(order_id))

    def drop(self, order_id: str, reason: str) -> None:
        """No more of it will come."""
        self._on_loop(lambda: self._drop(order_id, reason))

    def _on_loop(self, work: Callable[[], None]) -> None:
        loop = self._link.loop
        if loop is not None and self._link.alive:
            with contextlib.suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(work)

    # --- the loop's thread ----------------------------------------------------------------------------------

    async def _open(self, door: KvDoor, sent: Sent) -> bool:
        keys = b"".join(self._keys.of(key) for key in sent.keys)
        opened = await door.agent.open_put(
            sent.order_id,
            keys,
            blocks=sent.blocks,
            tenant=self._link.options.tenant,
            block_bytes=self._link.shape.block_bytes,
        )
        door.agent.keep(sent.order_id)
        order = _Order(sent, door.agent.view, list(opened.slots), frozenset(opened.present))
        self._orders[sent.order_id] = order
        if not self._link.spawn(self._follow, order):
            raise StoreError("the link has ended")
        if (want := self._wanted.pop(sent.order_id, None)) is not None:
            try:
                self._want(order, want)
            except StoreError as problem:
                await self._tell_failed((want, str(problem)))
        return True

    async def _give_back(self, order_id: str) -> None:
        self._refuse(order_id, "there was no room for its KV in time")
        if (door := self._link.usable()) is not None:
            await door.agent.release(order_id)

    def _on_want(self, want: WantKv) -> None:
        """Raises StoreError."""
        if (reason := self._gone.get(want.order_id)) is not None:
            raise OrderUnknown(f"the KV of order {want.order_id} will not come: {reason}")
        order = self._orders.get(want.order_id)
        if order is not None:
            self._want(order, want)
        else:
            _remember(self._wanted, want.order_id, want)

    @staticmethod
    def _want(order: _Order, want: WantKv) -> None:
        """Raises StoreError."""
        if want.tokens != order.sent.tokens:
            # The KV of fewer or more tokens than were asked for would be taken for theirs.
            raise StoreError(f"tokens: {want.tokens} were asked for, the prompt has {order.sent.tokens}")
        order.want = order.want or want
        order.woken.set()

    @staticmethod
    def _written(order: _Order, runs: Sequence[_Run]) -> None:
        order.runs += runs
        order.woken.set()

    def _end(self, order_id: str) -> None:
        if (order := self._orders.get(order_id)) is not None:
            order.ended = True
            order.woken.set()

    def _drop(self, order_id: str, reason: str) -> None:
        if (order := self._orders.get(order_id)) is not None:
            order.dropped = order.dropped or reason
            order.woken.set()
        else:
            self._refuse(order_id, reason)

    def _refuse(self, order_id: str, reason: str) -> None:
        _remember(self._gone, order_id, reason)
        if (want := self._wanted.pop(order_id, None)) is not None:
            self._link.spawn(self._tell_failed, (want, reason))

    async def _tell_failed(self, told: tuple[WantKv, str]) -> None:
        want, reason = told
        if (door := self._link.usable()) is not None:
            failed = TransferFailed(order_id=want.order_id, request_id=want.request_id, reason=reason[:500])
            with contextlib.suppress(NatsError, BusError):  # then the other one's patience ends
                await door.bus.publish(
                    subjects.kv(want.worker_id, TransferFailed.__name__, self._link.me), failed
                )

    async def _follow(self, order: _Order) -> None:
        """One order, from its beginning until its slots are given back."""
        sent, door = order.sent, self._link.usable()
        reason = "the store is away"
        try:
            if door is not None:
                await self._send(door, order)
                reason = "nobody asked for it in time"
        except FAILURES as problem:
            reason = str(problem)
            self._link.count("prompts_failed")
            if order.want is not None:
                await self._tell_failed((order.want, reason))
        finally:
            del self._orders[sent.order_id]
            self._refuse(sent.order_id, reason)
            if door is not None:
                await door.agent.release(sent.order_id)

    async def _send(self, door: KvDoor, order: _Order) -> None:
        sent, agent = order.sent, door.agent
        await self._until(order, lambda: order.ended or order.want is not None)
        if order.want is None:
            await self._keep(door, order)
            try:
                async with asyncio.timeout(self._link.options.kept_s):
                    await self._until(order, lambda: order.want is not None)
            except TimeoutError:
                self._link.count("prompts_unwanted")
                return
        want = order.want
        assert want is not None
        await agent.open_push(
            sent.order_id,
            want.request_id,
            target_node_id=want.node_id,
            decode_worker_id=want.worker_id,
        )
        for block in sorted(order.present):
            self._push(door, sent.order_id, _Run(0, self._link.shape.layers, block, 1))
        pushed = 0
        while not order.ended or pushed < len(order.runs):
            if pushed < len(order.runs):
                self._push(door, sent.order_id, order.runs[pushed])
                pushed += 1
            else:
                order.woken.clear()
                await order.woken.wait()
            order.check()
        moved = await agent.close_push(sent.order_id)
        await self._keep(door, order)
        self._link.count("prompts_sent")
        self._link.count("bytes_sent", moved.bytes)

    @staticmethod
    def _push(door: KvDoor, order_id: str, run: _Run) -> None:
        door.agent.push(
            order_id, layer=run.layer, layers=run.layers, first_block=run.first_block, blocks=run.blocks
        )

    async def _keep(self, door: KvDoor, order: _Order) -> None:
        """Blocks with keys are in the store from here on."""
        if order.sent.keys:
            await door.agent.commit(order.sent.order_id, first_block=0, blocks=len(order.sent.keys))

    @staticmethod
    async def _until(order: _Order, ready: Callable[[], bool]) -> None:
        """Raises StoreError when the order is dropped."""
        order.check()
        while not ready():
            order.woken.clear()
            await order.woken.wait()
            order.check()


def _remember(table: OrderedDict[str, str] | OrderedDict[str, WantKv], name: str, value: object) -> None:
    """The newest `REMEMBERED_MAX` of them."""
    table[name] = value  # type: ignore[assignment]
    while len(table) > REMEMBERED_MAX:
        table.popitem(last=False)
