"""The state that the parts of a store agent share: the pool, the other agents, the transports, the orders.

A part (fetching, pushing, serving, copying, loading) takes an `AgentContext` and nothing else of the agent, so that
no part imports the agent that it belongs to.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from halfmoon.bus.connection import Bus
from halfmoon.bus.telemetry.tracing import Tracing
from halfmoon.schemas.events import StoreJoined
from halfmoon.schemas.store import Hello
from halfmoon.store.agent.announcer import Announcer
from halfmoon.store.agent.kv_events import KvEvents, KvEventsOptions
from halfmoon.store.agent.open_transports import OpenTransports, TransportSite
from halfmoon.store.agent.orders import OrderTasks
from halfmoon.store.agent.peers import Peers, sign
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import (
    BytesCorrupted,
    HolderUnreachable,
    StoreError,
    TransferError,
    TransferTimeout,
)
from halfmoon.store.pool.checksums import block_sum, slots_sums
from halfmoon.store.pool.guard import PoolGuard, open_pool
from halfmoon.store.pool.segment import PoolView, Segment, host_id, segment_name
from halfmoon.store.pool.slots import Change, Owner
from halfmoon.store.tiers.base import Tier
from halfmoon.store.transports.base import ServedPool


class AgentContext:
    """Made with the agent; `segment` and `transports` are there from `StoreAgent.start` on."""

    def __init__(self, bus: Bus, config: StoreConfig, *, tracing: Tracing | None = None) -> None:
        self.bus = bus
        self.config = config
        self.tracing = tracing
        self.incarnation = secrets.token_hex(8)
        self.counters: Counter[str] = Counter()
        self.executor = ThreadPoolExecutor(config.threads + 2, thread_name_prefix=f"store-{config.node_id}")
        self.announcer = Announcer(
            bus, node_id=config.node_id, incarnation=self.incarnation, heartbeat_ns=config.heartbeat_ns
        )
        self.guard = PoolGuard(
            open_pool(config.slot_count, config.eviction, config.slot_quotas),
            ttl_ns=config.lease_ttl_ns,
            grace_ns=config.writer_grace_ns,
            announce=self._pool_changed,
        )
        self.transports = OpenTransports()
        self.peers = Peers(
            bus,
            me=self.hello,
            secret=config.cluster_secret,
            timeout_s=config.control_timeout_s,
        )
        self.peers.forgotten.append(lambda node_id: self.transports.forget(node_id))
        self.orders = OrderTasks()
        options = KvEventsOptions(
            address=config.kv_events,
            replay_address=config.kv_events_replay,
            topic=config.kv_events_topic,
            tokens=config.kv_events_tokens,
        )
        self.kv_events = KvEvents(options, block_tokens=config.layout.block_tokens, slots=config.slot_count)
        self.tier: Tier | None = None
        self.segment: Segment | None = None
        #: Set when this node was drained: its process stops.
        self.drained = asyncio.Event()
        self._hello: Hello | None = None
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def view(self) -> PoolView:
        assert self.segment is not None, "the agent is not started"
        return self.segment.view

    def hello(self) -> Hello:
        """This agent's own hello, signed. Ask once the transports are open."""
        if self._hello is None:
            config = self.config
            bare = Hello(
                node_id=config.node_id,
                incarnation=self.incarnation,
                host=host_id(),
                segment=segment_name(config.cluster, config.node_id),
                slots=config.slot_count,
                layout=config.layout,
                endpoints=self.transports.endpoints,
            )
            self._hello = sign(bare, config.cluster_secret)
        return self._hello

    def joined(self) -> StoreJoined:
        """The event that begins every announcement of this agent in the log."""
        hello = self.hello()
        return StoreJoined(
            node_id=hello.node_id,
            incarnation=hello.incarnation,
            host=hello.host,
            layout=hello.layout,
            slots=hello.slots,
            endpoints=hello.endpoints,
        )

    async def open_transports(self) -> None:
        """Once the segment is there. Raises TransferError: a port is taken, or a forced transport is absent."""
        await self.transports.open(
            TransportSite(
                config=self.config,
                pool=ServedPool(
                    view=self.view,
                    access=self.guard,
                    incarnation=self.incarnation,
                    counters=self.counters,
                ),
                executor=self.executor,
                exchange=self.peers.connect_pair,
            )
        )

    def peer_failed(self, node_id: str, problem: StoreError) -> None:
        """A peer could not be read or written: counted, suspected, and asked for its hello again next time."""
        self.counters[f"failed_{problem.code}"] += 1
        # A peer that refuses, or misses a block, is alive.
        if isinstance(problem, HolderUnreachable | TransferTimeout | BytesCorrupted):
            self.announcer.suspect(node_id, f"{problem.code}: {problem}")
        if isinstance(problem, TransferError):
            self.peers.forget(node_id)

    async def commit(
        self,
        owner: Owner,
        first_block: int,
        blocks: int,
        *,
        check: Callable[[dict[int, int]], None] | None = None,
    ) -> None:
        """Hashes blocks, shows the checksums by index to `check` (which may raise), and makes the blocks visible.

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

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs `work` in the background, until it ends or the agent stops."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def cancel_background(self) -> None:
        background = list(self._background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)

    def _pool_changed(self, changes: list[Change]) -> None:
        if self.tier is not None:
            # Evicted before the tier had a copy: the block is lost to this node.
            lost = [c for c in changes if c.kind == "evicted" and self.tier.find(c.key) is None]
            self.counters["ssd_unsaved"] += len(lost)
        self.announcer.add(changes)
