"""Ends the holds of an order: for its worker, for the conductor, or because they were not renewed in time."""

from __future__ import annotations

import asyncio

from halfmoon.schemas.store import reference_hold
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.pool.guard import WORKER
from halfmoon.store.pool.slots import Owner


async def release(context: AgentContext, owner: Owner) -> None:
    """By the worker itself: it will not write any more. Idempotent."""
    await context.orders.end(owner, "released")
    context.guard.release(owner, writers=[WORKER], remember=True)


async def release_order(context: AgentContext, order_id: str) -> None:
    """By the conductor: the order's workers may be dead, or may still write until their deadline."""
    for hold_id in (order_id, reference_hold(order_id)):
        for owner in {*context.guard.owners(hold_id), *context.orders.owners(hold_id)}:
            await context.orders.end(owner, "released by the conductor")
        context.guard.release_order(hold_id)


async def sweep(context: AgentContext) -> None:
    """Collects expired holds, for ever."""
    while True:
        await asyncio.sleep(context.config.sweep_ns / 1e9)
        for owner in context.guard.sweep():
            context.counters["holds_expired"] += 1
            context.spawn(context.orders.end(owner, "the lease expired"))
