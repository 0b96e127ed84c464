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
from halfmoon.store.errors import AgentUnreachable, OrderUnknown, StoreError

#: Questions for orders that have not begun, and names of orders that failed.
REMEMBERED_MAX = 4096
Bytes = npt.NDArray[np.uint8]


class Sent(NamedTuple):
    """A prompt whose KV is sent: `blocks` blocks of `tokens` tokens, of which the first have `keys`."""

    order_id: str
    tokens: int
    blocks: int
    keys: Sequence[bytes]


class _Run(NamedTuple):
    layer: int
    layers: int
    first_block: int
    blocks: int


@dataclass(slots=True)
class SentOrder:
    """A prompt that has its slots. On the loop, but for what does not change: `slots`, `present` and `door`."""

    sent: Sent
    door: KvDoor
    slots: list[int]
    present: frozenset[int]
    runs: list[_Run] = field(default_factory=list)
    want: WantKv | None = None
    ended: bool = False
    dropped: str = ""
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def changed(self) -> None:
        """Returns after the next change. Raises StoreError when it is dropped."""
        self.check()
        self.woken.clear()
        await self.woken.wait()
        self.check()

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
        self._orders: dict[str, SentOrder] = {}
        self._wanted: OrderedDict[str, WantKv] = OrderedDict()
        self._gone: OrderedDict[str, str] = OrderedDict()
        link.on_want = self._on_want

    # --- the engine's thread --------------------------------------------------------------------------------

    def begin(self, sent: Sent) -> SentOrder | None:
        """Slots for the prompt's blocks; waits `lookup_s` at most. None: its KV is not sent."""

        async def opened(door: KvDoor) -> SentOrder | None:
            try:
                return await self._open(door, sent)
            except AgentUnreachable:
                raise
            except StoreError:  # it is full, say, and not away
                return None

        order = self._link.ask(opened, within_s=self._link.options.lookup_s)
        if order is None:
            self.refuse(sent.order_id, "there was no room for its KV in time")
        return order

    def write(
        self,
        order: SentOrder,
        layer: int,
        first_block: int,
        blocks: int,
        fill: Callable[[int, Bytes], None],
    ) -> None:
        """`fill(block, slot)` copies a layer of a block into its slot, u8 `[layer_bytes]`, for each that is not there
        already.
        """
        view, order_id = order.door.agent.view, order.sent.order_id
        missing = [block for block in range(first_block, first_block + blocks) if block not in order.present]
        try:
            for block in missing:
                with view.writing(order.slots[block], order_id):
                    place = view.layer_block(order.slots[block], layer)
                    fill(block, place[: self._link.shape.layer_bytes])
        except OrderUnknown as problem:
            self.drop(order, str(problem))
            return
        # What is there already is pushed with the push's beginning. Those are the first blocks, but for a hole that
        # an eviction may have left.
        if missing and missing[-1] - missing[0] == len(missing) - 1:
            self._change(order, lambda: order.runs.append(_Run(layer, 1, missing[0], len(missing))))
        else:
            self._change(order, lambda: order.runs.extend(_Run(layer, 1, block, 1) for block in missing))

    def end(self, order: SentOrder) -> None:
        """All is written."""
        self._change(order, lambda: setattr(order, "ended", True))

    def drop(self, order: SentOrder, reason: str) -> None:
        """No more of it will come."""
        self._change(order, lambda: setattr(order, "dropped", order.dropped or reason))

    def refuse(self, order_id: str, reason: str) -> None:
        """Nothing of it will come."""
        self._link.call(lambda: self._refuse(order_id, reason))

    def _change(self, order: SentOrder, change: Callable[[], None]) -> None:
        def changed() -> None:
            change()
            order.woken.set()

        self._link.call(changed)

    # --- the loop's thread ----------------------------------------------------------------------------------

    async def _open(self, door: KvDoor, sent: Sent) -> SentOrder:
        """Raises StoreError."""
        if sent.order_id in self._orders:
            raise StoreError(f"order {sent.order_id} is another prompt's")
        keys = b"".join(self._keys.of(key) for key in sent.keys)
        try:
            opened = await door.agent.open_put(
                sent.order_id,
                keys,
                blocks=sent.blocks,
                tenant=self._link.options.tenant,
                block_bytes=self._link.shape.block_bytes,
            )
        except BaseException:  # it may be open all the same: the answer was late
            self._link.spawn(door.agent.release, sent.order_id)
            raise
        door.agent.keep(sent.order_id)
        order = SentOrder(sent, door, list(opened.slots), frozenset(opened.present))
        self._orders[sent.order_id] = order
        self._link.spawn(self._follow, order)
        if (want := self._wanted.pop(sent.order_id, None)) is not None:
            try:
                self._want(order, want)
            except StoreError as problem:
                await self._tell_failed((want, str(problem)))
        return order

    def _on_want(self, want: WantKv) -> None:
        """Raises StoreError."""
        if (order := self._orders.get(want.order_id)) is not None:
            self._want(order, want)
        elif (reason := self._gone.get(want.order_id)) is not None:
            raise OrderUnknown(f"the KV of order {want.order_id} will not come: {reason}")
        else:
            _remember(self._wanted, want.order_id, want)

    @staticmethod
    def _want(order: SentOrder, want: WantKv) -> None:
        """Raises StoreError."""
        if want.tokens != order.sent.tokens:
            # The KV of fewer or more tokens than were asked for would be taken for theirs.
            raise StoreError(f"tokens: {want.tokens} were asked for, the prompt has {order.sent.tokens}")
        if order.want is not None and order.want.worker_id != want.worker_id:
            raise StoreError(f"order {want.order_id} goes to {order.want.worker_id}")
        order.want = want
        order.woken.set()

    def _refuse(self, order_id: str, reason: str) -> None:
        _remember(self._gone, order_id, reason)
        if (want := self._wanted.pop(order_id, None)) is not None:
            self._link.spawn(self._tell_failed, (want, reason))

    async def _tell_failed(self, told: tuple[WantKv, str]) -> None:
        want, reason = told
        if (door := self._link.usable()) is not None:
            failed = TransferFailed(order_id=want.order_id, request_id=want.order_id, reason=reason[:500])
            with contextlib.suppress(NatsError, BusError):  # then the other one's patience ends
                await door.bus.publish(
                    subjects.kv(want.worker_id, TransferFailed.__name__, self._link.me), failed
                )

    async def _follow(self, order: SentOrder) -> None:
        """One order, from its beginning until its slots are given back."""
        order_id, reason = order.sent.order_id, "it was sent"
        try:
            await self._send(order)
        except FAILURES as problem:
            reason = str(problem)
            self._link.count("prompts_failed")
            if order.want is not None:
                await self._tell_failed((order.want, reason))
        finally:
            del self._orders[order_id]
            self._refuse(order_id, reason)
            await order.door.agent.release(order_id)

    async def _send(self, order: SentOrder) -> None:
        """Raises an error of FAILURES."""
        order_id, agent = order.sent.order_id, order.door.agent
        while not order.ended and order.want is None:
            await order.changed()
        if order.want is None:
            await self._keep(order)
        try:
            async with asyncio.timeout(self._link.options.kept_s):
                while (want := order.want) is None:
                    await order.changed()
        except TimeoutError:
            raise StoreError("nobody asked for it in time") from None
        await agent.open_push(
            order_id, order_id, target_node_id=want.node_id, decode_worker_id=want.worker_id
        )
        for block in sorted(order.present):
            self._push(order, _Run(0, self._link.shape.layers, block, 1))
        pushed = 0
        while not order.ended or pushed < len(order.runs):
            if pushed == len(order.runs):
                await order.changed()
            for run in order.runs[pushed:]:
                self._push(order, run)
                pushed += 1
        order.check()
        moved = await agent.close_push(order_id)
        await self._keep(order)
        self._link.count("prompts_sent")
        self._link.count("bytes_sent", moved.bytes)

    @staticmethod
    def _push(order: SentOrder, run: _Run) -> None:
        order.door.agent.push(
            order.sent.order_id,
            layer=run.layer,
            layers=run.layers,
            first_block=run.first_block,
            blocks=run.blocks,
        )

    @staticmethod
    async def _keep(order: SentOrder) -> None:
        """Blocks with keys are in the store from here on."""
        if order.sent.keys:
            await order.door.agent.commit(order.sent.order_id, first_block=0, blocks=len(order.sent.keys))


def _remember(table: OrderedDict[str, str] | OrderedDict[str, WantKv], name: str, value: object) -> None:
    """The newest `REMEMBERED_MAX` of them."""
    table[name] = value  # type: ignore[assignment]
    while len(table) > REMEMBERED_MAX:
        table.popitem(last=False)
