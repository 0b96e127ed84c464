"""Our transport against perftest over the same two devices in the same guest: `make test-rdma` runs it there.

`python bandwidth.py OUT.json [ROUNDS]`. Slices of 1 MiB between an agent here (rxe0) and one in a process of its own in
the namespace `far` (rxe1), alternating with `ib_read_bw` and `ib_write_bw` of the same message size and
number, whose servers run in that namespace. Ours includes the checksums: read along and compared, or checked
by the receiver before the write returns. MiB/s; medians of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from store_harness import Cluster, cluster, keys
from test_agent import stored
from test_two_hosts import DEVICES, FAR, FIELDS, LAYERS, NEAR, SHAPE, node

from benchmarks.measured import beside, keep
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.schemas.store import ReserveBlocks, Reserved
from halfmoon.store.pool.guard import peer_writer
from halfmoon.store.transports.base import Call, Peer, Slice
from tests.eventually import eventually_here

MIB = 1 << 20
BLOCKS = 8
SLICES = BLOCKS * SHAPE.block_bytes // MIB
PER_SLICE = MIB // SHAPE.layer_block_bytes
#: In what a client of perftest says.
FIGURE = re.compile(rf"^ *{MIB} +{SLICES} +[0-9.]+ +([0-9.]+)", re.MULTILINE)


def slices(local: list[int], remote: list[int]) -> list[Slice]:
    """1 MiB each."""
    return [
        Slice(mine, theirs, layer, PER_SLICE)
        for mine, theirs in zip(local, remote, strict=True)
        for layer in range(0, LAYERS, PER_SLICE)
    ]


def perftest(program: str) -> float:
    """Average MiB/s between the two devices, by perftest's own clock: it says 0 when it could not calibrate
    that.
    """
    said = ""
    for _ in range(10):
        said = _played(program)
        found = FIGURE.search(said)
        if found and float(found[1]) > 0:
            return float(found[1])
    raise RuntimeError(f"{program} gives no figure: {said}")


def _played(program: str) -> str:
    """What the client says at last: it is begun again until its server listens, or has ended."""
    flags = ["-x", "1", "-s", str(MIB), "-n", str(SLICES), "-F"]
    client = [program, "-d", DEVICES[0], *flags, "10.78.0.2"]
    server = subprocess.Popen([*FAR, program, "-d", DEVICES[1], *flags], stdout=subprocess.DEVNULL)
    said = ""

    def played() -> bool:
        nonlocal said
        if server.poll() is None:
            said = subprocess.run(client, capture_output=True, text=True, timeout=120).stdout
            return FIGURE.search(said) is not None
        return True

    try:
        eventually_here(played, f"{program} listens", every_s=0.2)
    finally:
        server.kill()
        server.wait()
    return said


async def measure(here: Cluster, rounds: int) -> dict[str, list[float]]:
    """MiB/s of every round, by name."""
    await node(here, "n2", DEVICES[1], slots=2 * BLOCKS)
    agent = await here.agent("n1", slots=BLOCKS, rdma=DEVICES[0], **FIELDS)
    transport = agent.context.transports._open["rdma"]
    near, far = await here.client("n1", "w1"), await here.client("n2", "w2")
    wanted = keys(*range(1, BLOCKS + 1))
    await stored(far, "o", wanted, seed=1)
    committed = (await far.open_put("o1", wanted, blocks=BLOCKS)).slots
    mine = (await near.open_put("o2", b"", blocks=BLOCKS)).slots
    peer = await agent.context.peers.get("n2")
    reserve = ReserveBlocks(
        order_id="o3", decode_worker_id="w2", writer_node_id="n1", block_keys=b"", blocks=BLOCKS
    )
    reserved = (await agent.context.peers.ask("n2", "reserve", reserve, Reserved)).slots

    async def timed(move: Callable[[Peer, list[Slice], Call], Awaitable[None]], items: list[Slice]) -> float:
        started = time.monotonic()
        await move(peer, items, Call("o3", peer_writer("n1"), time.monotonic_ns() + 120 * 10**9))
        return SLICES / (time.monotonic() - started)

    async def perftest_of(program: str) -> float:
        return await asyncio.to_thread(perftest, program)

    found: dict[str, list[float]] = {name: [] for name in ("read", "ib_read_bw", "write", "ib_write_bw")}
    for number in range(-1, rounds):  # the first one warms up
        values = {
            "read": await timed(transport.read, slices(mine, committed)),
            "ib_read_bw": await perftest_of("ib_read_bw"),
            "write": await timed(transport.write, slices(mine, reserved)),
            "ib_write_bw": await perftest_of("ib_write_bw"),
        }
        assert all(
            (far.view.blocks[a] == far.view.blocks[b]).all() for a, b in zip(committed, reserved, strict=True)
        )
        print({name: round(value, 1) for name, value in values.items()}, flush=True)
        for name, value in values.items() if number >= 0 else ():
            found[name].append(value)
    assert not any(name.startswith("tcp") for name in agent.context.counters)
    return found


def main() -> None:
    out, rounds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5
    if len(DEVICES) < 2:
        raise SystemExit("needs two RDMA devices: make test-rdma")

    async def run(url: str) -> dict[str, list[float]]:
        async with cluster(url) as here:
            return await measure(here, rounds)

    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer.start(Path(directory), host=NEAR)
        try:
            found = asyncio.run(run(server.url))
        finally:
            server.stop()
    medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
    ratios = {
        f"{kind} against ib_{kind}_bw": round(
            statistics.median(a / b for a, b in zip(found[kind], found[f"ib_{kind}_bw"], strict=True)), 2
        )
        for kind in ("read", "write")
    }
    result = {
        "slice_bytes": MIB,
        "slices": SLICES,
        "mib_per_s": medians,
        "rounds": {name: [round(value, 1) for value in values] for name, values in found.items()},
        "ratio": ratios,
        "guest": {"kernel": os.uname().release, "devices": DEVICES},
        "beside": beside(),
    }
    keep(out, result)
    for kind in ("read", "write"):
        print(
            f"{kind}: {medians[kind]} MiB/s, ib_{kind}_bw {medians[f'ib_{kind}_bw']} MiB/s,"
            f" ratio {ratios[f'{kind} against ib_{kind}_bw']} (median of {rounds} rounds)"
        )


if __name__ == "__main__":
    main()
