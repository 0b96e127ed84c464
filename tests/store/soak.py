"""Days of the conversation trace against one store agent with an SSD tier, as fast as it takes them (`make
soak`).

Each hour of the trace has keys of its own, so that the pool turns over all the time. Some orders are given up
before their commit, some are forgotten by their worker and must be collected. Every block begins with its
key, and whatever is found or loaded is looked at. Fails on a wrong byte, on a slot or record that is not
accounted for (the agent checks its books every second), and on memory that grows, in a run of one hour too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))
from store_harness import SECRET, layout

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.conductor.simulation.trace import read_trace
from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import BlockMissing, StoreError, StoreFull, TransferTimeout
from halfmoon.store.pool.segment import PAGE_BYTES
from halfmoon.store.tiers.ssd import SsdTier
from tests.eventually import Late, eventually

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "conversation_trace.jsonl.zst"
KEY_BYTES = 16
SLOTS = 6_000
RECORDS = 24_000
IN_FLIGHT = 32
SHAPE = layout(layers=1, kv_heads=1)  # 4 KiB a block
GROWTH_MAX_MIB = 16
#: An hour is looked at so often. By the end of the first of these parts of the first hour pool and tier are full.
PARTS = 16
WARM_PARTS = PARTS // 4


async def agent_process(url: str, cluster: str, path: str) -> int:
    """The agent; ends with status 3 when its books do not balance."""
    bus = await Bus.connect(BusConfig(url=url), name="n1")
    config = StoreConfig(
        cluster=cluster,
        node_id="n1",
        layout=SHAPE,
        slots=SLOTS,
        ssd=path,
        ssd_bytes=RECORDS * (SHAPE.block_bytes + 64) + 4 * PAGE_BYTES,
        cluster_secret=SECRET,
        data_port=-1,
        lease_ttl_ns=20_000_000_000,
        transfer_ns_max=10_000_000_000,
    )
    agent = StoreAgent(bus, config)
    await agent.start()
    print("ready", flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    try:
        while not ended.is_set():
            agent.context.guard.check()
            assert isinstance(agent.context.tier, SsdTier)
            agent.context.tier.check()
            await asyncio.sleep(1)
    except AssertionError as problem:
        print(f"the books do not balance: {problem}", file=sys.stderr, flush=True)
        return 3
    finally:
        await agent.stop()
        await bus.close()
    return 0


def anonymous_mib(pid: int) -> float:
    """Memory of its own: not the pool."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


class Worker:
    """Plays orders."""

    def __init__(self, client: AgentClient, seed: int) -> None:
        self.client = client
        self.draw = random.Random(seed)
        self.late = self.blocks = self.hits = self.loaded = self.full = self.given_up = self.forgotten = 0

    async def play(self, order_id: str, keys: list[bytes]) -> None:
        client = self.client
        try:
            opened = await client.open_put(order_id, b"".join(keys), blocks=len(keys) + 1)
        except StoreFull:
            self.full += 1
            return
        have = set(opened.present)
        first = next((i for i in range(len(keys)) if i not in have), len(keys))
        if first < len(keys) and self.draw.random() < 0.2:
            have |= await self.load(order_id, first, len(keys) - first)
        view = client.view.blocks
        for i, key in enumerate(keys):
            if i in have:
                found = view[opened.slots[i]].tobytes()
                assert found == key * (SHAPE.block_bytes // KEY_BYTES), f"wrong bytes under key {key.hex()}"
            else:
                view[opened.slots[i]].reshape(-1, KEY_BYTES)[:] = np.frombuffer(key, np.uint8)
        self.blocks += len(keys)
        self.hits += len(have)
        fate = self.draw.random()
        if fate < 0.01:
            self.forgotten += 1
            client._orders.pop(order_id, None)  # as a worker would that forgot it: nobody renews it
            return
        if fate < 0.05:
            self.given_up += 1
        else:
            await client.commit(order_id, first_block=0, blocks=len(keys))
        await client.release(order_id)

    async def load(self, order_id: str, first: int, blocks: int) -> set[int]:
        """As many as are on the SSD; they may go at any time."""
        while blocks:
            try:
                await self.client.fetch(order_id, "n1", first_block=first, blocks=blocks)
                break
            except BlockMissing as problem:
                blocks = problem.held
            except TransferTimeout:  # a busy machine: the order computes, as a worker would
                self.late += 1
                return set()
        self.loaded += blocks
        return set(range(first, first + blocks))


def grown_mib(memory: Sequence[float]) -> float:
    """From the second quarter of the first hour to the last quarter of the last one. `memory`: of all their parts."""
    quarter = PARTS // 4
    return median(memory[-quarter:]) - median(memory[WARM_PARTS : WARM_PARTS + quarter])


def trace_chains() -> list[list[bytes]]:
    """Of an hour: the keys of each order."""
    return [
        [a.block_keys[i : i + KEY_BYTES] for i in range(0, len(a.block_keys), KEY_BYTES)][
            : SLOTS // IN_FLIGHT // 2
        ]
        for a in read_trace(TRACE)
    ]


async def play_hour(worker: Worker, hour: int, chains: Sequence[list[bytes]], pid: int) -> list[float]:
    """The agent's memory after each part of the hour, MiB."""
    salt = hour.to_bytes(KEY_BYTES, "big")
    memory = []
    for part in range(PARTS):
        first, end = (len(chains) * at // PARTS for at in (part, part + 1))
        waiting = iter(range(first, end))

        async def lane(waiting: Iterator[int] = waiting) -> None:
            for number in waiting:
                keys = [bytes(a ^ b for a, b in zip(key, salt, strict=True)) for key in chains[number]]
                await worker.play(f"h{hour}-{number}", keys)

        await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
        memory.append(anonymous_mib(pid))
    return memory


async def drive(url: str, pid: int, hours: int) -> dict[str, Any]:
    chains = trace_chains()
    bus = await Bus.connect(BusConfig(url=url), name="w1")
    client = AgentClient(bus, node_id="n1", worker_id="w1")
    await client.attach()
    worker = Worker(client, seed=1)
    memory: list[float] = []
    try:
        for hour in range(hours):
            started = time.monotonic()
            memory += await play_hour(worker, hour, chains, pid)
            status = await client.status()
            sizes = (
                status.slots_free + status.slots_reserved + status.slots_committed + status.slots_condemned
            )
            assert sizes == status.slots == SLOTS, status
            print(
                f"hour {hour + 1:2}: {time.monotonic() - started:5.1f} s, {memory[-1]:6.1f} MiB, "
                f"{worker.blocks} blocks, {worker.hits / worker.blocks:.3f} hit, {worker.loaded} from SSD, "
                f"{worker.given_up} given up, {worker.forgotten} forgotten, {worker.full} full",
                flush=True,
            )

        async def nothing_held() -> bool:
            nonlocal status
            status = await client.status()
            return not any((status.holds, status.leases, status.slots_reserved, status.slots_condemned))

        try:
            await eventually(nothing_held, "what was forgotten lapses", every_s=1)
        except Late as late:
            raise AssertionError(f"{late}: {status}") from None
    finally:
        await client.close()
        await bus.close()
    grown = grown_mib(memory)
    assert grown <= GROWTH_MAX_MIB, f"memory grew by {grown:.1f} MiB: {memory}"
    return {
        "hours": hours,
        "orders": hours * len(chains),
        "blocks": worker.blocks,
        "hit": round(worker.hits / worker.blocks, 4),
        "from_ssd": worker.loaded,
        "given_up": worker.given_up,
        "forgotten": worker.forgotten,
        "store_full": worker.full,
        "load_too_late": worker.late,
        "memory_mib": [round(m, 1) for m in memory],
        "grown_mib": round(grown, 1),
        "slots_free": status.slots_free,
        "slots_committed": status.slots_committed,
        "counters": status.counters,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--agent", nargs=3, metavar=("URL", "CLUSTER", "PATH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        return asyncio.run(agent_process(*args.agent))
    cluster = f"soak-{os.getpid()}"
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer.start(Path(directory) / "nats")
        command = [sys.executable, __file__, "--agent", server.url, cluster, str(Path(directory) / "tier")]
        agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "ready\n", "the agent did not start"
            started = time.monotonic()
            result = asyncio.run(drive(server.url, agent.pid, args.hours))
            result["wall_s"] = round(time.monotonic() - started)
        except (AssertionError, StoreError) as problem:
            print(f"soak: failed: {problem}", file=sys.stderr)
            return 1
        finally:
            agent.terminate()
            status = agent.wait(60)
            server.stop()
    print(json.dumps(result))
    return status


if __name__ == "__main__":
    sys.exit(main())
