"""Bytes to a channel's port, from strangers and from an end that has said a true hello: headers that lie, messages out
of order, cut off anywhere. Each ends in a message, or in a lost channel that says why, and holds no thread and no file.

An input is the frames of a hello (or rubbish in their place), then frames after it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import HEADER_BYTES, Dtype, MessageHeader, Op, pack_into
from halfmoon.store.channels.hello import ChannelHello, encode_hello
from halfmoon.store.channels.inbox import MessageRefused
from halfmoon.store.channels.kinds import UnixKind
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelLost
from tests.eventually import eventually_here
from tests.fuzz.frame import HANG_S, Play, found_where_late
from tests.fuzz.mutate import mutated_bytes

TEST_INPUTS = 25
DEADLINE_S = 20.0
TIMEOUT_S = 0.1
#: What the serving end has room for.
ROOM_BYTES = 64 * 1024
HELLO = ChannelHello(
    worker_id="decode-0",
    cluster="c",
    version="1",
    model="m",
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    exact=True,
    segment_tokens=16,
    dtype="float32",
    window=4,
    message_bytes_max=ROOM_BYTES,
)
_ODD = (0, 1, 2, 255, 2**16 - 1, ROOM_BYTES, ROOM_BYTES + 1, 2**31, 2**32 - 1)


def frame(
    header: MessageHeader, payload: bytes, sequence: int, consumed: int = 0, size: int | None = None
) -> bytes:
    raw = bytearray(HEADER_BYTES)
    pack_into(memoryview(raw), header, len(payload) if size is None else size, sequence, consumed)
    return bytes(raw) + payload


def make(draw: random.Random) -> bytes:
    changes = {} if draw.randrange(4) else {draw.choice(("layers", "window", "heads")): draw.choice(_ODD)}
    stream = frame(MessageHeader(Op.HELLO), encode_hello(msgspec.structs.replace(HELLO, **changes)), 1)
    if not draw.randrange(6):
        stream = mutated_bytes(draw, stream)
    for number in range(draw.randrange(8)):
        payload = draw.randbytes(draw.choice((0, 1, 16, 300, 5000)))
        header = MessageHeader(
            draw.choice(list(Op)), draw.choice(list(Dtype)), layer=draw.randrange(3), rows=draw.randrange(9)
        )
        odd = not draw.randrange(8)
        sequence = draw.choice(_ODD) if odd else number + 2
        consumed = draw.choice((1, 2**64 - 1)) if not draw.randrange(20) else 0
        size = draw.choice(_ODD) if not draw.randrange(10) else None
        stream += frame(header, payload, sequence, consumed, size)
    if not draw.randrange(4):
        stream = mutated_bytes(draw, stream)
    if not draw.randrange(4):
        stream = stream[: draw.randint(0, len(stream))]
    return struct.pack("<I", draw.randrange(2**32)) + stream


class Port:
    """A port on this host, and one thread that takes what comes over its channels."""

    def __init__(self) -> None:
        options = ChannelOptions(secret="s", timeout_s=TIMEOUT_S)
        mine = msgspec.structs.replace(HELLO, worker_id="attention-0")
        self._listener = ChannelListener(mine, options, [UnixKind()])
        self._name = "\0" + self._listener.addresses[0].partition("/")[2]
        self._memory = memoryview(bytearray(ROOM_BYTES))
        self._threads, self._files = threading.active_count(), len(os.listdir("/proc/self/fd"))

    def play(self, content: bytes) -> str:
        draw = random.Random(content[:4])
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(self._name)
            caller.settimeout(HANG_S)
            # Over in pieces, and it may hang up before it has read all.
            with contextlib.suppress(OSError):
                rest = content[4:]
                while rest:
                    size = draw.choice((1, 63, 64, 65, len(rest)))
                    caller.sendall(rest[:size])
                    rest = rest[size:]
                if draw.randrange(8):
                    caller.shutdown(socket.SHUT_WR)
            caller.setblocking(False)  # with a timeout, `recv` waits for it whatever its flags are
            outcome = self._serve(caller)
        self._settle()
        return outcome

    def _serve(self, caller: socket.socket) -> str:
        channel = None

        def answered() -> bool:
            nonlocal channel
            channel = self._listener.accept()
            return channel is not None or self._ended(caller)

        with found_where_late():
            eventually_here(answered, "a caller is let in or refused", every_s=0.001)
        if channel is None:
            return "not let in"
        with channel:
            return self._take(channel)

    @staticmethod
    def _ended(caller: socket.socket) -> bool:
        """The port has hung up: no more comes after its last word."""
        try:
            heard = caller.recv(65536)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not heard

    def _take(self, channel: WorkerChannel) -> str:
        taken = 0
        try:
            while True:
                channel.receive(self._into)
                taken += 1
        except ChannelLost as problem:
            return f"{type(problem).__name__} after {min(taken, 2)}"

    def _into(self, header: MessageHeader) -> memoryview:
        if header.rows > 6:
            raise MessageRefused(f"rows: {header.rows}")
        return self._memory[: header.payload_bytes]

    def _settle(self) -> None:
        def nothing_left() -> bool:
            files = len(os.listdir("/proc/self/fd"))
            return threading.active_count() <= self._threads and files <= self._files + 1

        with found_where_late():
            eventually_here(nothing_left, "threads and files of a channel that ended are gone", every_s=0.001)

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    port = Port()
    yield port.play
    port.close()
