"""Channels within one process: for what workers say over a channel, not how its bytes travel.

Both ends are real channels, and so is the listener; under them is a stream in memory instead of a socket. It has a
socket's bound, and a descriptor that is readable while bytes wait. `tests/store/test_channels.py` has the sockets.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from halfmoon.store.channels import opening
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelError
from halfmoon.store.transports.tcp.streams import POLL_MS, SOCKET_BYTES, ConnectionBroken, Seal

KIND = "memory"
_numbers = itertools.count(1)


class MemoryListener(ChannelListener):
    """A listener without ports. Whoever is in this process reaches it by `MemoryKind`."""

    #: Those that are open, by address.
    open: ClassVar[dict[str, MemoryListener]] = {}

    def __init__(self, hello: ChannelHello, options: ChannelOptions) -> None:
        super().__init__(hello, options, kinds=())
        self.addresses = [f"{KIND}:{next(_numbers)}"]
        self._greeting: list[threading.Thread] = []
        self.open[self.addresses[0]] = self

    def close(self) -> None:
        self.open.pop(self.addresses[0], None)
        for greeting in self._greeting:
            greeting.join()
        super().close()

    def called(self) -> MemoryStream:
        """The end of whoever calls; the other one is greeted here."""
        near, far = pair(sealed=self._options.encryption == "never")
        greeting = threading.Thread(target=self._greet, args=(far,), daemon=True)
        self._greeting.append(greeting)
        greeting.start()
        return near

    def _greet(self, stream: MemoryStream) -> None:
        channel = WorkerChannel(stream, self._hello, self._options.timeout_s)
        let_in = False
        try:
            channel.greet(first=False, deadline_s=time.monotonic() + self._options.timeout_s)
            with self._lock:
                let_in = self._put(channel)
        except ChannelError as problem:
            self._count_refused(problem)
        finally:
            if not let_in:
                channel.close()


class MemoryKind:
    """See `halfmoon.store.channels.kinds.ChannelKind`, of which it has the caller's half."""

    name = KIND

    def reaches(self, address: str, options: ChannelOptions) -> bool:
        return address.startswith(f"{KIND}:")

    def connect(self, address: str, options: ChannelOptions, deadline_s: float) -> MemoryStream:
        if address not in MemoryListener.open:
            raise ConnectionBroken("Connection refused")
        return MemoryListener.open[address].called()


@pytest.fixture(autouse=True, scope="session")
def memory_is_reached() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "KINDS", (*opening.KINDS, MemoryKind()))
        yield


def listening(hello: ChannelHello, options: ChannelOptions, kind: str) -> ChannelListener:
    return MemoryListener(hello, options) if kind == KIND else ChannelListener(hello, options)


class _Way:
    """Bytes in one direction, and the descriptor that tells of them."""

    def __init__(self, changed: threading.Condition) -> None:
        self.bytes = bytearray()
        self.changed = changed
        self.told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class MemoryStream:
    """One end (`halfmoon.store.transports.tcp.streams.Stream`)."""

    kind = KIND

    def __init__(self, came: _Way, goes: _Way, over: threading.Event, seal: Seal | None) -> None:
        self.seal = seal
        self._came, self._goes, self._over = came, goes, over
        self._changed = came.changed
        self._closed = False

    def send(self, pieces: Sequence[memoryview]) -> int:
        with self._changed:
            if self._over.is_set():
                raise ConnectionBroken("Broken pipe")
            before = len(self._goes.bytes)
            for piece in pieces:
                self._goes.bytes += piece.cast("B")[: SOCKET_BYTES - len(self._goes.bytes)]
            if not before and self._goes.bytes:
                os.eventfd_write(self._goes.told, 1)
            self._changed.notify_all()
            return len(self._goes.bytes) - before

    def receive(self, into: memoryview, *, wait: bool) -> int:
        with self._changed:
            if wait:
                self._changed.wait_for(self._readable, POLL_MS / 1e3)
            waiting = self._came.bytes
            size = min(len(waiting), into.nbytes)
            if not size and self._over.is_set():
                raise ConnectionBroken("it closed the connection")
            into.cast("B")[:size] = waiting[:size]
            del waiting[:size]
            if size and not waiting and not self._over.is_set():
                os.eventfd_read(self._came.told)
            self._changed.notify_all()
            return size

    def _readable(self) -> bool:
        return bool(self._came.bytes) or self._over.is_set()

    def wait(self, *, readable: bool, writable: bool) -> bool:
        def ready() -> bool:
            room = len(self._goes.bytes) < SOCKET_BYTES
            return (readable and self._readable()) or (writable and room) or self._over.is_set()

        with self._changed:
            self._changed.wait_for(ready, POLL_MS / 1e3)
            return self._readable()

    def buffered(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._came.told

    def shut(self) -> None:
        with self._changed:
            if not self._over.is_set():
                self._over.set()
                for way in (self._came, self._goes):
                    os.eventfd_write(way.told, 1)
            self._changed.notify_all()

    def close(self) -> None:
        self.shut()
        with self._changed:
            if not self._closed:
                self._closed = True
                os.close(self._came.told)


def pair(*, sealed: bool = False) -> tuple[MemoryStream, MemoryStream]:
    """`sealed`: headers carry keyed sums, as between hosts in the clear."""
    changed = threading.Condition()
    one, other = _Way(changed), _Way(changed)
    over = threading.Event()
    near, far = [Seal(b"key", b"memory", server=each) for each in (True, False)] if sealed else (None, None)
    return MemoryStream(one, other, over, near), MemoryStream(other, one, over, far)


def channel_kind(node: Any, otherwise: str = "unix") -> str:
    """Of the channels of one test: of one that is marked `pure`, in memory."""
    return KIND if node.get_closest_marker("pure") else otherwise
