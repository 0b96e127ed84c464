"""`PageStore`: pages in parts, whose length is no block's, go to a real store agent and come back."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from store_harness import cluster

from halfmoon.schemas.policy import Layout
from halfmoon.store.adapters.link import LinkOptions
from halfmoon.store.adapters.pages import PageStore
from tests.eventually import BOUND_S

PARTS = (3000, 2000)
KEYS = [f"page {i}".encode() for i in range(4)]


def page(fill: int) -> list[np.ndarray]:
    return [np.full(size, fill + number, np.uint8) for number, size in enumerate(PARTS)]


def test_pages_in_parts_come_back_and_a_store_that_left_has_none(nats_url: str) -> None:
    async def story() -> None:
        async with cluster(nats_url) as here:
            agent = await here.agent("n1", layout=Layout.opaque(8192), data_port=-1)
            options = LinkOptions(
                node="n1", nats=here.url, connect_s=BOUND_S, lookup_s=BOUND_S, transfer_s=BOUND_S
            )
            made, other = (PageStore(options, page_bytes=5000, namespace=name) for name in (b"a", b"b"))
            wrong = PageStore(options, page_bytes=9000, namespace=b"a")
            for each in (made, other):
                await asyncio.to_thread(each.start)
            with pytest.raises(ValueError, match="this engine's have 12288: halfmoon store"):
                await asyncio.to_thread(wrong.start)
            given = [KEYS[0], KEYS[1], KEYS[3]]
            assert await asyncio.to_thread(made.store, given, [page(10), page(20), page(40)]) == [True] * 3
            assert [await asyncio.to_thread(each.held, KEYS) for each in (made, other)] == [2, 0]
            pages = [page(0) for _ in KEYS]
            assert await asyncio.to_thread(made.load, KEYS, pages) == [True, True, False, True]
            assert [[int(part[-1]) for part in one] for one in pages] == [
                [10, 11],
                [20, 21],
                [0, 1],
                [40, 41],
            ]
            assert all((part == part[0]).all() for one in pages for part in one)
            await agent.stop()
            assert await asyncio.to_thread(made.held, KEYS) == 0
            assert await asyncio.to_thread(made.load, KEYS[:1], [page(0)]) == [False]
            assert await asyncio.to_thread(made.store, KEYS[:1], [page(0)]) == [False]
            for each in (made, other):
                await asyncio.to_thread(each.close)
            assert made.held(KEYS) == 0  # its thread has ended

    asyncio.run(story())
