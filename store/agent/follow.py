"""Obeys the decisions that conductors make for this agent."""

from __future__ import annotations

from halfmoon.bus.tail import StreamTail
from halfmoon.schemas.decisions import AnnounceYourself, ReleaseOrder, ReplicateBlocks
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.release import release_order
from halfmoon.store.agent.replicas import Replicator


async def follow_decisions(context: AgentContext, decisions: StreamTail, replicator: Replicator) -> None:
    """Runs until it is cancelled. Decisions do not wait for each other: each starts its own task."""
    async for ordered in context.bus.follow_decisions(decisions):
        match ordered.decision:
            case ReleaseOrder(order_id=order_id):
                context.spawn(release_order(context, order_id))
            case AnnounceYourself():
                context.announcer.announce()
            case ReplicateBlocks():
                context.spawn(replicator.obey(ordered.decision))
            case _:
                context.counters["decisions_not_for_stores"] += 1
