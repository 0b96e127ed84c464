"""The store agent: one a node. It owns the node's pool and its memory, moves blocks, and answers leases.

This module only puts the parts together. They share a `context`: the pool behind its lock (`guard`), the other agents
(`peers`), the transports, the tier behind the pool, the tasks of each order, and the `announcer`, which appends to the
log. The event loop does control; threads copy and hash.
"""

from __future__ import annotations

import asyncio
import contextlib

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from halfmoon.bus.connection import Bus
from halfmoon.bus.telemetry.tracing import Tracing
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.follow import follow_decisions
from halfmoon.store.agent.open_tier import open_tier
from halfmoon.store.agent.processes import KnownProcesses
from halfmoon.store.agent.release import sweep
from halfmoon.store.agent.replicas import Replicator
from halfmoon.store.agent.serving.serve import serve_all
from halfmoon.store.config import StoreConfig
from halfmoon.store.pool.fence import SegmentFence
from halfmoon.store.pool.segment import Segment, segment_name


class StoreAgent:
    """One a node. `start`, then `stop`."""

    def __init__(self, bus: Bus, config: StoreConfig, *, tracing: Tracing | None = None) -> None:
        self.context = AgentContext(bus, config, tracing=tracing)
        self.context.tier = open_tier(self.context)
        self.context.announcer.listeners.append(self.context.kv_events.add)
        self._processes = KnownProcesses(self.context)
        self._subscriptions: list[Subscription] = []

    @property
    def drained(self) -> asyncio.Event:
        """Set when this node was drained: its process stops."""
        return self.context.drained

    async def start(self) -> None:
        """Makes the segment, listens, joins. Raises SegmentError, TransferError (port taken)."""
        context, config = self.context, self.context.config
        name = segment_name(config.cluster, config.node_id)
        context.segment = await asyncio.to_thread(Segment.create, name, config.geometry)
        context.guard.fence_by(SegmentFence(context.view))
        try:
            # The kernel clears the pages now, and not under the first transfer.
            await asyncio.to_thread(context.view.touch)
            await context.open_transports()
            replicator = Replicator(context)
            decisions = await context.bus.open_decisions(config.node_id)
            context.spawn(follow_decisions(context, decisions, replicator))
            self._subscriptions = await serve_all(context, self._processes, replicator)
            context.kv_events.start()
            if context.tier is not None:
                context.kv_events.add(await context.tier.start())
            context.announcer.start(context.guard, context.joined, context.tier)
            context.spawn(sweep(context))
        except BaseException:
            await self.stop()
            raise

    async def stop(self, *, reason: str = "stopped") -> None:
        """Leaves: ends running work, announces the end, unlinks the segment. Idempotent."""
        context = self.context
        if context.segment is None:
            return
        for subscription in self._subscriptions:
            with contextlib.suppress(NatsError):  # the bus may be gone
                await subscription.unsubscribe()
        await context.orders.end_all(reason)
        await context.cancel_background()
        if context.tier is not None:
            await context.tier.stop()
        await context.kv_events.stop()
        await context.announcer.leave(reason)
        # Peers may read and write until here; nothing touches the memory once the transports are closed.
        await context.transports.close()
        context.executor.shutdown(wait=True)
        context.segment.close()
        context.segment = None
