"""Blocks of nodes that nobody named: a conductor knows which have them, and only those are asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from store_harness import Cluster, cluster

from halfmoon.bus.connection import Bus
from halfmoon.conductor.live import shell
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.subjects import locate
from halfmoon.schemas.view import BlocksLocated, LocateBlocks
from halfmoon.store import client as store_client
from halfmoon.store.client import ANY_NODE, StoreClient, key_of
from halfmoon.store.errors import HolderUnreachable
from halfmoon.store.locate import find_holders
from tests.eventually import eventually
from tests.nats_in_process import run_at

BLOCK = 4 * 8192
KEYS = [key_of(name) for name in "abcd"]


def value(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK, np.uint8)


@asynccontextmanager
async def conductor(here: Cluster) -> AsyncIterator[None]:
    bus = await here.bus("c1")
    running = asyncio.create_task(shell.run(bus, conductor_id="c1", policy=Policy()))
    try:
        yield
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def knows(here: Cluster, keys: list[bytes], nodes: list[str]) -> None:
    """The conductor has heard that these nodes have the blocks."""
    bus = await here.bus("asking")

    async def told() -> bool:
        asked = LocateBlocks(block_keys=b"".join(keys))
        answer = await bus.request(locate(), asked, BlocksLocated, timeout_s=60, await_responder=True)
        return sorted(answer.nodes) == nodes

    await eventually(told, f"blocks are known at {nodes}", every_s=0.01)


async def client_of(here: Cluster, node_id: str, *peers: str, tenant: str = "") -> StoreClient:
    client = await StoreClient.connect(here.url, node_id=node_id, tenant=tenant, peers=peers)
    here.stack.push_async_callback(client.close)
    return client


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Nodes that each question went to."""
    found: list[list[str]] = []

    async def noted(bus: Bus, node_ids: Sequence[str], *more: Any) -> Any:
        found.append(sorted(node_ids))
        return await find_holders(bus, node_ids, *more)

    monkeypatch.setattr(store_client, "find_holders", noted)
    return found


@pytest.mark.pure
def test_only_nodes_that_have_the_blocks_are_asked(nats_url: str, probed: list[list[str]]) -> None:
    async def story() -> None:
        async with cluster(nats_url) as here, conductor(here):
            for node in ("n1", "n2", "n3", "n4"):
                await here.agent(node)
            for node, part in (("n1", KEYS[:2]), ("n2", KEYS[2:3])):
                await (await client_of(here, node)).batch_put({key: value(KEYS.index(key)) for key in part})
            await knows(here, KEYS, ["n1", "n2"])
            client = await client_of(here, "n4", ANY_NODE)
            assert await client.batch_exists(KEYS) == [True, True, True, False]
            into = [np.zeros(BLOCK, np.uint8) for _ in range(3)]
            assert await client.batch_get_into(KEYS[:3], into, verify=True) == [None] * 3
            assert [one.tobytes() for one in into] == [value(number).tobytes() for number in range(3)]
            assert probed == [["n1", "n2"]] * 2
            # Nobody has it: nobody is asked.
            assert await client.exists(KEYS[3]) is False
            assert len(probed) == 2

    run_at(nats_url, story())


@pytest.mark.pure
def test_blocks_of_another_tenant_are_at_no_node(nats_url: str, probed: list[list[str]]) -> None:
    """A conductor knows no tenants: the node that is named does."""

    async def story() -> None:
        async with cluster(nats_url) as here, conductor(here):
            for node in ("n1", "n2"):
                await here.agent(node)
            await (await client_of(here, "n1", tenant="acme")).put(KEYS[0], value(0))
            await knows(here, KEYS[:1], ["n1"])
            assert await (await client_of(here, "n2", ANY_NODE, tenant="other")).exists(KEYS[0]) is False
            assert await (await client_of(here, "n2", ANY_NODE, tenant="acme")).exists(KEYS[0]) is True
            assert probed == [["n1"], ["n1"]]

    run_at(nats_url, story())


@pytest.mark.pure
def test_without_a_conductor_nodes_that_are_named_are_asked_all_the_same(
    nats_url: str, probed: list[list[str]]
) -> None:
    async def story() -> None:
        async with cluster(nats_url) as here:
            for node in ("n1", "n2"):
                await here.agent(node)
            await (await client_of(here, "n1")).put(KEYS[0], value(0))
            alone = await client_of(here, "n2", ANY_NODE)
            with pytest.raises(HolderUnreachable, match="the conductors did not answer"):
                await alone.get(KEYS[0])
            assert probed == []
            client = await client_of(here, "n2", ANY_NODE, "n1")
            assert await client.exists(KEYS[0]) is True
            with pytest.raises(HolderUnreachable, match="the conductors did not answer"):
                await client.exists(KEYS[1])

    run_at(nats_url, story())


@pytest.mark.pure
def test_what_a_conductor_does_not_know_any_better_costs_no_block(
    nats_url: str, probed: list[list[str]]
) -> None:
    """The first node that it names is gone, and the second has evicted the block meanwhile."""

    async def story() -> None:
        async with cluster(nats_url) as here:
            for node in ("n1", "n2", "n3"):
                await here.agent(node)
            await (await client_of(here, "n2")).put(KEYS[0], value(0))
            asked: list[LocateBlocks] = []

            def old_news(request: LocateBlocks) -> BlocksLocated:
                asked.append(request)
                return BlocksLocated(nodes=["gone", "n1", "n2"])

            await (await here.bus("c1")).serve(locate(), LocateBlocks, old_news)
            into = np.zeros(BLOCK, np.uint8)
            await (await client_of(here, "n3", ANY_NODE)).get_into(KEYS[0], into, verify=True)
            assert into.tobytes() == value(0).tobytes()
            assert probed == [["gone", "n1", "n2"]]
            assert asked == [LocateBlocks(block_keys=KEYS[0], besides=["n3"])]

    run_at(nats_url, story())
