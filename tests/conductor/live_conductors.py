"""Conductors on a real nats-server, and what they leave in the streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from conductor_scripts import MS, decode, prefill, store

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.live import shell
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import decode as read
from halfmoon.schemas.decisions import Decision, Ordered, SetTimer
from halfmoon.schemas.events import (
    Event,
    FrontendJoined,
    Stamped,
)
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.status import ConductorStatus, StatusRequest
from tests.eventually import BOUND_S, eventually

POLICY = Policy(heartbeat_ns=100 * MS, lost_after_ns=400 * MS)
CLUSTER: list[Event] = [
    prefill(),
    store("p0"),
    decode(),
    store("d0"),
    FrontendJoined(frontend_id="f1", incarnation="i1"),
]


@contextlib.asynccontextmanager
async def conductor(
    url: str,
    conductor_id: str = "c1",
    policy: Policy = POLICY,
    shells: list[shell.Shell] | None = None,
    after_step: Callable[[Stamped, list[Decision]], None] | None = None,
    **more: Any,
) -> AsyncIterator[Bus]:
    """A conductor that has caught up; stopped at the end. Its shell becomes the first of `shells`, an empty list;
    `after_step` sees every event with its decisions.
    """
    bus = await Bus.connect(BusConfig(url=url), name=conductor_id)
    shells = [] if shells is None else shells

    def started(made: shell.Shell) -> None:
        made.after_step = after_step
        shells.append(made)

    task = asyncio.create_task(
        shell.run(bus, conductor_id=conductor_id, policy=policy, checked=True, started=started, **more)
    )
    try:

        def caught_up() -> bool:
            if task.done():
                task.result()
            return bool(shells) and shells[0].caught_up.is_set()

        await eventually(caught_up, f"{conductor_id} has caught up", every_s=0.005)
        yield bus
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await bus.close()


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(BusConfig(url=url), name="client")
    try:
        yield bus
    finally:
        await bus.close()


async def say(bus: Bus, *events: Event) -> int:
    seq = 0
    for event in events:
        seq = await bus.append(event, source_id="up")
    return seq


async def status(bus: Bus, conductor_id: str = "c1") -> ConductorStatus:
    """Waits for a conductor that is not there yet, or not yet again, and until it has read the log."""

    async def answer() -> ConductorStatus | None:
        now = await bus.request(
            subjects.status(conductor_id),
            StatusRequest(digest=True),
            ConductorStatus,
            timeout_s=BOUND_S,
            await_responder=True,
        )
        return now if now.caught_up else None

    now = await eventually(answer, f"{conductor_id} has read the log", every_s=0.01)
    assert now is not None
    return now


async def reach(bus: Bus, seq: int, conductor_id: str = "c1") -> ConductorStatus:
    async def there() -> ConductorStatus | None:
        now = await status(bus, conductor_id)
        return now if now.seq >= seq else None

    now = await eventually(there, f"{conductor_id} is at {seq}", every_s=0.01)
    assert now is not None
    return now


async def log_of(bus: Bus) -> list[Stamped]:
    return [stamped async for stamped in bus.events(last=await bus.last_seq())]


async def decisions_of(bus: Bus, count: int) -> list[Ordered]:
    """All that the stream holds; waits until there are `count`."""

    async def enough() -> bool:
        return await bus.last_seq(subjects.DECISIONS_STREAM) >= count

    await eventually(enough, f"{count} decisions are stored", every_s=0.01)
    last, found = await bus.last_seq(subjects.DECISIONS_STREAM), []
    async for message in bus.read(subjects.DECISIONS_STREAM, subjects.DECISIONS_ALL):
        found.append(read(message.payload, Ordered))
        if message.seq >= last:
            break
    return found


def replayed(log: list[Stamped]) -> list[Ordered]:
    """What a core decides on the log, as it is published."""
    core = Core()
    return [
        Ordered(cause_seq=stamped.seq, position=position, decision=decision)
        for stamped in log
        for position, decision in enumerate(core.step(stamped))
        if not isinstance(decision, SetTimer)
    ]
