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
from halfmoon.schemas.decisions import Ordered
from halfmoon.schemas.policy import Policy

pytestmark = pytest.mark.timeout(30)

QUIET = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S)
WINDOW_S = 0.2
#: Far beyond the window: on a busy machine the other conductor may be late too, and then the stream knows the copy.
LAG_S = 2.0


@contextlib.asynccontextmanager
async def lagging_conductor(url: str) -> AsyncIterator[None]:
    """What it decides leaves it `LAG_S` later, in order, as from a process that was stopped."""
    bus = await Bus.connect(BusConfig(url=url), name="lagging")
    at_once = bus.order_soon

    def later(ordered: Ordered, **to: Any) -> None:
        asyncio.get_running_loop().call_later(LAG_S, lambda: at_once(ordered, **to))

    bus.order_soon = later  # type: ignore[method-assign]
    task = asyncio.create_task(shell.run(bus, conductor_id="lagging", policy=QUIET))
    try:
        yield
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

    async with client(nats_url) as bus, conductor(nats_url, "c1", QUIET), lagging_conductor(nats_url):
        tails = {name: await bus.open_decisions(name) for name in obeyed}
        tasks = [asyncio.create_task(obey(bus, name, tail)) for name, tail in tails.items()]
        await say(bus, *CLUSTER)
        for number in range(16):
            last = await say(bus, arrived(f"r{number}", 100))
            await asyncio.sleep(0.2)
        await reach(bus, last, "c1")
        once = replayed(await log_of(bus))
        assert len(once) == 32
        stored = await decisions_of(bus, 64)
        assert sorted((o.cause_seq, o.position) for o in stored) == sorted(
            2 * [(o.cause_seq, o.position) for o in once]
        )
        # Second copies lie between first ones, and the last one stored is not the newest that was decided.
        assert stored != once + once
        await say(bus, arrived("after", 100))
        await decisions_of(bus, 66)
        # One that starts now finds a copy at the end of the stream; what it repeats is dropped too.
        await asyncio.sleep(LAG_S)
        async with conductor(nats_url, "c3", QUIET):
            last = await say(bus, arrived("late", 100))
            await reach(bus, last, "c3")
            await asyncio.sleep(2 * LAG_S)
        expected = replayed(await log_of(bus))
        assert len(expected) == 36
        for name in obeyed:
            assert obeyed[name] == [o for o in expected if o.decision.worker_id == name]  # type: ignore[union-attr]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
