"""Prefill to decode over RDMA, between agents in processes of their own, in two network namespaces, over a
real nats-server. Needs two devices and the namespace `far`.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_harness import Cluster, cluster, keys, layers_told, layout, until
from test_agent import fill, same, stored
from transport_harness import DEVICES

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.schemas.events import StoreSuspected
from halfmoon.schemas.kv import KvReady
from halfmoon.schemas.subjects import events_of_kind
from halfmoon.store.errors import HolderUnreachable, TransferError
from halfmoon.store.pool.segment import remove_stale

pytestmark = pytest.mark.skipif(len(DEVICES) < 2, reason="needs two RDMA devices: make test-rdma")
NEAR, FAR = "10.78.0.1", ["ip", "netns", "exec", "far"]
CLONE_NEWNET = 0x40000000
FORK = multiprocessing.get_context("fork")
LAYERS = 16
SHAPE = layout(layers=LAYERS, block_tokens=512, kv_heads=2, head_dim=64)  # 8 MiB a block
#: A guest without hardware support computes slowly.
FIELDS: dict[str, Any] = {
    "transport": "rdma",
    "layout": SHAPE,
    "stall_ns_max": 15_000_000_000,
    "control_timeout_s": 15.0,
}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedServer.start(tmp_path / "nats", host=NEAR)
    yield server.url
    server.stop()


def tell(url: str, story: Callable[[Cluster], Awaitable[None]]) -> None:
    async def run() -> None:
        async with cluster(url) as here:
            await story(here)

    asyncio.run(run())


def serve(url: str, name: str, node_id: str, device: str, slots: int, pipe: Connection) -> None:
    """In a process of its own, for ever: an agent."""
    if device == DEVICES[1]:
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/var/run/netns/far") as far:
            if libc.setns(far.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    async def run() -> None:
        async with cluster(url) as here:
            here.name = name
            await here.agent(node_id, rdma=device, slots=slots, **FIELDS)
            pipe.send("ready")
            await asyncio.Event().wait()

    asyncio.run(run())


async def node(here: Cluster, node_id: str, device: str, *, slots: int = 8) -> BaseProcess:
    """An agent in a process of its own; the one of rxe1 in the other namespace. Killed at the end.

    Forked: in the guest, importing everything once more would take a minute.
    """
    ours, theirs = FORK.Pipe()
    process = FORK.Process(
        target=serve, args=(here.url, here.name, node_id, device, slots, theirs), daemon=True
    )
    process.start()
    theirs.close()

    def end() -> None:
        process.kill()
        process.join()
        remove_stale(here.name)

    here.stack.callback(end)
    assert await asyncio.to_thread(ours.poll, 100), f"agent {node_id} does not start"
    assert ours.recv() == "ready"
    return process


def namespace(process: BaseProcess) -> str:
    return str(Path(f"/proc/{process.pid}/ns/net").readlink())


def test_prefill_pushes_to_decode_and_fetches_from_it(url: str) -> None:
    async def story(here: Cluster) -> None:
        near, far = await node(here, "n1", DEVICES[0]), await node(here, "n2", DEVICES[1])
        assert namespace(near) != namespace(far)
        prefill, decode = await here.client("n1", "w1"), await here.client("n2", "w2")
        opened = await prefill.open_put("o1", keys(1, 2), blocks=3)
        fill(prefill, opened.slots, 5)
        tokens = 2 * SHAPE.block_tokens + 3
        pushed_bytes = tokens * LAYERS * SHAPE.token_layer_bytes
        await prefill.open_push("o1", "r1", target_node_id="n2", decode_worker_id="w2", tokens=tokens)
        for layer in range(LAYERS):
            prefill.push("o1", layer=layer, first_block=0, blocks=3)
        assert (await prefill.close_push("o1")).bytes == pushed_bytes
        await until(lambda: len(layers_told(here.heard["w2"])) == LAYERS)
        first: Any = here.heard["w2"][0]
        assert [layer for layer, _ in layers_told(here.heard["w2"])] == list(range(LAYERS))
        assert same(decode, first.slots[:2], 5)
        sent, came = (
            client.view.blocks[slots[2]].reshape(LAYERS, 2, SHAPE.block_tokens, -1)
            for client, slots in ((prefill, opened.slots), (decode, first.slots))
        )
        assert np.array_equal(came[:, :, :3], sent[:, :, :3])
        assert not came[:, :, 3:].any()
        for client in (prefill, decode):
            await client.release("o1")
        await stored(decode, "o2", keys(7, 8), seed=9)
        opened = await prefill.open_put("o3", keys(7, 8), blocks=2)
        assert (await prefill.fetch("o3", "n2", first_block=0, blocks=2)).bytes == 2 * SHAPE.block_bytes
        assert same(prefill, opened.slots, 9)
        said, heard = (await prefill.status()).counters, (await decode.status()).counters
        assert heard["rdma_written_bytes"] == pushed_bytes
        assert said["rdma_pairs_made"] >= 1
        assert not any(name.startswith("tcp") for name in (*said, *heard))

    tell(url, story)


def test_a_killed_peer_is_seen_and_suspected_and_its_next_life_is_served(url: str) -> None:
    async def story(here: Cluster) -> None:
        await node(here, "n1", DEVICES[0])
        far = await node(here, "n2", DEVICES[1])
        prefill = await here.client("n1", "w1")
        await here.client("n2", "w2")
        suspected: list[Any] = []
        log = await here.bus("log")
        await log.subscribe(events_of_kind("StoreSuspected"), StoreSuspected, suspected.append)
        opened = await prefill.open_put("o1", keys(1, 2, 3, 4), blocks=4)
        fill(prefill, opened.slots, 5)
        await prefill.open_push("o1", "r1", target_node_id="n2", decode_worker_id="w2")
        for layer in range(LAYERS):
            prefill.push("o1", layer=layer, first_block=0, blocks=4)
        await until(lambda: any(isinstance(m, KvReady) for m in here.heard["w2"]))
        far.kill()
        far.join()
        killed = time.monotonic()
        with pytest.raises(TransferError) as problem:
            await prefill.close_push("o1")
        assert isinstance(problem.value, HolderUnreachable), problem.value
        print(f"seen after {time.monotonic() - killed:.2f} s: {problem.value}")
        await until(lambda: bool(suspected))
        assert suspected[0].node_id == "n2"
        await prefill.release("o1")
        await node(here, "n2", DEVICES[1])
        again = await here.client("n2", "w3")
        await stored(again, "o2", keys(8), seed=3)
        opened = await prefill.open_put("o3", keys(8), blocks=1)
        await prefill.fetch("o3", "n2", first_block=0, blocks=1)
        assert same(prefill, opened.slots, 3)

    tell(url, story)
