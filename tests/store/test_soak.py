"""The growth that `make soak` fails on: seen in a run of one hour, and where an agent really keeps more and more."""

from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from soak import GROWTH_MAX_MIB, KEY_BYTES, PARTS, SHAPE, WARM_PARTS, Worker, grown_mib, play_hour
from store_harness import cluster

from halfmoon.store.pool.pool import Pool

#: Orders of an hour of the test, of blocks that no two share.
ORDERS, BLOCKS = 4 * PARTS, 4
CHAINS = [
    [(number * BLOCKS + block).to_bytes(KEY_BYTES, "little") for block in range(BLOCKS)]
    for number in range(1, ORDERS + 1)
]
LEAK_BYTES = 1 << 20


@pytest.mark.pure
@pytest.mark.parametrize("hours", [1, 6])
def test_memory_that_grows_is_found_in_one_hour_and_in_many(hours: int) -> None:
    filling = [float(min(part, WARM_PARTS)) for part in range(hours * PARTS)]
    assert grown_mib([100 + 50 * mib for mib in filling]) == 0
    assert grown_mib([100 + 4 * part for part in range(hours * PARTS)]) > GROWTH_MAX_MIB
    assert grown_mib([100.0] * (hours * PARTS - 1) + [900.0]) == 0, "one look is none"


@pytest.mark.parametrize("leaks", [False, True])
def test_an_agent_that_keeps_something_of_each_order_grows(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaks: bool
) -> None:
    kept: list[mmap.mmap] = []
    whole = Pool.open_put

    def leaky(self: Pool, *args: Any, **more: Any) -> Any:
        # Not from the interpreter's heap: earlier tests may have left room in that.
        pages = mmap.mmap(-1, LEAK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.write(b"x" * LEAK_BYTES)
        kept.append(pages)
        return whole(self, *args, **more)

    if leaks:
        monkeypatch.setattr(Pool, "open_put", leaky)

    async def hour() -> list[float]:
        async with cluster(nats_url) as here:
            await here.agent("n1", layout=SHAPE, slots=600, ssd=str(tmp_path / "tier"), ssd_bytes=1 << 24)
            worker = Worker(await here.client("n1", "w1"), seed=1)
            return await play_hour(worker, 0, CHAINS, os.getpid())

    grown = grown_mib(asyncio.run(hour()))
    assert (grown > GROWTH_MAX_MIB) == leaks, grown
