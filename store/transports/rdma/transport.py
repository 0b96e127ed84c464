"""The transport over RDMA: one-sided READs and WRITEs between registered pools, by reliable connected queue
pairs.

The pool's segment is one registered region. Queue pairs are made when they are needed: the two agents exchange their
addresses and keys over the bus (`QueuePair`), once, and a pair then serves one move at a time. Idle pairs are kept, up
to PAIRS_PER_PEER for a peer, and the longest unused goes when there are too many in all.

A read brings the source's checksums along with the blocks and compares them. A write ends each message with a WRITE
with immediate: the peer looks whether the slots are reserved for the order, hashes the bytes, and answers whether they
are readable. As over shared memory, the peer cannot stop a byte: the caller keeps to its lease and its deadline, and
bytes that it wrote without a right are refused afterwards, and counted.

A pair that fails is destroyed. When it had worked before, the move is made once more on a new one; a new one
that fails is an unreachable peer. A move that ends early destroys its pair, because only then does the device
touch no memory any more.

Completions come as events of a file descriptor that the event loop watches: no core is kept busy by waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

import msgspec
import numpy as np

from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.store import QueuePair, RemoteMemory
from halfmoon.store.errors import HolderUnreachable, TransferError, TransferRefused, TransferTimeout
from halfmoon.store.pool.checksums import run_sums
from halfmoon.store.transports.base import (
    Call,
    Cancellation,
    Peer,
    ServedPool,
    Slice,
    TransportKind,
    check_items,
    moved_bytes,
    slots_of,
)
from halfmoon.store.transports.rdma import wire
from halfmoon.store.transports.rdma.connection import (
    CELL_BYTES,
    CELLS,
    MAILBOX_BYTES,
    PairBroken,
    RdmaConnection,
    RdmaContext,
)
from halfmoon.store.transports.rdma.device import RdmaAbsent, Wanted, choose, why_down
from halfmoon.store.transports.rdma.options import RdmaOptions
from halfmoon.store.transports.rdma.verbs import Memory, Verbs

#: In all, both those that this agent uses and those that others use here.
PAIRS = 64
PAIRS_PER_PEER = 4
CLOSE_S = 5.0
#: Asks an agent to connect a pair; raises StoreError.
Exchange = Callable[[str, QueuePair], Awaitable[QueuePair]]


class _Links:
    """The pairs to one peer, and room for more. One exchange at a time, so that offers arrive in order."""

    def __init__(self) -> None:
        self.idle: list[RdmaConnection] = []
        self.room = asyncio.Semaphore(PAIRS_PER_PEER)
        self.connecting = asyncio.Lock()
        self.used: set[RdmaConnection] = set()


class RdmaTransport:
    """Implements Transport, and is the other agents' other end. On one event loop."""

    kind = TransportKind("rdma", rank=1, assumed_bytes_s=4e9)

    def __init__(
        self,
        pool: ServedPool,
        options: RdmaOptions,
        executor: Executor,
        *,
        exchange: Exchange,
    ) -> None:
        """Opens the port that `options.device` names. Raises RdmaAbsent, with the reason."""
        if options.device == "off":
            raise RdmaAbsent("rdma is off")
        self._view = pool.view
        self._access = pool.access
        self._options = options
        self._incarnation = pool.incarnation
        self._counters = pool.counters
        self._exchange = exchange
        self._offers = wire.OfferVerifier(options.node_id, pool.incarnation, options.cluster_secret)
        self._verbs = Verbs(choose(Wanted.parse(options.device)), pairs_max=PAIRS)
        try:
            self._context = self._make_context(executor)
        except BaseException:
            self._verbs.close()
            raise
        self._homes = [i * MAILBOX_BYTES for i in reversed(range(self._verbs.pairs_max))]
        self._numbers = itertools.count(1)
        self._pairs: dict[int, RdmaConnection] = {}
        #: Pairs that peers asked for, the longest unused first.
        self._served: OrderedDict[int, RdmaConnection] = OrderedDict()
        self._links: dict[str, _Links] = {}
        self._running: set[Cancellation] = set()
        self._judging: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._verbs.fd, self._completed)
        self.endpoints = [Endpoint(transport="rdma", address=self._verbs.port.gid)]

    def _make_context(self, executor: Executor) -> RdmaContext:
        view, verbs = self._view, self._verbs
        pool = verbs.register(view.blocks.ctypes.data, view.geometry.file_bytes)
        mailboxes = np.frombuffer(mmap.mmap(-1, verbs.pairs_max * MAILBOX_BYTES), np.uint8)
        registered = verbs.register(mailboxes.ctypes.data, mailboxes.nbytes)
        return RdmaContext(view, pool, registered, mailboxes, executor, self._options.stall_ns_max)

    def __str__(self) -> str:
        return str(self._verbs.port)

    # --- Transport ------------------------------------------------------------------------------------------

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        await self._move(peer, items, call, reading=True)

    async def write(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        await self._move(peer, items, call, reading=False)

    def usable_endpoints(self, peer: Peer) -> list[Endpoint]:
        return [at for at in peer.endpoints if at.transport == "rdma"]

    def forget(self, node_id: str) -> None:
        """Its idle pairs go now, the others at the end of their move."""
        links = self._links.pop(node_id, None)
        for pair in links.idle if links is not None else []:
            self._destroy(pair)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for pair in self._pairs.values():
            pair.fail(TransferError("the transport is closed"))
        for cancellation in self._running:
            cancellation.cancel()
        with contextlib.suppress(TimeoutError):
            # A move that waits for an answer over the bus fails by itself.
            async with asyncio.timeout(CLOSE_S):
                while self._running:
                    await asyncio.sleep(0.01)
        for task in self._judging:
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)
        for pair in list(self._pairs.values()):
            self._destroy(pair)
        self._loop.remove_reader(self._verbs.fd)
        self._verbs.close()

    async def _move(self, peer: Peer, items: Sequence[Slice], call: Call, *, reading: bool) -> None:
        self._require_open()
        check_items(self._view.geometry, peer.geometry, items)
        cancellation = Cancellation(call)
        cancellation.check()
        links = self._links.setdefault(peer.node_id, _Links())
        self._running.add(cancellation)
        try:
            async with asyncio.timeout(call.remaining_s()), links.room:
                await self._try(links, peer, items, call, cancellation, reading)
        except TimeoutError:
            raise TransferTimeout(f"the deadline passed while moving to or from {peer.node_id}") from None
        finally:
            self._running.discard(cancellation)

    async def _try(
        self,
        links: _Links,
        peer: Peer,
        items: Sequence[Slice],
        call: Call,
        cancellation: Cancellation,
        reading: bool,
    ) -> None:
        """On an idle pair or a new one; once more on a new one when the idle one had died."""
        while True:
            pair, fresh = await self._pair_to(links, peer)
            links.used.add(pair)
            try:
                await (pair.read if reading else pair.write)(peer, items, call, cancellation)
                return
            except PairBroken:
                self._counters["rdma_pairs_broken"] += 1
                if fresh:
                    raise
                for other in links.idle:  # they go the same way
                    self._destroy(other)
                links.idle.clear()
            finally:
                links.used.discard(pair)
                if pair.busy() or pair.problem is not None or self._links.get(peer.node_id) is not links:
                    self._destroy(pair)
                else:
                    links.idle.append(pair)

    async def _pair_to(self, links: _Links, peer: Peer) -> tuple[RdmaConnection, bool]:
        """An idle pair, or a new one (True)."""
        while links.idle:
            pair = links.idle.pop()
            if pair.problem is None and pair.incarnation == peer.incarnation:
                return pair, False
            self._destroy(pair)
        async with links.connecting:
            return await self._connect(links, peer), True

    # --- endpoints ------------------------------------------------------------------------------------------

    async def _connect(self, links: _Links, peer: Peer) -> RdmaConnection:
        """Raises TransferError, and the errors of the exchange."""
        port = self._verbs.port
        if why := why_down(port.device, port.number):
            raise HolderUnreachable(f"{peer.node_id}: {why}")
        self._require_open()
        pair = self._make()
        try:
            still = [one.their_qpn for one in (*links.idle, *links.used)]
            offer = self._describe(pair, peer.node_id, peer.incarnation, self._offers.number(), still=still)
            answer = await self._exchange(peer.node_id, offer)
            self._require_open()
            try:
                self._offers.check_answer(answer, offer)
                self._check_fabric(answer)
            except wire.OfferRefused as problem:
                self._counters[f"refused_rdma_{problem.name}"] += 1
                raise TransferRefused(str(problem)) from None
            if answer.region.size != peer.geometry.file_bytes:
                raise TransferRefused(
                    f"{peer.node_id} has {answer.region.size} bytes registered, not its pool"
                )
            pair.connect(answer, self._verbs.mtu)
        except BaseException:
            self._destroy(pair)
            raise
        self._counters["rdma_pairs_made"] += 1
        return pair

    def accept(self, offer: QueuePair) -> QueuePair:
        """The other agent's end of a new pair is connected to one of ours. Raises TransferError;
        TransferRefused is counted by reason.
        """
        self._require_open()
        try:
            self._offers.admit(offer)
            self._check_fabric(offer)
        except wire.OfferRefused as problem:
            self._counters[f"refused_rdma_{problem.name}"] += 1
            raise TransferRefused(str(problem)) from None
        for pair in list(self._served.values()):
            if pair.node_id == offer.node_id and (
                pair.incarnation != offer.incarnation or pair.handle.number not in offer.still
            ):
                self._destroy(pair)
        pair = self._make()
        try:
            pair.told = lambda cell, size: self._judge(pair, cell, size)
            pair.connect(offer, self._verbs.mtu)
        except BaseException:
            self._destroy(pair)
            raise
        self._served[pair.number] = pair
        return self._describe(pair, offer.node_id, offer.incarnation, offer.number, answer=True)

    def _describe(
        self,
        pair: RdmaConnection,
        node_id: str,
        incarnation: str,
        number: int,
        *,
        answer: bool = False,
        still: Sequence[int] = (),
    ) -> QueuePair:
        port, pool, mailboxes = self._verbs.port, self._context.pool, self._context.mailboxes
        mine = Memory(mailboxes.address + pair.home, CELLS * CELL_BYTES, 0, mailboxes.rkey)
        bare = QueuePair(
            node_id=self._options.node_id,
            incarnation=self._incarnation,
            to_node_id=node_id,
            to_incarnation=incarnation,
            number=number,
            answer=answer,
            qpn=pair.handle.number,
            psn=pair.handle.psn,
            gid=port.gid,
            lid=port.lid,
            ethernet=port.ethernet,
            mtu=self._verbs.mtu,
            region=_remote(pool),
            mailbox=_remote(mine),
            still=list(still),
        )
        return wire.sign(bare, self._options.cluster_secret)

    def _check_fabric(self, other: QueuePair) -> None:
        mine = self._verbs.port.ethernet
        if other.ethernet != mine:
            kinds = {True: "RoCE", False: "InfiniBand"}
            raise wire.OfferRefused(
                "fabric", f"{other.node_id} is on {kinds[other.ethernet]}, this agent on {kinds[mine]}"
            )

    # --- pairs ----------------------------------------------------------------------------------------------

    def _make(self) -> RdmaConnection:
        """A pair that is not connected yet. Raises TransferError when there is no room for it."""
        if not self._homes:
            self._evict()
        pair = RdmaConnection(next(self._numbers), self._verbs.pair(), self._context, self._homes.pop())
        self._pairs[pair.number] = pair
        return pair

    def _evict(self) -> None:
        """The longest idle pair of ours, then the longest unused of others'; its user makes a new one."""
        idle = [(links.idle[0].number, links) for links in self._links.values() if links.idle]
        if idle:
            _, links = min(idle, key=lambda entry: entry[0])
            self._destroy(links.idle.pop(0))
        elif self._served:
            self._destroy(next(iter(self._served.values())))
        else:
            raise TransferError(f"all {self._verbs.pairs_max} queue pairs are in use")
        self._counters["rdma_pairs_evicted"] += 1

    def _destroy(self, pair: RdmaConnection) -> None:
        pair.fail(TransferError(f"the queue pair to {pair.node_id} was closed"))
        pair.handle.close()
        self._served.pop(pair.number, None)
        if self._pairs.pop(pair.number, None) is not None:
            self._homes.append(pair.home)

    def _completed(self) -> None:
        for one in self._verbs.completions():
            pair = self._pairs.get(one.wr_id >> 16)
            if pair is not None:  # else it was destroyed
                pair.complete(one)

    # --- what others write ----------------------------------------------------------------------------------

    def _judge(self, pair: RdmaConnection, cell: int, size: int) -> None:
        """An immediate of a writer: its bytes are there."""
        if cell >= CELLS or size > CELL_BYTES:
            self._counters["refused_rdma_malformed"] += 1
            self._destroy(pair)
            return
        self._served.move_to_end(pair.number)
        task = self._loop.create_task(self._judge_in_thread(pair, cell, pair.heard(cell, size)))
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)

    async def _judge_in_thread(self, pair: RdmaConnection, cell: int, raw: bytes) -> None:
        verdict = await self._loop.run_in_executor(self._context.executor, self._check, raw)
        if verdict.name:
            self._counters[f"refused_{verdict.name}"] += 1
        if pair.problem is None:
            try:
                pair.tell(cell, wire.pack(verdict), answer=True)
            except TransferError as problem:
                pair.fail(problem)
        if pair.problem is not None:
            self._destroy(pair)

    def _check(self, raw: bytes) -> wire.WriteVerdict:
        """In a thread: check that the slots were reserved, and that the bytes have their checksums."""
        try:
            arrived = wire.arrived_decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            return wire.WriteVerdict("malformed", f"malformed: {problem}")
        at = self._view.geometry
        for run in arrived.runs:
            if not run.inside(at):
                return wire.WriteVerdict("outside", f"slot {run.slot}, layers {run.first_layer}+{run.layers}")
        if len(arrived.sums) != sum(run.layers for run in arrived.runs):
            return wire.WriteVerdict(
                "malformed_write",
                f"{len(arrived.sums)} checksums for {sum(run.layers for run in arrived.runs)} layers",
            )
        slots, parts = slots_of(arrived.runs)
        if reason := self._access.begin_write(arrived.order_id, arrived.party, slots, parts=parts):
            return wire.WriteVerdict("no_reservation", reason[:500])
        try:
            sums = iter(arrived.sums)
            for run in arrived.runs:
                expected = [next(sums) for _ in range(run.layers)]
                if run_sums(self._view, run.slot, run.first_layer, run.layers, run.fill) != expected:
                    return wire.WriteVerdict("corrupted", f"slot {run.slot} is not what was sent")
        finally:
            self._access.end_write(arrived.order_id, arrived.party)
        self._counters["rdma_written_bytes"] += moved_bytes(arrived.runs, at.layer_block_bytes)
        return wire.WriteVerdict()

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError("the transport is closed")


def _remote(memory: Memory) -> RemoteMemory:
    return RemoteMemory(address=str(memory.address), size=memory.size, rkey=memory.rkey)
