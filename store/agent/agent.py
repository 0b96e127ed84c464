"""The store agent: one a node. Owns the node's pool and its memory, moves blocks, answers leases.

Structure: `guard` (what is where, under a lock) · `announcer` (tells the log) · `peers` (other agents) ·
transports (bytes) · `serve` (requests). The event loop does control; threads copy and hash. What an order has
under way here (fetches, a push) is in `self._work`, so that a release at any moment ends it, waits until
nothing is touched any more, and only then frees the slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError
from halfmoon.bus.tail import StreamTail
from halfmoon.bus.telemetry.tracing import Tracing
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import AnnounceYourself, ReleaseOrder, ReplicateBlocks
from halfmoon.schemas.events import Endpoint, StoreJoined, StoreLeft
from halfmoon.schemas.store import Hello
from halfmoon.store.agent.announcer import Announcer
from halfmoon.store.agent.kv_events import KvEvents
from halfmoon.store.agent.open_transports import open_rdma
from halfmoon.store.agent.peers import Peers, sign
from halfmoon.store.agent.push import Push
from halfmoon.store.agent.replicas import obey
from halfmoon.store.agent.serve_workers import serve_all
from halfmoon.store.agent.ssd_load import make_tier
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import (
    BytesCorrupted,
    HolderUnreachable,
    NotAttached,
    OrderUnknown,
    StoreError,
    TransferError,
    TransferTimeout,
)
from halfmoon.store.pool.checksums import block_sum, slots_sums
from halfmoon.store.pool.eviction import make_eviction
from halfmoon.store.pool.guard import WORKER, PoolGuard, peer_writer
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.segment import PoolView, Segment, host_id, segment_name
from halfmoon.store.pool.slots import Change, Owner
from halfmoon.store.transports.base import Peer, Transport
from halfmoon.store.transports.engine import TransferEngine, TransferStats, TransportKind
from halfmoon.store.transports.rdma.transport import RdmaTransport
from halfmoon.store.transports.shm import ShmTransport
from halfmoon.store.transports.tcp.transport import TcpTransport
from halfmoon.store.transports.topology import Topology, read_topology

T = TypeVar("T")


class Work:
    """What runs for one owner."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.push: Push | None = None


class StoreAgent:
    """One a node: owns the pool, moves blocks, answers leases. `start`, then `stop`."""

    def __init__(self, bus: Bus, config: StoreConfig) -> None:
        self.bus = bus
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.counters: Counter[str] = Counter()
        self.announcer = Announcer(
            bus, node_id=config.node_id, incarnation=self.incarnation, heartbeat_ns=config.heartbeat_ns
        )
        self.guard = PoolGuard(
            Pool(config.slot_count, eviction=make_eviction(config.eviction), quotas=config.slot_quotas),
            ttl_ns=config.lease_ttl_ns,
            grace_ns=config.writer_grace_ns,
            announce=self._changed,
        )
        self.peers = Peers(
            bus,
            me=self.hello,
            secret=config.cluster_secret,
            timeout_s=config.control_timeout_s,
            learnt=self._learnt,
        )
        self.peers.forgotten.append(self._forgotten)
        self.executor = ThreadPoolExecutor(config.threads + 2, thread_name_prefix=f"store-{config.node_id}")
        #: Workers that have this incarnation's memory mapped; nothing is opened for others.
        self.attached: set[str] = set()
        #: The last process seen of each worker.
        self._processes: dict[str, str] = {}
        #: The incarnation last seen of each other agent.
        self._agents: dict[str, str] = {}
        self.kv_events = KvEvents(config.kv_events, config.kv_events_replay, config.layout.block_tokens)
        self.announcer.listeners.append(self.kv_events.add)
        self.tier = make_tier(self) if config.ssd_path else None
        #: What a reader's lease may take in all, when its blocks come from the SSD first.
        self.promotion_ns_max = int(config.control_timeout_s * 0.6e9)
        self._segment: Segment | None = None
        self._engine: TransferEngine | None = None
        self.rdma: RdmaTransport | None = None
        #: Name of a transport, and why it is not there.
        self.absent: dict[str, str] = {}
        self._tcp: TcpTransport | None = None
        self._work: dict[Owner, Work] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._subscriptions: list[Subscription] = []
        self._hello: Hello | None = None
        #: Copies that a conductor ordered are made one after the other.
        self.replicating = asyncio.Lock()
        #: Set when this node was drained: its process stops.
        self.drained = asyncio.Event()
        #: OpenTelemetry, where it is switched on.
        self.tracing: Tracing | None = None
        self._topology = Topology()

    # --- life -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Makes the segment, listens, joins. Raises SegmentError, TransferError (port taken)."""
        config = self.config
        name = segment_name(config.cluster, config.node_id)
        self._segment = await asyncio.to_thread(Segment.create, name, config.geometry)
        try:
            await asyncio.to_thread(
                self.view.touch
            )  # the kernel clears the pages now, not under the first transfer
            self._topology = await asyncio.to_thread(read_topology, config.topology)
            transports: dict[TransportKind, Transport] = {}
            if config.transport in ("auto", "shm"):
                transports["shm"] = ShmTransport(self.view, self.executor)
            if (rdma := open_rdma(self)) is not None:
                self.rdma = transports["rdma"] = rdma
            if config.port >= 0:
                self._tcp = TcpTransport(
                    self.view,
                    self.guard,
                    config,
                    incarnation=self.incarnation,
                    host=host_id(),
                    counters=self.counters,
                )
                self._tcp.start()
                if config.transport in ("auto", "tcp"):
                    transports["tcp"] = self._tcp
            self._engine = TransferEngine(
                transports, host=host_id(), stripes=config.stripe_count, counters=self.counters
            )
            decisions = await self.bus.open_decisions(config.node_id)
            self.spawn(self._follow(decisions))
            joined = subjects.events_of_kind(StoreJoined.__name__)
            self._subscriptions = [
                *await serve_all(self),
                await self.bus.subscribe(
                    joined, StoreJoined, lambda e: self.know_agent(e.node_id, e.incarnation)
                ),
            ]
            self.kv_events.start()
            if self.tier is not None:
                self.kv_events.add(await self.tier.start())
            self.announcer.start(self.guard, self._joined, self.tier.keys if self.tier is not None else list)
            self.spawn(self._sweep())
        except BaseException:
            await self.stop()
            raise

    async def stop(self, *, reason: str = "stopped") -> None:
        """Leaves: ends what runs, tells the log, unlinks the segment. Idempotent."""
        if self._segment is None:
            return
        for subscription in self._subscriptions:
            with contextlib.suppress(NatsError):  # the bus may be gone
                await subscription.unsubscribe()
        for owner in list(self._work):
            await self.end_work(owner, reason)
        background = list(self._background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        if self.tier is not None:
            await self.tier.stop()
        await self.kv_events.stop()
        await self.announcer.stop()
        with contextlib.suppress(BusError):
            left = StoreLeft(node_id=self.config.node_id, incarnation=self.incarnation, reason=reason)
            self.bus.append_soon(left, source_id=self.config.node_id)
        for transport in (self._engine, self._tcp):
            if transport is not None:
                await transport.close()
        self.executor.shutdown(wait=True)
        self._segment.close()
        self._segment = None

    @property
    def moved(self) -> Mapping[tuple[str, str], TransferStats]:
        """By transport and direction."""
        return self._engine.moved if self._engine is not None else {}

    @property
    def view(self) -> PoolView:
        assert self._segment is not None, "the agent is not started"
        return self._segment.view

    def hello(self) -> Hello:
        """Who this agent is, signed."""
        if self._hello is None:
            config = self.config
            endpoints = [Endpoint(transport="shm", address=segment_name(config.cluster, config.node_id))]
            if self._tcp is not None:
                endpoints += self._topology.measured(self._tcp.endpoints)
            endpoints += self.rdma.endpoints if self.rdma is not None else []
            bare = Hello(
                node_id=config.node_id,
                incarnation=self.incarnation,
                host=host_id(),
                segment=endpoints[0].address,
                slots=config.slot_count,
                layout=config.layout,
                endpoints=endpoints,
                public_key=self._tcp.public_key if self._tcp is not None else "",
            )
            self._hello = sign(bare, config.cluster_secret)
        return self._hello

    def _changed(self, changes: list[Change]) -> None:
        if self.tier is not None:
            lost = [c for c in changes if c.kind == "evicted" and self.tier.find(c.key) is None]
            self.counters["ssd_unsaved"] += len(lost)
        self.announcer.add(changes)

    def _joined(self) -> StoreJoined:
        hello = self.hello()
        return StoreJoined(
            node_id=hello.node_id,
            incarnation=hello.incarnation,
            host=hello.host,
            layout=hello.layout,
            slots=hello.slots,
            endpoints=hello.endpoints,
        )

    # --- peers ----------------------------------------------------------------------------------------------

    def transport_to(self, peer: Peer) -> Transport:
        """Raises HolderUnreachable when there is no common transport."""
        assert self._engine is not None
        self._engine.paths(peer)
        return self._engine

    def _learnt(self, hello: Hello) -> None:
        if self._tcp is not None:
            self._tcp.allow(hello)

    def _forgotten(self, node_id: str) -> None:
        if self._engine is not None:
            self._engine.forget(node_id)

    def failed(self, node_id: str, problem: StoreError) -> None:
        """A peer could not be read or written: counted, suspected, and asked anew next time."""
        self.counters[f"failed_{problem.code}"] += 1
        if isinstance(problem, HolderUnreachable | TransferTimeout | BytesCorrupted):
            self.announcer.suspect(node_id, f"{problem.code}: {problem}")
        if isinstance(problem, TransferError):
            self.peers.forget(node_id)

    # --- orders ---------------------------------------------------------------------------------------------

    def work(self, owner: Owner) -> Work:
        return self._work.setdefault(owner, Work())

    def push_of(self, owner: Owner) -> Push | None:
        work = self._work.get(owner)
        return work.push if work is not None else None

    def pushes_open(self) -> int:
        return sum(work.push is not None and not work.push.finished for work in self._work.values())

    async def know_process(self, worker_id: str, process: str) -> None:
        """A worker of that name is there. An earlier process of the same name is dead and will neither read
        nor write: whatever it held is free at once."""
        known = self._processes.get(worker_id)
        self._processes[worker_id] = process
        if known is not None and known != process:
            self.attached.discard(worker_id)
            for owner in self.guard.party(worker_id):
                await self.release(owner)

    async def know_agent(self, node_id: str, incarnation: str) -> None:
        """Another agent is there. What an earlier one of its node reserved here will not be written any more."""
        known = self._agents.get(node_id)
        self._agents[node_id] = incarnation
        if known is not None and known != incarnation:
            self.peers.forget(node_id)
            writer = peer_writer(node_id)
            for owner in self.guard.party(writer):
                self.guard.release(owner, writers=[writer])

    def require_attached(self, worker_id: str) -> None:
        """Raises NotAttached: the worker would write to, or read, the memory of an agent that is gone."""
        if worker_id not in self.attached:
            raise NotAttached(f"worker {worker_id} has not mapped node {self.config.node_id}'s memory yet")

    async def run_for(self, owner: Owner, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` as the owner's, so that a release ends it. Raises OrderUnknown then."""
        task = asyncio.create_task(work)
        self.work(owner).tasks.add(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise OrderUnknown(f"order {owner.order_id} was released") from None
            task.cancel()
            raise
        finally:
            if (entry := self._work.get(owner)) is not None:
                entry.tasks.discard(task)
                if not entry.tasks and entry.push is None:
                    del self._work[owner]

    async def end_work(self, owner: Owner, reason: str) -> None:
        """Ends what runs for the owner; when this returns, none of it touches a slot any more."""
        work = self._work.pop(owner, None)
        if work is None:
            return
        for task in work.tasks:
            task.cancel()
        await asyncio.gather(*work.tasks, return_exceptions=True)
        if work.push is not None:
            await work.push.end(reason)

    async def release(self, owner: Owner) -> None:
        """By the worker itself: it will not write any more. Idempotent."""
        await self.end_work(owner, "released")
        self.guard.release(owner, writers=[WORKER], remember=True)

    async def release_order(self, order_id: str) -> None:
        """By the conductor: its workers may be dead, or may still write for a while."""
        for owner in {*self.guard.owners(order_id), *(o for o in self._work if o.order_id == order_id)}:
            await self.end_work(owner, "released by the conductor")
        self.guard.release_order(order_id)

    async def commit(
        self,
        owner: Owner,
        first_block: int,
        blocks: int,
        *,
        check: Callable[[dict[int, int]], None] | None = None,
    ) -> None:
        """Hashes blocks, shows the checksums by index to `check` (which may raise), and makes the blocks
        visible.

        Raises OrderUnknown, also when the order was released while its blocks were hashed.
        """
        slots = self.guard.to_commit(owner, first_block, blocks)
        if not slots:
            return
        view = self.view
        loop = asyncio.get_running_loop()
        sums = await loop.run_in_executor(self.executor, slots_sums, view, list(slots.values()))
        checksums = {i: block_sum(some) for i, some in zip(slots, sums, strict=True)}
        if check is not None:
            check(checksums)
        # From here on nothing waits, so that the slots are still the order's when their sums are written.
        still = self.guard.to_commit(owner, first_block, blocks)
        for (i, slot), some in zip(slots.items(), sums, strict=True):
            if still.get(i) == slot:
                view.sums[slot] = some
        self.guard.commit(owner, checksums)

    # --- background -----------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _follow(self, decisions: StreamTail) -> None:
        async for ordered in self.bus.follow_decisions(decisions):
            match ordered.decision:
                case ReleaseOrder(order_id=order_id):
                    self.spawn(self.release_order(order_id))
                case AnnounceYourself():
                    self.announcer.announce()
                case ReplicateBlocks():
                    self.spawn(obey(self, ordered.decision))
                case _:
                    self.counters["decisions_not_for_stores"] += 1

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_ns / 1e9)
            for owner in self.guard.sweep():
                self.counters["holds_expired"] += 1
                self.spawn(self.end_work(owner, "the lease expired"))
