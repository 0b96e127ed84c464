"""How fast blocks move, against what the machine can do in the same run: one memcpy, a plain socket, bare pyzmq.

`python benchmarks/transfer.py [--json] [--rounds N]`. 64 MiB of block-layers (256 KiB each) between two processes, then
single 4 KiB layers, for the latency. Medians and spread (interquartile), and CPU seconds per GiB of both ends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import socket
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from clusters import finish, parser

from halfmoon.schemas.policy import Layout
from halfmoon.schemas.store import Hello
from halfmoon.store.book import Book
from halfmoon.store.config import StoreConfig
from halfmoon.store.pool import Pool
from halfmoon.store.segment import Geometry, Segment, host_id
from halfmoon.store.shm import ShmTransport
from halfmoon.store.slots import Owner
from halfmoon.store.sums import slots_sums
from halfmoon.store.tcp import TcpTransport
from halfmoon.store.transport import Call, Peer, Slice, Transport

MIB = 1024 * 1024
TOTAL = 64 * MIB
FRAME = MIB
ENCRYPTION = {"shm": "never", "tcp_hmac": "never", "tcp_curve": "always"}
Measured = dict[str, float]


def layout(small: bool) -> Layout:
    """16 layers of 256 KiB, or of 4 KiB, a block."""
    return Layout(
        model="bench",
        model_fingerprint="bench",
        layers=16,
        kv_heads=1,
        head_dim=64,
        block_tokens=8 if small else 512,
        dtype="float32",
    )


class End:
    """Memory, book and transport of one process."""

    def __init__(self, kind: str, node_id: str, small: bool) -> None:
        shape = layout(small)
        slots = TOTAL // layout(False).block_bytes
        encryption: Any = ENCRYPTION[kind]
        name = f"bench{os.getppid() if node_id == 'theirs' else os.getpid()}"
        self.config = StoreConfig(
            cluster=name, node_id=node_id, layout=shape, slots=slots, cluster_secret="bench", encryption=encryption
        )
        self.segment = Segment.create(f"halfmoon-{name}-{node_id}", self.config.geometry)
        self.view = self.segment.view
        self.view.touch()
        self.book = Book(Pool(slots), ttl_ns=10**12, grace_ns=0, announce=lambda changes: None)
        self.tcp: TcpTransport | None = None
        self.transport: Transport = ShmTransport(self.view, ThreadPoolExecutor(2))
        if kind != "shm":
            self.transport = self.tcp = TcpTransport(
                self.view, self.book, self.config, incarnation=node_id, host=host_id(), counters=Counter()
            )
            self.tcp.start()
        self.hello = Hello(
            node_id=node_id,
            incarnation=node_id,
            host=host_id(),
            segment=self.view.name,
            slots=slots,
            layout=shape,
            endpoints=self.tcp.endpoints if self.tcp else [],
            public_key=self.tcp.public_key if self.tcp else "",
        )

    def fill(self) -> None:
        """Committed blocks in every slot, leased under order "o"; room to write under order "w"."""
        self.view.blocks[:] = np.random.default_rng(1).integers(0, 256, self.view.blocks.shape, np.uint8)
        count = len(self.view.blocks)
        keys = [i.to_bytes(16, "little") for i in range(count)]
        hold = self.book.open_put(Owner("o", "x"), keys, count, writer="x")
        self.view.sums[:] = slots_sums(self.view, range(count))
        self.book.commit(Owner("o", "x"), dict.fromkeys(range(len(hold.slots)), 0))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def their_side(kind: str, small: bool, pipe: Connection) -> None:
    """The other process: serves until it is told to end."""
    if kind in ENCRYPTION:
        end = End(kind, "theirs", small)
        end.fill()
        pipe.send(end.hello)
        mine: Hello = pipe.recv()
        if end.tcp is not None:
            end.tcp.allow(mine)
        pipe.send("ready")
        while pipe.recv() != "end":
            pipe.send(cpu_s())
        asyncio.run(end.transport.close())
        end.segment.close()
        return
    payload = bytearray(os.urandom(FRAME)) * (TOTAL // FRAME)
    view = memoryview(payload)
    if kind == "socket":
        listener = socket.create_server(("127.0.0.1", 0))
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
        while pipe.recv() != "end":
            peer.sendall(view)
            pipe.send(cpu_s())
        return
    router: Any = zmq.Context().socket(zmq.ROUTER)
    pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    while pipe.recv() != "end":
        identity, _ = router.recv_multipart()
        for first in range(0, TOTAL, FRAME):
            router.send_multipart([identity, view[first : first + FRAME]], copy=False)
        pipe.send(cpu_s())


def summary(seconds: list[float], size: int, cpu: float = 0.0) -> Measured:
    low, _, high = statistics.quantiles(seconds, n=4)
    median = statistics.median(seconds)
    moved_gib = size * len(seconds) / 2**30
    return {
        "mib_per_s": round(size / MIB / median, 1),
        "ms_median": round(median * 1e3, 3),
        "ms_iqr": round((high - low) * 1e3, 3),
        "cpu_s_per_gib": round(cpu / moved_gib, 3),
    }


def other_process(kind: str, small: bool = False) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=their_side, args=(kind, small, theirs), daemon=True)
    process.start()
    return process, ours


def plain(kind: str, rounds: int) -> Measured:
    """A blocking socket, or bare pyzmq, into one buffer."""
    process, pipe = other_process(kind)
    port = pipe.recv()
    buffer = memoryview(bytearray(TOTAL))
    connection: Any
    if kind == "socket":
        connection = socket.create_connection(("127.0.0.1", port))
    else:
        connection = zmq.Context().socket(zmq.DEALER)
        connection.connect(f"tcp://127.0.0.1:{port}")
    times, cpu, theirs_before = [], 0.0, 0.0
    for number in range(rounds + 1):
        pipe.send("go")
        started, started_cpu = time.perf_counter(), cpu_s()
        if kind == "socket":
            got = 0
            while got < TOTAL:
                got += connection.recv_into(buffer[got:])
        else:
            connection.send(b"go")
            for first in range(0, TOTAL, FRAME):
                connection.recv_into(buffer[first : first + FRAME])
        times.append(time.perf_counter() - started)
        theirs = pipe.recv()
        if number:
            cpu += cpu_s() - started_cpu + theirs - theirs_before
        theirs_before = theirs
    pipe.send("end")
    process.join()
    return summary(times[1:], TOTAL, cpu)


async def ours(kind: str, rounds: int, small: bool) -> dict[str, Measured]:
    """Reads and writes of all 64 MiB, or reads of one 4 KiB layer."""
    process, pipe = other_process(kind, small)
    hello: Hello = pipe.recv()
    end = End(kind, "mine", small)
    if end.tcp is not None:
        end.tcp.allow(hello)
    pipe.send(end.hello)
    assert pipe.recv() == "ready"
    geometry = Geometry.of(hello.layout, hello.slots)
    peer = Peer(hello.node_id, hello.incarnation, hello.host, hello.segment, geometry, tuple(hello.endpoints))
    slots = range(1) if small else range(hello.slots)
    layers = 1 if small else geometry.layers
    items = [Slice(slot, slot, layer, 1) for layer in range(layers) for slot in slots]

    async def measure(move: Callable[[], Awaitable[None]], count: int) -> Measured:
        for _ in range(2):
            await move()
        pipe.send("cpu")
        before = pipe.recv() + cpu_s()
        times = []
        for _ in range(count):
            started = time.perf_counter()
            await move()
            times.append(time.perf_counter() - started)
        pipe.send("cpu")
        return summary(times, len(items) * geometry.layer_block_bytes, pipe.recv() + cpu_s() - before)

    def call() -> Call:
        return Call("o", "x", time.monotonic_ns() + 10**11)

    found = {"read": await measure(lambda: end.transport.read(peer, items, call()), rounds)}
    assert (
        small or (end.view.blocks == np.random.default_rng(1).integers(0, 256, end.view.blocks.shape, np.uint8)).all()
    )
    if kind == "shm" and not small:
        found["write"] = await measure(lambda: end.transport.write(peer, items, call()), rounds)
    pipe.send("end")
    await asyncio.to_thread(process.join)
    await end.transport.close()
    end.segment.close()
    return found


def memcpy(rounds: int) -> Measured:
    source = np.random.default_rng(1).integers(0, 256, TOTAL, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(rounds + 1):
        started, started_cpu = time.perf_counter(), cpu_s()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return summary(times[1:], TOTAL, (cpu_s() - started_cpu) * rounds)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=20, help="of 64 MiB each")
    args = options.parse_args()
    found: dict[str, Measured] = {
        "memcpy": memcpy(args.rounds),
        "socket": plain("socket", args.rounds),
        "pyzmq": plain("pyzmq", args.rounds),
    }
    for kind in ENCRYPTION:
        for name, measured in asyncio.run(ours(kind, args.rounds, False)).items():
            found[f"{kind}_{name}"] = measured
        found[f"{kind}_get_4kib"] = asyncio.run(ours(kind, 500, True))["read"]
    lines = [f"{'':22}{'MiB/s':>10}{'median ms':>12}{'iqr ms':>10}{'CPU s/GiB':>11}"]
    for name, row in found.items():
        cells = zip(row.values(), (10, 12, 10, 11), strict=True)
        lines.append(f"{name:22}" + "".join(f"{value:>{width}}" for value, width in cells))
    finish(args, dict(found), lines)


if __name__ == "__main__":
    main()
