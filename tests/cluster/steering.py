"""Sends requests where a test wants them, by the means of the protocol: a worker that drains gets nothing
new.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Iterator

import msgspec

from halfmoon.schemas import subjects
from halfmoon.schemas.events import (
    BlocksStored,
    ClusterConfigured,
    Event,
    PolicyChanged,
    PrefillFinished,
    WorkerDraining,
    WorkerJoined,
)
from halfmoon.schemas.numbers import SECOND_NS
from tests.cluster.harness import Cluster
from tests.eventually import BOUND_S, eventually


@contextlib.asynccontextmanager
async def draining(cluster: Cluster, worker_id: str) -> AsyncIterator[None]:
    """Inside the block the conductor places nothing on `worker_id`: what is asked comes behind it in the log."""
    bus = await cluster.bus(worker_id)
    joined = [s.event for s in await cluster.events() if isinstance(s.event, WorkerJoined)]
    last = [event for event in joined if event.worker_id == worker_id][-1]
    try:
        await bus.append(
            WorkerDraining(worker_id=worker_id, incarnation=last.incarnation), source_id=worker_id
        )
        yield
    finally:
        await bus.append(
            WorkerDraining(worker_id=worker_id, incarnation=last.incarnation, draining=False),
            source_id=worker_id,
        )
        await bus.close()


async def prefill_of(cluster: Cluster, request_id: str) -> PrefillFinished:
    """How the request's last prefill went; waits for it to be in the log."""

    async def found() -> list[PrefillFinished]:
        events = [s.event for s in await cluster.events()]
        return [one for one in events if isinstance(one, PrefillFinished) and one.request_id == request_id]

    return (await eventually(found, f"PrefillFinished of {request_id}", every_s=0.05))[-1]


async def patient_with_restarts(cluster: Cluster) -> None:
    """From now on a request whose worker died, and that no other worker can take, waits longer than any restart."""
    configured = next(s.event for s in await cluster.events() if isinstance(s.event, ClusterConfigured))
    policy = msgspec.structs.replace(configured.policy, unplaced_ns_max=int(BOUND_S * SECOND_NS))
    bus = await cluster.bus()
    await bus.append(PolicyChanged(policy=policy), source_id=subjects.OPERATOR)
    await bus.close()


@contextlib.contextmanager
def nobody_is_started_again(cluster: Cluster) -> Iterator[None]:
    """Who dies inside the block stays dead until its end: `halfmoon up` stands still. Nor does it tell of a death."""
    cluster.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.process.send_signal(signal.SIGCONT)


async def last_seq(cluster: Cluster) -> int:
    """The newest place in the log."""
    return (await cluster.events())[-1].seq


async def told(cluster: Cluster, after: int, kind: type[Event], count: int) -> None:
    """Waits until the log has, after this place, so many events of a kind."""

    async def enough() -> bool:
        return sum(isinstance(stamped.event, kind) for stamped in await cluster.events(after)) >= count

    await eventually(enough, f"{count} {kind.__name__}", every_s=0.05)


async def blocks_told(cluster: Cluster, node_id: str, after: int, count: int) -> None:
    """Waits until the log says, after this place, that `count` blocks are readable at a node. No answer waits for it;
    who asks next is placed by what the log said before.
    """

    async def all_told() -> bool:
        stored = [s.event for s in await cluster.events(after) if isinstance(s.event, BlocksStored)]
        # A key has sixteen bytes.
        return sum(len(one.block_keys) // 16 for one in stored if one.node_id == node_id) >= count

    await eventually(all_told, f"{count} blocks are at {node_id}", every_s=0.05)
