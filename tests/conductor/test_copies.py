"""A decision that is published twice, the second time after the stream has forgotten the first: receivers
drop it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conductor_scripts import S, arrived
from live_conductors import CLUSTER, client, conductor, decisions_of, log_of, reach, replayed, say

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.streams import StreamLimits
from halfmoon.conductor.live import shell
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import Ordered
from halfmoon.schemas.policy import Policy
from tests.eventually import eventually

QUIET = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S)
#: The server forgets at its own time: some windows later.
WINDOW_S = 0.2


class Lag:
    """What a conductor decides leaves it when it is let go, in order, as from a process that was stopped."""

    def __init__(self, bus: Bus) -> None:
        self.held: list[tuple[Ordered, dict[str, Any]]] = []
        self._bus = bus
        bus.order_soon = self._hold  # type: ignore[method-assign]

    def _hold(self, ordered: Ordered, **to: Any) -> None:
        self.held.append((ordered, to))

    async def let_go(self, count: int) -> None:
        """So many, once all of them are held; each is sent again until the stream has forgotten its first copy, and
        takes it.
        """
        await eventually(lambda: len(self.held) >= count, f"{count} decisions are held")
        first_copies = await self._bus.last_seq(subjects.DECISIONS_STREAM)
        for ordered, to in self.held[:count]:

            async def taken(ordered: Ordered = ordered, to: dict[str, Any] = to) -> bool:
                return await self._bus.order(ordered, **to) > first_copies

            await eventually(taken, f"a second copy of {ordered.message_id} is stored")
        del self.held[:count]


@contextlib.asynccontextmanager
async def lagging_conductor(url: str) -> AsyncIterator[Lag]:
    bus = await Bus.connect(BusConfig(url=url), name="lagging")
    lag = Lag(bus)
    task = asyncio.create_task(shell.run(bus, conductor_id="lagging", policy=QUIET))
    try:
        yield lag
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()


@pytest.mark.slow
async def test_receivers_obey_each_decision_once_though_the_stream_holds_two(nats_url: str) -> None:
    short = StreamLimits(duplicate_window_ns=int(WINDOW_S * S))
    await (await Bus.connect(BusConfig(url=nats_url), name="first", limits=short)).close()
    obeyed: dict[str, list[Ordered]] = {"p0": [], "d0": []}

    async def obey(bus: Bus, worker_id: str, tail: Any) -> None:
        async for ordered in bus.follow_decisions(tail):
            obeyed[worker_id].append(ordered)

    def ordered_to(name: str, decisions: list[Ordered]) -> list[Ordered]:
        return [o for o in decisions if o.decision.worker_id == name]  # type: ignore[union-attr]

    async with (
        client(nats_url) as bus,
        conductor(nats_url, "c1", QUIET),
        lagging_conductor(nats_url) as lag,
    ):
        tails = {name: await bus.open_decisions(name) for name in obeyed}
        tasks = [asyncio.create_task(obey(bus, name, tail)) for name, tail in tails.items()]
        await say(bus, *CLUSTER)
        await say(bus, *[arrived(f"r{number}", 100) for number in range(8)])
        await decisions_of(bus, 16)
        await lag.let_go(16)
        await decisions_of(bus, 32)
        await say(bus, *[arrived(f"r{number}", 100) for number in range(8, 16)], arrived("after", 100))
        await decisions_of(bus, 50)
        await lag.let_go(16)
        stored = await decisions_of(bus, 66)
        # Second copies lie between first ones, and the last one stored is not the newest that was decided.
        once = replayed(await log_of(bus))
        assert len(once) == 34
        assert stored == [*once[:16], *once[:16], *once[16:], *once[16:32]]
        # One that starts now finds a copy at the end of the stream; what it repeats is dropped too.
        async with conductor(nats_url, "c3", QUIET):
            assert (await decisions_of(bus, 68))[66:] == once[32:]
            last = await say(bus, arrived("late", 100))
            await reach(bus, last, "c3")
            await decisions_of(bus, 70)
            await lag.let_go(4)
            await decisions_of(bus, 74)
            await say(bus, arrived("last", 100))
            expected = replayed(await log_of(bus))
            assert len(expected) == 38
            for name, decisions in obeyed.items():
                of_last = ordered_to(name, expected)[-1]
                await eventually(lambda d=decisions, o=of_last: o in d, f"{name} is told of the last")  # type: ignore[misc]
                assert decisions == ordered_to(name, expected)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
