"""Bytes to the TCP data port over real connections, from strangers and from a peer after its handshake: messages in and
out of order, sizes that lie, cut off anywhere. Each connection ends, with its thread and its file, and nothing is held.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

from halfmoon.store.transports.base import Call, Cancellation
from halfmoon.store.transports.tcp.channel import StallTimer
from halfmoon.store.transports.tcp.options import TcpOptions
from halfmoon.store.transports.tcp.server import TcpServer
from halfmoon.store.transports.tcp.streams import CLEAR, shaken_hands
from tests.eventually import eventually_here
from tests.fuzz.frame import HANG_S, Play, found_where_late
from tests.fuzz.mutate import mutated_bytes
from tests.fuzz.targets import data_plane

TEST_INPUTS = 150
INPUTS_MEANT = 400_000
DEADLINE_S = 20.0
#: The first byte of an input: whom it comes from.
STRANGER, PEER = b"s", b"p"
SECRET = "the cluster's secret"


def make(draw: random.Random) -> bytes:
    stream = b""
    for where, frames in data_plane.messages.decode(data_plane.make(draw)):
        every = [draw.randbytes(32) if where == "f" else b"", *frames]
        sizes = [len(frame) for frame in every]
        if not draw.randrange(6):
            sizes[draw.randrange(len(sizes))] = draw.choice((0, 1, 1000, 2**16, 2**20, 2**31, 2**32 - 1))
        count = draw.choice((0, 16, 17, 1024, 1025, 2**32 - 1)) if not draw.randrange(12) else len(sizes)
        stream += struct.pack(f"<{len(sizes) + 1}I", count, *sizes) + b"".join(every)
    if not draw.randrange(4):
        stream = mutated_bytes(draw, stream)
    if not draw.randrange(4):
        stream = stream[: draw.randint(0, len(stream))]
    return draw.choice((STRANGER, PEER, PEER)) + stream


class Connections:
    """A port, and one connection to it for each input."""

    def __init__(self) -> None:
        self._port = data_plane.Port()
        options = TcpOptions(
            cluster_secret=SECRET, encryption="never", stall_ns_max=10**9, transfer_ns_max=2 * 10**9
        )
        self._server = TcpServer(self._port.view, self._port.service, options)
        host, _, port = self._server.listen("127.0.0.1", 0).removeprefix("tcp://").rpartition(":")
        self._address = host, int(port)
        self._server.start()
        self._threads = threading.active_count()

    def play(self, content: bytes) -> str:
        with socket.create_connection(self._address, timeout=HANG_S) as connection:
            if content[:1] == PEER:
                waiter = StallTimer(
                    Cancellation(Call("o", "w", time.monotonic_ns() + 10**11)), 10**11, "port"
                )
                shaken_hands(connection, SECRET, waiter, server=False, protection=CLEAR)
                connection.settimeout(HANG_S)
            # It may hang up before it has read all.
            with contextlib.suppress(OSError):
                connection.sendall(content[1:])
                connection.shutdown(socket.SHUT_WR)
            answered = 0
            with contextlib.suppress(ConnectionError):
                while some := connection.recv(65536):
                    answered += len(some)
        self._port.check()
        return "answered" if answered else "hung up"

    def close(self) -> None:
        with found_where_late():
            eventually_here(
                lambda: threading.active_count() <= self._threads,
                "the threads of connections that ended are gone",
            )
        self._server.close()
        self._port.segment.close()


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    connections = Connections()
    yield connections.play
    connections.close()
