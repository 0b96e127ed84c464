"""Engines in a cluster where each process has credentials of its own (`halfmoon secrets --engines`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_harness import PATIENT, cluster, until
from test_engine_kv import LAYERS, SHAPE, WHOLE, engine, same

from halfmoon.bus.connection import Bus
from halfmoon.schemas.policy import Layout
from halfmoon.store.adapters.link import LinkOptions, StoreLink
from halfmoon.store.adapters.row_client import RowClient
from halfmoon.store.client import ANY_NODE
from halfmoon.store.errors import StoreError
from tests.bus.server_cluster import ServerCluster
from tests.eventually import BOUND_S

KEY = b"k" * 16


def test_engines_move_kv_and_share_blocks_by_their_own_credentials(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = ServerCluster.start(tmp_path, ["127.0.0.1"])
    # Who moves blocks between nodes knows the cluster's secret: an engine's agent, and not the engine.
    assert [(tmp_path / role / "secret").exists() for role in ("engine", "store")] == [False, True]
    try:
        asyncio.run(moved_and_shared(servers))
    finally:
        servers.stop()
    assert [one.getMessage() for one in caplog.records if "violation" in one.getMessage().lower()] == []


async def moved_and_shared(servers: ServerCluster) -> None:
    def credentials(name: str) -> dict[str, str]:
        config = servers.config(name)
        return {"nats": config.url, "nats_nkey_file": config.nkey_seed_file, "nats_ca": config.tls_ca_file}

    conductor = await Bus.connect(servers.config("conductor-0"), name="conductor-0")
    async with cluster(servers.url) as here:
        here.connect = servers.connect
        for node in ("engine-0", "engine-1"):
            await here.agent(node, layout=Layout.opaque(SHAPE.block_bytes, LAYERS), data_port=-1)
        async with (
            engine(here, "engine-0", **credentials("engine-0")) as p,
            engine(here, "engine-1", **credentials("engine-1")) as d,
        ):
            # It comes; and where it does not, the one engine tells the other.
            p.kv[:] = 7
            d.want("one", "engine-0")
            assert await p.begin("one", keys=WHOLE)
            for layer in range(LAYERS):
                p.compute("one", layer)
            p.end("one")
            assert (await d.ended()).loaded
            assert same(p, d)
            d.want("two", "engine-0")
            await until(lambda: "two" in p.sender._wanted)
            p.sender.refuse("two", "the request has ended")
            assert not (await d.ended()).loaded
        await asyncio.to_thread(shared, {name: credentials(name) for name in ("engine-0", "engine-1")})
    await conductor.close()


def shared(options: dict[str, dict[str, Any]]) -> None:
    """What one engine has put into its node's store, the other one finds from its own."""
    links = []
    try:
        for node, peers in (("engine-0", ()), ("engine-1", ("engine-0", ANY_NODE))):
            given = {"node": node, "peers": peers, **PATIENT, **options[node]}
            links.append(StoreLink(LinkOptions.of(given), block_bytes=SHAPE.block_bytes))
            links[-1].start()
        value, into = (np.full(SHAPE.block_bytes, fill, np.uint8) for fill in (7, 0))

        async def put(client: RowClient) -> list[StoreError | None]:
            return await client.batch_put({KEY: value})

        async def got(client: RowClient) -> list[StoreError | None]:
            return await client.batch_get_into([KEY], [into], verify=True)

        assert links[0].ask(put, within_s=BOUND_S) == [None]
        assert links[1].ask(got, within_s=BOUND_S) == [None]
        assert (into == value).all()
    finally:
        for link in links:
            link.close()
