"""Two ends of a channel in one process, ends in processes of their own, and an end that sends any bytes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import HEADER_BYTES, SEALED_BYTES, Dtype, MessageHeader, Op, pack_into
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.kinds import KINDS
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.store.channels.options import ChannelOptions, channel_secret
from tests.eventually import BOUND_S, eventually_here
from tests.store.memory_channels import listening

NAMES = [kind.name for kind in KINDS]
SECRET = channel_secret("the cluster's")
QUERY = MessageHeader(Op.QUERY, Dtype.F32, rows=1)


def hello(worker_id: str, **changes: Any) -> ChannelHello:
    one = ChannelHello(
        worker_id=worker_id,
        cluster="c",
        version="1",
        model="m",
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        exact=True,
        segment_tokens=256,
        dtype="float32",
    )
    return msgspec.structs.replace(one, **changes)


def options(kind: str, **changes: Any) -> ChannelOptions:
    """Under which `kind` is had, and others of this host besides."""
    fields: dict[str, Any] = {"secret": SECRET, "timeout_s": BOUND_S}
    return ChannelOptions(**{**fields, "encryption": "never" if kind == "tcp" else "auto", **changes})


def addresses(listener: ChannelListener, kind: str) -> list[str]:
    return [address for address in listener.addresses if address.startswith(f"{kind}:")]


def accepted(listener: ChannelListener) -> WorkerChannel:
    channel = eventually_here(listener.accept, f"somebody comes: {listener.counters}", every_s=0.002)
    assert channel is not None
    return channel


def shorten(channel: WorkerChannel, timeout_s: float) -> None:
    """Of an open channel: to open one, there is always time enough."""
    channel._timeout_s = channel._inbox._timeout_s = timeout_s


def receives(channel: WorkerChannel) -> None:
    """Until another thread waits in `receive`."""
    eventually_here(lambda: channel._receives, "a thread receives", every_s=0.001)


@contextlib.contextmanager
def pair(
    kind: str, *, window: int = 8, sealed: bool = False, **changes: Any
) -> Iterator[tuple[WorkerChannel, WorkerChannel]]:
    """The end that connected, and the one that listened. `sealed`: in memory, headers carry keyed sums."""
    settings = options(kind, encryption="never") if sealed else options(kind)
    more = {"window": window, **changes}
    with listening(hello("attention-0", **more), settings, kind) as listener:
        one = connect(addresses(listener, kind), hello("decode-0", **more), settings, peer="attention-0")
        with one, accepted(listener) as two:
            assert one.kind == two.kind == kind
            yield one, two


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread, no file, and no thread that ended by an exception."""
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    files, threads = set(open_files()), threading.active_count()
    yield
    eventually_here(lambda: threading.active_count() <= threads, "no thread is left")
    eventually_here(lambda: set(open_files()) <= files, "no file is left")
    assert not raised


def open_files() -> list[str]:
    return [file.name for file in Path("/proc/self/fd").iterdir() if file.exists()]


def memory(size: int, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * size)


def fresh(header: MessageHeader) -> memoryview:
    return memory(header.payload_bytes)


def into(target: memoryview) -> Callable[[MessageHeader], memoryview]:
    return lambda header: target[: header.payload_bytes]


class Raw:
    """An end that keeps to the protocol until it is asked not to: it sends the bytes that it is given."""

    def __init__(self, channel: WorkerChannel) -> None:
        self.channel = channel
        self.sequence = channel._sequence

    def header(
        self,
        header: MessageHeader = QUERY,
        *,
        size: int = 0,
        sequence: int = 0,
        consumed: int = 0,
        sealed: bool = True,
    ) -> bytearray:
        """`sequence` 0: the next one."""
        self.sequence += 1
        self.channel._data += header.op >= Op.QUERY
        raw = bytearray(HEADER_BYTES)
        pack_into(memoryview(raw), header, size, sequence or self.sequence, consumed)
        return self.seal(raw) if sealed else raw

    def seal(self, raw: bytearray) -> bytearray:
        seal = self.channel._stream.seal
        if seal is not None:
            raw[SEALED_BYTES:] = seal.make(memoryview(raw)[:SEALED_BYTES])
        return raw

    def send(self, content: bytes | bytearray) -> None:
        rest = memoryview(content)

        def all_sent() -> bool:
            nonlocal rest
            rest = rest[self.channel._stream.send([rest]) :]
            return not rest

        eventually_here(all_sent, "room for what is sent", every_s=0.001)


class OtherProcess:
    """`channel_end.py` in a process of its own, which listens and does as `behaviour` says."""

    def __init__(self, kind: str, behaviour: str) -> None:
        script = Path(__file__).parent / "channel_end.py"
        self._process = subprocess.Popen(
            [sys.executable, str(script), kind, behaviour], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.addresses: list[str] = json.loads(self._process.stdout.readline())

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begins `work`; the value waits for its end, and raises what it raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as problem:
            outcome.append((None, problem))

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> Any:
        thread.join(BOUND_S)
        assert not thread.is_alive(), "it hangs"
        value, problem = outcome[0]
        if problem is not None:
            raise problem
        return value

    return end
