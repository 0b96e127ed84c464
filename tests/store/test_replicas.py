"""Two holders of the same blocks, of which one dies: every get is answered, and soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from store_harness import Cluster, cluster
from test_failures import BIG, log, node_process

from halfmoon.schemas.events import StoreSuspected
from halfmoon.store.client import Client

GETS = 1000


def tell(url: str, story: Callable[[Cluster], Awaitable[None]]) -> None:
    async def run() -> None:
        async with cluster(url) as here:
            await story(here)

    asyncio.run(run())


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def value(number: int, size: int) -> Any:
    """The whole value depends on the number."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_holder_killed_in_the_middle_of_a_thousand_gets_costs_no_answer(nats_url: str, transport: str) -> None:
    """Real processes; four readers at once, whose own node has room for a few of the blocks only."""
    shape, blocks = msgspec.structs.replace(BIG, layers=1), 40

    async def story(here: Cluster) -> None:
        holders = [await node_process(here, node, transport, slots=blocks + 2, layers=1) for node in ("n1", "n2")]
        await here.agent("n3", transport=transport, layout=shape, slots=8)
        size = shape.block_bytes
        values = {key(i): value(i, size) for i in range(blocks)}
        for node in ("n1", "n2"):
            async with await Client.connect(here.url, node_id=node) as put:
                answers = await put.batch_put(values)
                assert answers == [None] * blocks
        slowest_s = {False: 0.0, True: 0.0}  # before the death and after it
        wrong = []
        done = 0
        killed_at = 0
        numbers = iter(range(GETS))
        async with await Client.connect(here.url, node_id="n3", peers=["n1", "n2"]) as reader:

            async def read() -> None:
                nonlocal done, killed_at
                into = np.zeros(size, np.uint8)
                for number in numbers:
                    into[:] = 0
                    started = time.monotonic()
                    await reader.get_into(key(number % blocks), into)
                    slowest_s[killed_at > 0] = max(slowest_s[killed_at > 0], time.monotonic() - started)
                    if not np.array_equal(into, values[key(number % blocks)]):
                        wrong.append(number)
                    done += 1
                    if done == GETS // 2:
                        killed_at = done
                        holders[0].kill()

            await asyncio.gather(*(read() for _ in range(4)))
        assert (done, wrong, killed_at) == (GETS, [], GETS // 2)
        assert slowest_s[True] < 1.0 + slowest_s[False]  # of a busy machine the first half knows
        counters = here.agents["n3"].counters
        assert counters["fetched_bytes"] > GETS * size // 2  # most came from elsewhere: the pool holds 8
        suspected = [event.node_id for event in await log(here) if isinstance(event, StoreSuspected)]
        assert set(suspected) <= {"n1"}
        before_ms, after_ms = (round(1e3 * slowest_s[killed]) for killed in (False, True))
        print(f"{transport}: {GETS} gets, slowest {before_ms} ms before, {after_ms} ms after, {dict(counters)}")

    tell(nats_url, story)
