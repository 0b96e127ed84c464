"""The contender of `transfer.py` that moves nothing: a client reads the blocks where another process put
them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from transfer_ends import TOTAL, cpu_s, layout, noise

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.client import StoreClient, key_of
from halfmoon.store.config import StoreConfig

BLOCKS = TOTAL // layout(False).block_bytes
KEYS = [key_of(f"block {number}") for number in range(BLOCKS)]


class InPlace:
    """`StoreClient.get` of 64 MiB that an agent's client in another process has put: leased and in place, no copy."""

    name, size = "client_get", TOTAL

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_hold, args=(theirs,), daemon=True)
        self._process.start()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._client: StoreClient = self._runner.run(StoreClient.connect(self._pipe.recv(), node_id="n1"))
        self._checked = False

    def go(self) -> tuple[float, float]:
        before = self._cpu_s()
        seconds = self._runner.run(self._timed())
        return seconds, self._cpu_s() - before

    async def _timed(self) -> float:
        started = time.perf_counter()
        held = await asyncio.gather(*(self._client.get(key) for key in KEYS))
        took = time.perf_counter() - started
        if not self._checked:
            value = noise((TOTAL // BLOCKS,))
            assert all((block.array.reshape(-1) == value).all() for block in held)
            self._checked = True
        for block in held:
            await block.release()
        return took

    def _cpu_s(self) -> float:
        self._pipe.send("cpu")
        used: float = self._pipe.recv()
        return used + cpu_s()

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()
        self._pipe.send("end")
        self._process.join()


def _hold(pipe: Connection) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer.start(Path(directory) / "nats")
        bus = await Bus.connect(BusConfig(url=server.url), name="agent")
        config = StoreConfig(
            node_id="n1",
            layout=layout(False),
            slots=BLOCKS,
            cluster="bench",
            cluster_secret="bench",
            data_port=-1,
        )
        agent = StoreAgent(bus, config)
        await agent.start()
        try:
            async with await StoreClient.connect(server.url, node_id="n1") as client:
                for key in KEYS:
                    await client.put(key, noise((TOTAL // BLOCKS,)))
            pipe.send(server.url)
            while await asyncio.to_thread(pipe.recv) != "end":
                pipe.send(cpu_s())
        finally:
            await agent.stop()
            await bus.close()
            server.stop()
