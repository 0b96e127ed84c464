"""A worker's connection to the store agent of its node.

Pushes are gathered while the event loop is busy and published, so that the thirty layers of a chunk cost the worker
next to nothing. `close_push` says how many there were; when some were lost, all are published again, and the agent
passes over those that it has. The memory for that is bounded by an order's layers and chunks. Everything else is
waited for, and watched: when the agent dies in the middle (its lock on the segment goes), the call ends within half a
second with AgentUnreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace
from nats.errors import Error as NatsError

from halfmoon.bus import errors as bus_errors
from halfmoon.bus.connection import Bus
from halfmoon.schemas import store as messages
from halfmoon.schemas import subjects
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES, Message
from halfmoon.store.errors import (
    AgentUnreachable,
    BlockMissing,
    LeaseLost,
    NotAttached,
    TransferError,
    from_code,
)
from halfmoon.store.pool.segment import Geometry, PoolView, SegmentError

M = TypeVar("M")
ATTACH_S = 30.0
ASK_S = 5.0
WATCH_S = 0.25
#: An order is kept alive for this long after its last activity: one that is idle for longer was forgotten.
KEEP_S = 600.0
#: An order's pushes are published so often before they count as lost.
PUSH_TRIES = 4
#: A push message stays far below the bus's limit.
PUSHES_PER_MESSAGE = 256


class AgentClient:
    """Errors are those of `halfmoon.store.errors`. One for each worker, used from one event loop
    (`push` from any thread).

    When the agent restarts, its memory is another: orders of the old one end with errors, and the same view
    shows the new memory once they are released. `restarted` are called before (a decode worker forgets its
    slots there).
    """

    def __init__(self, bus: Bus, *, node_id: str, worker_id: str) -> None:
        self._bus = bus
        self._node_id = node_id
        self._worker_id = worker_id
        self._process = uuid.uuid4().hex
        self._view: PoolView | None = None
        self._attached: messages.Attached | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._outbox: deque[messages.PushLayer] = deque()
        #: All pushes of each open order.
        self._pushes: dict[str, list[messages.PushLayer]] = {}
        #: Open orders, and when something was last done for each.
        self._orders: dict[str, float] = {}
        #: The agent's answer for each open order: its slots.
        self._opened: dict[str, messages.PutOpened] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._gathering = False
        self._keeping: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.restarted: list[Callable[[], None]] = []
        #: Further orders to keep alive, of which this client opened nothing: each is asked whenever leases are renewed.
        self.kept_too: list[Callable[[], list[str]]] = []

    @property
    def view(self) -> PoolView:
        assert self._view is not None, "attach first"
        return self._view

    @property
    def layout(self) -> Layout:
        """The layout of the node's blocks, by its agent's newest answer."""
        assert self._attached is not None, "attach first"
        return self._attached.layout

    # --- attach ---------------------------------------------------------------------------------------------

    async def attach(self, *, timeout_s: float = ATTACH_S) -> PoolView:
        """Maps the node's pool; waits for the agent. Raises AgentUnreachable."""
        async with self._lock:
            self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
            until = time.monotonic() + timeout_s
            pause_s = 0.02
            while True:
                try:
                    view = await self._attach_once()
                    break
                except (bus_errors.BusError, SegmentError) as problem:
                    if time.monotonic() + pause_s > until:
                        raise AgentUnreachable(f"store agent of node {self._node_id}: {problem}") from None
                await asyncio.sleep(pause_s)
                pause_s = min(0.5, pause_s * 2)
            if self._keeping is None:
                self._keeping = asyncio.create_task(self._keep())
            return view

    async def _attach_once(self) -> PoolView:
        subject = subjects.store(self._node_id, "attach")
        request = messages.Attach(worker_id=self._worker_id, process=self._process)
        attached = await self._bus.request(subject, request, messages.Attached, timeout_s=2.0)
        if self._attached is None or self._attached.incarnation != attached.incarnation:
            await self._map(attached)
        request = messages.Attach(
            worker_id=self._worker_id, mapped=attached.incarnation, process=self._process, hears_runs=True
        )
        await self._bus.request(subject, request, messages.Attached, timeout_s=2.0)
        return self.view

    async def _map(self, attached: messages.Attached) -> None:
        geometry = Geometry.of(attached.layout, attached.slots)
        view = PoolView.attach(attached.segment, geometry)
        if not view.alive():
            view.close()
            raise SegmentError(f"segment {attached.segment} is stale")
        await asyncio.to_thread(view.touch)
        if self._view is None:
            self._view = view
        else:
            for callback in self.restarted:
                callback()
            self._view.remap(view)
        self._attached = attached

    async def _keep(self) -> None:
        """Keeps open orders alive while they wait, and maps the memory of a restarted agent when none is
        open.
        """
        kept = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            if not self.view.alive() and not self._orders:
                with contextlib.suppress(AgentUnreachable):
                    await self.attach(timeout_s=2.0)
            assert self._attached is not None
            now = time.monotonic()
            if now - kept < self._attached.lease_ttl_ns / 4e9:
                continue
            kept = now
            orders = [order_id for order_id, at in self._orders.items() if now - at < KEEP_S]
            orders += [order_id for also in self.kept_too for order_id in also()]
            if orders:
                with contextlib.suppress(NatsError):  # tried again at the next turn
                    keep = messages.KeepOrders(worker_id=self._worker_id, order_ids=orders)
                    await self._bus.publish(subjects.store(self._node_id, "keep"), keep)

    # --- put and fetch --------------------------------------------------------------------------------------

    async def open_put(
        self,
        order_id: str,
        block_keys: bytes,
        *,
        blocks: int,
        head_keys: bytes = b"",
        tenant: str = "",
        block_bytes: int = 0,
        token_ids: bytes = b"",
    ) -> messages.PutOpened:
        """Leases the blocks that are here, reserves slots for the rest. `head_keys`: of the chain before, when it is
        not whole. `token_ids`, packed, of the blocks with keys and perhaps more: sent only where the agent wants them.

        Raises StoreFull (QuotaExceeded), WrongTenant, WrongSize, AgentUnreachable;
        NotAttached after a restart while older orders are still open.
        """
        request = messages.OpenPut(
            order_id=order_id,
            worker_id=self._worker_id,
            block_keys=block_keys,
            blocks=blocks,
            head_keys=head_keys,
            tenant=tenant,
            block_bytes=block_bytes,
            token_ids=self._wanted_tokens(block_keys, token_ids),
        )
        try:
            opened = await self.ask("open_put", request, messages.PutOpened)
        except NotAttached:
            if self._orders:
                raise
            await self.attach(timeout_s=ASK_S)
            opened = await self.ask("open_put", request, messages.PutOpened)
        self._orders[order_id] = time.monotonic()
        self._opened[order_id] = opened
        self._pushes[order_id] = []
        return opened

    def _wanted_tokens(self, block_keys: bytes, token_ids: bytes) -> bytes:
        if self._attached is None or not self._attached.wants_tokens:
            return b""
        return token_ids[: 4 * self._attached.layout.block_tokens * (len(block_keys) // KEY_BYTES)]

    async def fetch(
        self,
        order_id: str,
        source_node_id: str,
        *,
        first_block: int,
        blocks: int,
        replicas: Sequence[str] = (),
        traceparent: str = "",
    ) -> messages.Fetched:
        """Blocks of the order become readable here, layer by layer (`KvLoaded`), and are committed. When the
        source fails, `replicas` are tried.

        Raises BlockMissing (with `held`), OrderUnknown, or a TransferError; then nothing was committed.
        """
        request = messages.FetchBlocks(
            order_id=order_id,
            worker_id=self._worker_id,
            source_node_id=source_node_id,
            first_block=first_block,
            blocks=blocks,
            replica_node_ids=list(replicas),
            traceparent=traceparent,
        )
        fetched = await self.ask("fetch", request, messages.Fetched, long=True)
        if fetched.missing:
            raise BlockMissing(f"{source_node_id} has {fetched.held} of {blocks} blocks", held=fetched.held)
        return fetched

    async def commit(self, order_id: str, *, first_block: int, blocks: int) -> None:
        """These blocks are written: those with keys become visible to others. Raises OrderUnknown."""
        request = messages.CommitBlocks(
            order_id=order_id, worker_id=self._worker_id, first_block=first_block, blocks=blocks
        )
        await self.ask("commit", request, messages.Done, long=True)

    async def require_held(self, order_id: str) -> None:
        """Raises OrderUnknown where slots of the order may have been given to others."""
        await self.commit(order_id, first_block=0, blocks=0)

    def require_unchanged(self, order_id: str) -> None:
        """Call it after reading slots of an order that was opened here, and before using the bytes: the lease may have
        ended while this process stood still. Raises LeaseLost.
        """
        opened = self._opened.get(order_id)
        if opened is None or self._attached is None or opened.incarnation != self._attached.incarnation:
            raise LeaseLost(f"order {order_id} has no slots in the memory of node {self._node_id} any more")
        self.view.require_unchanged(opened.slots, opened.epochs)

    # --- push -----------------------------------------------------------------------------------------------

    async def open_push(
        self,
        order_id: str,
        request_id: str,
        *,
        target_node_id: str,
        decode_worker_id: str,
        tokens: int = 0,
    ) -> None:
        """Reserves room for the order's blocks at the target, and notifies the decode worker. `tokens`: of the prompt,
        and no more is moved; 0: whole blocks. Raises StoreFull, HolderUnreachable, LayoutMismatch, OrderUnknown (also:
        the decode side released the order already).
        """
        request = messages.OpenPush(
            order_id=order_id,
            request_id=request_id,
            worker_id=self._worker_id,
            target_node_id=target_node_id,
            decode_worker_id=decode_worker_id,
            tokens=tokens,
        )
        await self.ask("open_push", request, messages.Done, long=True)

    def push(self, order_id: str, *, layer: int, first_block: int, blocks: int, layers: int = 1) -> None:
        """Layers `layer .. layer + layers - 1` of these blocks are written here: send them on. Returns at once; from
        any thread.
        """
        push = messages.PushLayer(
            order_id=order_id, layer=layer, layers=layers, first_block=first_block, blocks=blocks
        )
        assert self._loop is not None, "attach first"
        if threading.get_ident() == self._loop_thread:
            self._push(push)
        else:
            self._loop.call_soon_threadsafe(self._push, push)

    def _push(self, push: messages.PushLayer) -> None:
        pushes = self._pushes.get(push.order_id)
        if pushes is None:
            return  # released: the agent would pass over it
        self._orders[push.order_id] = time.monotonic()
        if self._publishes:
            parts = [replace(push, number=len(pushes) + 1)]
        else:  # an older agent knows neither numbers nor runs
            parts = [replace(push, layer=push.layer + i, layers=1) for i in range(push.layers)]
        pushes += parts
        self._outbox += parts
        if not self._gathering:
            self._gathering = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._gathering = False
        while self._outbox:
            some = [self._outbox.popleft() for _ in range(min(len(self._outbox), PUSHES_PER_MESSAGE))]
            message = messages.PushLayers(worker_id=self._worker_id, pushes=some)
            if self._publishes:
                # While the connection is away it is lost, and found so by close_push.
                self._bus.publish_soon(subjects.store(self._node_id, "push"), message)
                continue
            sending = asyncio.ensure_future(self._ask_to_push(message))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    @property
    def _publishes(self) -> bool:
        """An older agent is asked to push, and asked again until it answers."""
        return self._attached is not None and self._attached.hears_pushes

    async def _ask_to_push(self, message: messages.PushLayers) -> None:
        with contextlib.suppress(bus_errors.BusError):  # a lost push is found by close_push
            await self._ask("push", message, messages.Done, self._long_s())

    async def close_push(self, order_id: str, *, traceparent: str = "") -> messages.Pushed:
        """Returns when everything pushed is readable at the target and committed there. Raises the push's failure."""
        await asyncio.sleep(0)  # pushes from other threads come first
        pushes = self._pushes.get(order_id, [])
        request = messages.ClosePush(
            order_id=order_id,
            worker_id=self._worker_id,
            pushes=len(pushes),
            traceparent=traceparent,
            published=self._publishes,
        )
        for tries in range(1, PUSH_TRIES + 1):
            pushed = await self.ask("close_push", request, messages.Pushed, long=True)
            if not pushed.lost:
                return pushed
            if tries < PUSH_TRIES:
                self._outbox.extend(pushes)
                self._send()
        raise TransferError(f"{pushed.lost} of {len(pushes)} pushes were lost on their way to the agent")

    def keep(self, order_id: str) -> None:
        """The order is kept alive until `release`, however long nothing else is done for it."""
        self._orders[order_id] = math.inf

    # --- end ------------------------------------------------------------------------------------------------

    async def release(self, order_id: str) -> None:
        """The worker will touch nothing of the order any more: leases and reservations end, here and at the
        target of an open push. Idempotent; an agent that is gone has released everything already.
        """
        self._pushes.pop(order_id, None)
        self._orders.pop(order_id, None)
        self._opened.pop(order_id, None)
        request = messages.ReleaseBlocks(order_id=order_id, worker_id=self._worker_id)
        with contextlib.suppress(AgentUnreachable):
            await self.ask("release", request, messages.Done)

    async def status(self) -> messages.StoreStatus:
        """The node's slots by state, its counters, and the transports that it lacks."""
        return await self.ask("status", messages.StoreStatusRequest(), messages.StoreStatus)

    async def close(self) -> None:
        """Lets go of the mapping. Orders must have been released."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        for sending in list(self._sending):
            sending.cancel()
        if self._view is not None:
            self._view.close()
            self._view, self._attached = None, None

    async def ask(self, verb: str, message: Message, kind: type[M], *, long: bool = False) -> M:
        """A request to the agent, watched. Raises the error that it answers, or AgentUnreachable."""
        asking = asyncio.ensure_future(self._ask(verb, message, kind, self._long_s() if long else ASK_S))
        try:
            while not asking.done():
                await asyncio.wait([asking], timeout=WATCH_S)
                if not asking.done() and self._view is not None and not self._view.alive():
                    raise AgentUnreachable(f"the store agent of node {self._node_id} died")
            return asking.result()
        except bus_errors.PeerError as problem:
            raise from_code(problem.code, problem.message) from None
        except bus_errors.BusError as problem:
            raise AgentUnreachable(f"store agent of node {self._node_id}: {problem}") from None
        finally:
            asking.cancel()

    def _long_s(self) -> float:
        return ASK_S + (2 * self._attached.transfer_ns_max / 1e9 if self._attached is not None else 0.0)

    async def _ask(self, verb: str, message: Message, kind: type[M], timeout_s: float) -> M:
        """Waits while nobody serves: a dead agent is seen by `ask`, another one is just coming back to the bus."""
        subject = subjects.store(self._node_id, verb)
        return await self._bus.request(
            subject, message, kind, timeout_s=timeout_s, await_responder=self._view is not None
        )
