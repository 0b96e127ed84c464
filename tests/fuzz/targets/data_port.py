"""Bytes to the TCP data port over real connections, from strangers: messages in and out of order, sizes that lie, cut
off anywhere. Each connection ends, with its thread and its file, and nothing is held. (`data_plane` plays callers that
have the secret too.)
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator

from halfmoon.store.transports.tcp.server import PlainServer
from tests.eventually import eventually_here
from tests.fuzz.frame import HANG_S, Play, found_where_late
from tests.fuzz.mutate import mutated_bytes
from tests.fuzz.targets import data_plane

TEST_INPUTS = 150
INPUTS_MEANT = 400_000
DEADLINE_S = 20.0


def make(draw: random.Random) -> bytes:
    stream = b""
    for where, frames in data_plane.messages.decode(data_plane.make(draw)):
        every = [b"" if where == "b" else draw.randbytes(32), *frames]
        sizes = [len(frame) for frame in every]
        if not draw.randrange(6):
            sizes[draw.randrange(len(sizes))] = draw.choice((0, 1, 1000, 2**16, 2**20, 2**31, 2**32 - 1))
        count = draw.choice((0, 16, 17, 1024, 1025, 2**32 - 1)) if not draw.randrange(12) else len(sizes)
        stream += struct.pack(f"<{len(sizes) + 1}I", count, *sizes) + b"".join(every)
    if not draw.randrange(4):
        stream = mutated_bytes(draw, stream)
    if not draw.randrange(4):
        stream = stream[: draw.randint(0, len(stream))]
    return stream


class Connections:
    """A port, and one connection to it for each input."""

    def __init__(self) -> None:
        self._port = data_plane.Port()
        self._server = PlainServer(
            self._port.view, self._port.service, stall_ns_max=10**9, message_ns_max=2 * 10**9
        )
        host, _, port = self._server.listen("127.0.0.1", 0).removeprefix("tcp://").rpartition(":")
        self._address = host, int(port)
        self._server.start()
        self._threads = threading.active_count()

    def play(self, content: bytes) -> str:
        with socket.create_connection(self._address, timeout=HANG_S) as connection:
            # It may hang up before it has read all.
            with contextlib.suppress(OSError):
                connection.sendall(content)
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
