"""The contenders of `transfer.py`: each has another process and moves the same 64 MiB, one round at a time,
so that all of them see the same machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from halfmoon.bus.embedded import free_port
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.store import Hello
from halfmoon.store.config import StoreConfig
from halfmoon.store.pool.checksums import slots_sums
from halfmoon.store.pool.fence import SegmentFence
from halfmoon.store.pool.guard import PoolGuard
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.segment import SHM, Geometry, PoolView, Segment, host_id, segment_name
from halfmoon.store.pool.slots import Owner
from halfmoon.store.transports.base import Call, Peer, ServedPool, Slice, Transport, moved_bytes
from halfmoon.store.transports.shm import ShmTransport
from halfmoon.store.transports.tcp.certificate import tls_context
from halfmoon.store.transports.tcp.transport import TcpTransport

MIB = 1024 * 1024
TOTAL = 64 * MIB
ENCRYPTION = {"shm": "never", "tcp": "never", "tls": "always"}
#: Whose order leases the blocks that are read, and whose order has reserved the slots that are written.
READER, WRITER = Owner("o", "bench"), Owner("w", "bench")
#: What is in the other end's slots: blocks that are read, blocks that are written, blocks of prompts that nobody else
#: can find.
Use = Literal["read", "written", "pushed"]


class Contender(Protocol):
    """`go` moves `size` bytes once; seconds, and CPU seconds of both ends."""

    name: str
    size: int

    def go(self) -> tuple[float, float]: ...

    def close(self) -> None: ...


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def layout(small: bool) -> Layout:
    """16 layers of 256 KiB, or of 4 KiB, a block."""
    tokens = 8 if small else 512
    return Layout(
        model="bench",
        model_fingerprint="bench",
        layers=16,
        kv_heads=1,
        head_dim=64,
        block_tokens=tokens,
        dtype="float32",
    )


class Memcpy:
    """The bound that no transport can beat."""

    name, size = "memcpy", TOTAL

    def __init__(self) -> None:
        self._source = np.random.default_rng(1).integers(0, 256, TOTAL, np.uint8)
        self._target = np.zeros_like(self._source)

    def go(self) -> tuple[float, float]:
        started, before = time.perf_counter(), cpu_s()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started, cpu_s() - before

    def close(self) -> None:
        pass


class SegmentCopy(Memcpy):
    """From a pool's shared memory to another's: what pages of that memory allow."""

    name = "segment_copy"

    def __init__(self) -> None:
        shape = layout(False)
        geometry = Geometry.of(shape, TOTAL // shape.block_bytes)
        self._segments = [
            Segment.create(segment_name(f"bench{uuid.uuid4().hex[:8]}", end), geometry)
            for end in ("from", "to")
        ]
        self._source, self._target = (segment.view.blocks for segment in self._segments)
        self._source[:] = 1
        self._target[:] = 0

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


def huge_pages_of_shm() -> str:
    """The option `huge` that /dev/shm is mounted with; "never" where it has none."""
    # Of several mounts at one place the last one is seen.
    options = re.findall(rf"^\S+ {SHM} \S+ (\S+)", Path("/proc/mounts").read_text(), re.MULTILINE)[-1]
    found = re.search(r"\bhuge=(\w+)", options)
    return found[1] if found else "never"


class OtherProcess:
    """A child that serves, and says its CPU seconds when asked."""

    def __init__(self, kind: str, shape: Layout | None = None, use: Use = "read") -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (kind, shape or layout(False), use, theirs)
        self._process = context.Process(target=their_side, args=arguments, daemon=True)
        self._process.start()

    def cpu_s(self) -> float:
        self.pipe.send("cpu")
        used: float = self.pipe.recv()
        return used + cpu_s()

    def close(self) -> None:
        self.pipe.send("end")
        self._process.join()


class Plain:
    """A blocking socket, or one of Python's under TLS, into one buffer."""

    size = TOTAL

    def __init__(self, kind: str) -> None:
        self.name = kind
        self._other = OtherProcess(kind)
        self._buffer = memoryview(bytearray(TOTAL))
        self._connection = socket.create_connection(("127.0.0.1", self._other.pipe.recv()))
        if kind == "socket_tls":
            self._connection = tls_context("bench", False, ()).wrap_socket(self._connection)

    def go(self) -> tuple[float, float]:
        before = self._other.cpu_s()
        started = time.perf_counter()
        self._connection.send(b"go")
        got = 0
        while got < TOTAL:
            got += self._connection.recv_into(self._buffer[got:])
        seconds = time.perf_counter() - started
        return seconds, self._other.cpu_s() - before

    def close(self) -> None:
        self._other.close()
        self._connection.close()


class Ours:
    """A read (or write) of all 64 MiB, or of one 4 KiB layer, by a transport of ours."""

    def __init__(self, kind: str, *, small: bool = False, writing: bool = False) -> None:
        self.name = f"{kind}_{'write' if writing else 'get'}{'_4kib' if small else ''}"
        self._connect(kind, layout(small), "written" if writing else "read")
        geometry = self._peer.geometry
        slots = range(1) if small else range(geometry.slots)
        layers = 1 if small else geometry.layers
        self._items = [Slice(slot, slot, layer, 1) for layer in range(layers) for slot in slots]
        self.size = moved_bytes(self._items, geometry.layer_block_bytes)
        self._checked = small

    def _connect(self, kind: str, shape: Layout, use: Use) -> None:
        self._other = OtherProcess(kind, shape, use)
        hello: Hello = self._other.pipe.recv()
        self._end = End(kind, "mine", shape)
        self._writing = use != "read"
        if self._writing:
            self._end.view.blocks[:] = noise(self._end.view.blocks.shape)
        geometry = Geometry.of(hello.layout, hello.slots)
        self._peer = Peer(
            hello.node_id, hello.incarnation, hello.host, hello.segment, geometry, tuple(hello.endpoints)
        )
        self._move = self._end.transport.write if self._writing else self._end.transport.read
        self._order = WRITER if self._writing else READER
        self._runner = asyncio.Runner(loop_factory=_loop)

    def go(self) -> tuple[float, float]:
        before = self._other.cpu_s()
        seconds = self._runner.run(self._timed())
        cpu = self._other.cpu_s() - before
        if not self._checked:
            self._require_moved()
            self._checked = True
        return seconds, cpu

    def _require_moved(self) -> None:
        peer = self._peer
        view = PoolView.attach(peer.segment, peer.geometry) if self._writing else self._end.view
        assert (view.blocks == noise(view.blocks.shape)).all(), self.name
        if self._writing:
            view.close()

    async def _timed(self) -> float:
        order = self._order
        call = Call(order.order_id, order.party, time.monotonic_ns() + 10**11)
        started = time.perf_counter()
        await self._move(self._peer, self._items, call)
        return time.perf_counter() - started

    def close(self) -> None:
        self._runner.run(self._end.transport.close())
        self._runner.close()
        self._end.segment.close()
        self._other.close()


class Push(Ours):
    """The KV of a prompt of the built-in model, a layer at a time, as an order's push has it while it is computed.
    `whole`: with all of the block that it ends in, as an agent is sent it that does not take parts.
    """

    def __init__(self, kind: str, tokens: int, *, whole: bool) -> None:
        self.name = f"{kind}_push_{tokens}{'_whole' if whole else ''}"
        shape = Layout(
            model="bench",
            model_fingerprint="bench",
            layers=30,
            kv_heads=3,
            head_dim=64,
            block_tokens=256,
            dtype="float32",
        )
        self._connect(kind, shape, "pushed")
        last, filled = divmod(tokens, shape.block_tokens)
        fill = {} if whole else {last: filled * shape.token_layer_bytes // 2}
        blocks, layers = range(shape.blocks(tokens)), range(shape.layers)
        self._layers = [[Slice(i, i, layer, 1, fill.get(i, 0)) for i in blocks] for layer in layers]
        self.size = sum(moved_bytes(items, shape.layer_block_bytes) for items in self._layers)
        self._checked = True

    async def _timed(self) -> float:
        order = self._order
        call = Call(order.order_id, order.party, time.monotonic_ns() + 10**11)
        started = time.perf_counter()
        for items in self._layers:
            await self._move(self._peer, items, call)
        return time.perf_counter() - started


def _loop() -> asyncio.AbstractEventLoop:
    """As our processes run."""
    import uvloop

    return uvloop.new_event_loop()


class Mooncake:
    """Mooncake's store over TCP: a master, a process that holds the values, one that gets them. Raises
    OSError.
    """

    def __init__(self, interpreter: str) -> None:
        self._stack = contextlib.ExitStack()
        directory = Path(interpreter).parent
        port = free_port()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        flags = [f"--rpc_port={port}", f"--metrics_port={free_port()}", "--enable_metric_reporting=false"]
        self._start([str(directory / "mooncake_master"), *flags])
        time.sleep(1)
        program = str(Path(__file__).with_name("mooncake_store.py"))
        try:
            self._serving = self._start([interpreter, program, "serve", f"127.0.0.1:{port}"])
            _require(self._serving, self._log)
            self._getting = self._start([interpreter, program, "get", f"127.0.0.1:{port}"])
            _require(self._getting, self._log)
        except BaseException:
            self.close()
            raise

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
        )
        self._stack.callback(_end, process)
        return process

    def get(self, name: str, size: int) -> tuple[float, float]:
        before = self._cpu_s()
        found = _ask(self._getting, name)
        assert found["bytes"] == size, found
        return found["seconds"], self._cpu_s() - before

    def _cpu_s(self) -> float:
        return float(_ask(self._serving, "cpu")["cpu_s"] + _ask(self._getting, "cpu")["cpu_s"])

    def close(self) -> None:
        self._stack.close()


class MooncakeGet:
    """One of its values."""

    BIG, SMALL = "mooncake_get", "mooncake_get_4kib"

    def __init__(self, store: Mooncake, name: str, size: int) -> None:
        self.name = self.BIG if name == "big" else self.SMALL
        self.size = size
        self._store, self._key = store, name

    def go(self) -> tuple[float, float]:
        return self._store.get(self._key, self.size)

    def close(self) -> None:
        pass


def _ask(process: subprocess.Popen[str], line: str) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _require(process: subprocess.Popen[str], log: Any) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line or json.loads(line):
        log.seek(0)
        raise OSError(f"Mooncake's store did not start: {line!r} {log.read()[-500:]}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    process.wait()


# --- both ends ----------------------------------------------------------------------------------------------


def noise(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


class End:
    """Memory, pool and transport of one process."""

    def __init__(self, kind: str, node_id: str, shape: Layout) -> None:
        slots = min(TOTAL // layout(False).block_bytes, TOTAL // shape.block_bytes)
        encryption: Any = ENCRYPTION[kind]
        name = f"bench{uuid.uuid4().hex[:8]}"
        self.config = StoreConfig(
            cluster=name,
            node_id=node_id,
            layout=shape,
            slots=slots,
            cluster_secret="bench",
            encryption=encryption,
        )
        self.segment = Segment.create(segment_name(name, node_id), self.config.geometry)
        self.view = self.segment.view
        self.view.touch()
        self.guard = PoolGuard(Pool(slots), ttl_ns=10**12, grace_ns=0, announce=lambda changes: None)
        self.guard.fence_by(SegmentFence(self.view))
        self.tcp: TcpTransport | None = None
        self.transport: Transport = ShmTransport(self.view, ThreadPoolExecutor(2), host=host_id())
        if kind != "shm":
            pool = ServedPool(view=self.view, access=self.guard, incarnation=node_id, counters=Counter())
            self.transport = self.tcp = TcpTransport(pool, self.config.tcp_options, host=host_id())
            self.tcp.start()
        self.hello = Hello(
            node_id=node_id,
            incarnation=node_id,
            host=host_id(),
            segment=self.view.name,
            slots=slots,
            layout=shape,
            endpoints=self.tcp.endpoints if self.tcp else [],
        )

    def reserve(self, owner: Owner, *, keyed: bool = True) -> None:
        """Every slot for blocks that the owner writes."""
        count = len(self.view.blocks)
        keys = [i.to_bytes(16, "little") for i in range(count)] if keyed else []
        self.guard.open_put(owner, keys, count, writer=owner.party)

    def fill(self, owner: Owner) -> None:
        """Committed blocks in every slot, leased by the owner."""
        self.reserve(owner)
        self.view.blocks[:] = noise(self.view.blocks.shape)
        count = len(self.view.blocks)
        self.view.sums[:] = slots_sums(self.view, range(count))
        self.guard.commit(owner, dict.fromkeys(range(count), 0))


def their_side(kind: str, shape: Layout, use: Use, pipe: Connection) -> None:
    """The other process: serves until it is told to end."""
    if kind in ENCRYPTION:
        end = End(kind, "theirs", shape)
        if use == "read":
            end.fill(READER)
        else:
            end.reserve(WRITER, keyed=use == "written")
        pipe.send(end.hello)
        while pipe.recv() != "end":
            pipe.send(cpu_s())
        asyncio.run(end.transport.close())
        end.segment.close()
        return
    payload = memoryview(bytearray(os.urandom(MIB)) * (TOTAL // MIB))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
    if kind == "socket_tls":
        peer = tls_context("bench", True, ()).wrap_socket(peer, server_side=True)
    while True:
        if peer not in multiprocessing.connection.wait([pipe, peer]):
            if pipe.recv() == "end":
                return
            pipe.send(cpu_s())
        elif peer.recv(2):
            peer.sendall(payload)


def python_with_mooncake(named: str) -> tuple[str, str]:
    """An interpreter that can import the wheel; "" and the reason when there is none."""
    candidates = [named] if named else [os.environ.get("MOONCAKE_PYTHON", ""), sys.executable]
    reasons = []
    for candidate in filter(None, candidates):
        try:
            tried = subprocess.run(
                [candidate, "-c", "import mooncake.store"], capture_output=True, text=True, check=False
            )
        except OSError as problem:
            reasons.append(f"{Path(candidate).name}: {problem.strerror}")
            continue
        if not tried.returncode:
            return candidate, ""
        reasons.append(f"{Path(candidate).name}: {(tried.stderr.splitlines() or ['no reason given'])[-1]}")
    return "", "; ".join(reasons)
