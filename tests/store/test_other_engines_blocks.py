"""`halfmoon store --block-bytes`: a store for blocks of any engine, without a model."""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys

import numpy as np
import pytest
from store_harness import cluster

from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.processes.store import add, run
from halfmoon.schemas.policy import Layout
from halfmoon.store.client import StoreClient, key_of
from tests.eventually import BOUND_S
from tests.guardian import cluster_name

#: Seven pages: no power of two, as a row of an engine's seldom is one.
BLOCK_BYTES = 7 * 4096


def asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(["--node", "n", *words])


def drawn(size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def test_the_command_serves_blocks_of_the_bytes_that_were_asked_for(nats_url: str) -> None:
    name = cluster_name()
    # No such model: it is not looked for.
    words = [
        "--nats", nats_url, "--cluster", name, "--node", name, "--block-bytes", str(BLOCK_BYTES), "--pool-mib", "1",
        "--data-port", "-1", "--model", "/no/model",
    ]  # fmt: skip
    command = [sys.executable, "-m", "halfmoon.cli.main", "store", *words]
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    block, into = drawn(BLOCK_BYTES), np.zeros(BLOCK_BYTES, np.uint8)

    async def use() -> None:
        async with await StoreClient.connect(nats_url, node_id=name) as client:
            assert client.block_bytes == BLOCK_BYTES
            await client.put(key_of("a"), block)
            await client.get_into(key_of("a"), into, verify=True)

    try:
        asyncio.run(use())
    finally:
        agent.send_signal(signal.SIGTERM)
        _, said = agent.communicate(timeout=BOUND_S)
    assert agent.returncode == 0
    assert into.tobytes() == block.tobytes()
    assert f"36 blocks of {BLOCK_BYTES} bytes" in said


@pytest.mark.parametrize("transport", ["shm", "tcp"])
# One layer of many bytes: more than a frame of the data plane.
@pytest.mark.parametrize("pages", [1, 7, 301])
async def test_blocks_of_any_size_come_from_another_node(nats_url: str, transport: str, pages: int) -> None:
    size = pages * 4096
    async with cluster(nats_url) as here:
        for node in ("n1", "n2"):
            await here.agent(node, layout=Layout.opaque(size), transport=transport)
        near = await StoreClient.connect(nats_url, node_id="n1")
        far = await StoreClient.connect(nats_url, node_id="n2", peers=["n1"])
        async with near, far:
            keys = [key_of(name) for name in "abc"]
            blocks = [drawn(size, seed) for seed in range(3)]
            assert await near.batch_put(dict(zip(keys, blocks, strict=True))) == [None] * 3
            into = [np.zeros(size, np.uint8) for _ in keys]
            assert await far.batch_get_into(keys, into, verify=True) == [None] * 3
        assert [one.tobytes() for one in into] == [one.tobytes() for one in blocks]


@pytest.mark.pure
@pytest.mark.parametrize("pages", [1, 7, 2560, 100_000])
def test_a_layout_of_any_engine_has_the_bytes_of_its_blocks(pages: int) -> None:
    layout = Layout.opaque(pages * 4096)
    assert (layout.block_bytes, layout.layers) == (pages * 4096, 1)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--block-bytes", "5000"], "--block-bytes: 5000 is no multiple of 4096"),
        (["--block-bytes", "-4096"], "--block-bytes: -4096 is no multiple of 4096 from 4096 to 409600000"),
        (["--block-bytes", str(100_001 * 4096)], "to 409600000"),
        (["--block-bytes", "8192", "--block-layers", "3"], "--block-bytes: 8192 is no multiple of 12288"),
        (["--block-bytes", "8192", "--block-layers", "0"], "--block-layers: 0 is not in 1..10000"),
        (["--block-layers", "2"], "--block-layers: it is of another engine's blocks"),
        (["--block-bytes", "4096", "--layout-file", "f"], "--block-bytes: --layout-file"),
        (["--block-bytes", "4096", "--kv-events-tokens"], "--block-bytes: --kv-events-tokens"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_the_option(words: list[str], told: str) -> None:
    with pytest.raises(OptionInvalid, match=told):
        asyncio.run(run(asked(*words)))
