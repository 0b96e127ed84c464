"""Sends requests where a test wants them, by the means of the protocol: a worker that drains gets nothing
new.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from halfmoon.schemas.events import PrefillFinished, WorkerDraining, WorkerJoined
from tests.cluster.harness import Cluster


@contextlib.asynccontextmanager
async def draining(cluster: Cluster, worker_id: str) -> AsyncIterator[None]:
    """Inside the block the conductor places nothing on `worker_id`."""
    bus = await cluster.bus(worker_id)
    joined = [s.event for s in await cluster.events() if isinstance(s.event, WorkerJoined)]
    last = [event for event in joined if event.worker_id == worker_id][-1]
    try:
        await bus.append(
            WorkerDraining(worker_id=worker_id, incarnation=last.incarnation), source_id=worker_id
        )
        await asyncio.sleep(0.05)
        yield
    finally:
        await bus.append(
            WorkerDraining(worker_id=worker_id, incarnation=last.incarnation, draining=False),
            source_id=worker_id,
        )
        await asyncio.sleep(0.05)
        await bus.close()


async def prefill_of(cluster: Cluster, request_id: str) -> PrefillFinished:
    """How the request's last prefill went; waits for it to be in the log."""
    for _ in range(100):
        found = [
            s.event
            for s in await cluster.events()
            if isinstance(s.event, PrefillFinished) and s.event.request_id == request_id
        ]
        if found:
            return found[-1]
        await asyncio.sleep(0.05)
    raise AssertionError(f"no PrefillFinished of {request_id}")
