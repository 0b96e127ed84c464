"""A connection as both ends of a TCP link see it: messages of a few frames. Blocking; one thread at a time.

In front of a message go the number of its frames and their sizes (u32, little-endian), so that a frame is received
straight into the slot that it is for. What lies below is a stream: a plain socket, or one under TLS (`streams`).
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from halfmoon.store.errors import TransferTimeout
from halfmoon.store.transports.base import Cancellation
from halfmoon.store.transports.tcp.streams import (
    ConnectionBroken,
    ConnectionClosed,
    PlainStream,
    TlsStream,
    Waiter,
)

SCRATCH_BYTES = 96 * 1024
#: Frames of a message, and bytes of one that is not payload.
FRAMES_MAX = 1024
SMALL_BYTES_MAX = 1024 * 1024


class FrameMissing(Exception):
    """The message has fewer frames than it should."""


class StallTimer:
    """Ends a wait that was cancelled, is past its deadline, or saw no byte for `stall_ns_max`."""

    def __init__(self, cancellation: Cancellation, stall_ns_max: int, peer: str) -> None:
        self._cancellation = cancellation
        self._stall_ns_max = stall_ns_max
        self._peer = peer
        self._moved_ns = time.monotonic_ns()

    def moved(self) -> None:
        self._moved_ns = time.monotonic_ns()

    def check(self) -> None:
        """Raises TransferError when the wait is over: cancelled, past its deadline, or stalled."""
        self._cancellation.check()
        if time.monotonic_ns() - self._moved_ns >= self._stall_ns_max:
            raise TransferTimeout(f"nothing from {self._peer} for {self._stall_ns_max // 1_000_000} ms")


class Frames(Protocol):
    """The frames of one message, one after the other."""

    def more(self) -> bool: ...

    def small(self) -> bytes:
        """The next frame. Raises FrameMissing."""

    def into(self, buffer: memoryview) -> int:
        """The next frame, into `buffer`; its size, which may be another than that of the buffer. -1: there is
        none.
        """


class TcpChannel:
    """Over a stream, which it owns. Methods raise ConnectionBroken, and the errors of `waiter`."""

    def __init__(self, stream: PlainStream | TlsStream, *, frame_bytes_max: int) -> None:
        self._stream = stream
        self._frame_bytes_max = frame_bytes_max
        self._sizes: deque[int] = deque()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._start = self._end = 0
        self._waiter: Waiter | None = None

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()

    def broken(self) -> bool:
        """True when there is anything to read: the peer never speaks first, so that it is the connection's end."""
        return self._stream.anything()

    # --- out ------------------------------------------------------------------------------------------------

    def send(self, frames: Sequence[bytes | memoryview], waiter: Waiter) -> None:
        sizes = [len(frame) for frame in frames]
        # Sizes first and all together, so that the receiver knows where each frame goes before its first byte.
        prefix = struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes)
        pending = [memoryview(frame) for frame in (prefix, *frames)]
        first = 0
        while first < len(pending):
            sent = self._stream.send(pending[first : first + FRAMES_MAX], wait=True)
            if not sent:
                waiter.check()
                continue
            waiter.moved()
            while first < len(pending) and sent >= len(pending[first]):
                sent -= len(pending[first])
                first += 1
            if sent:
                pending[first] = pending[first][sent:]
                waiter.check()

    # --- in -------------------------------------------------------------------------------------------------

    def receive(self, waiter: Waiter) -> None:
        self.during(waiter)
        while not self._prefix():
            if self._more_scratch(wait=True):
                waiter.moved()
            waiter.check()

    def during(self, waiter: Waiter) -> None:
        """`waiter` is asked while the frames of this message come."""
        self._waiter = waiter

    def whole(self) -> bool:
        """Reads arrived bytes, without waiting; whether all of a message (of less than SCRATCH_BYTES) is here."""
        while not self._prefix() or sum(self._sizes) > self._end - self._start:
            # It may never fit into the scratch, and the event loop would ask for ever.
            if sum(self._sizes) > SCRATCH_BYTES // 2:
                raise ConnectionBroken("an answer that is too long", "malformed")
            if not self._more_scratch(wait=False):
                return False
        return True

    def more(self) -> bool:
        return bool(self._sizes)

    def small(self) -> bytes:
        if not self._sizes:
            raise FrameMissing("a frame is missing")
        size = self._sizes.popleft()
        # The sender chooses the size.
        if size > SMALL_BYTES_MAX:
            raise ConnectionBroken(f"a header of {size} bytes", "malformed")
        frame = bytearray(size)
        self._fill(memoryview(frame))
        return bytes(frame)

    def into(self, buffer: memoryview) -> int:
        if not self._sizes:
            return -1
        size = self._sizes.popleft()
        self._fill(buffer[:size])
        # A frame that is too long is read all the same, so that the next message begins where it should.
        if size > len(buffer):
            self._skip(size - len(buffer))
        return size

    def drain(self) -> None:
        """Skips the rest of the message."""
        while self._sizes:
            self._skip(self._sizes.popleft())

    def _skip(self, size: int) -> None:
        rubbish = memoryview(bytearray(min(size, SCRATCH_BYTES)))
        while size:
            self._fill(rubbish[:size])
            size -= min(size, len(rubbish))

    def _prefix(self) -> bool:
        """Takes the sizes of a message's frames from the scratch, when they are there."""
        if self._sizes:
            return True
        ready = self._end - self._start
        if ready < 4:
            return False
        (count,) = struct.unpack_from("<I", self._scratch, self._start)
        # Checked before anything is allocated by it.
        if not 1 <= count <= FRAMES_MAX:
            raise ConnectionBroken(f"a message of {count} frames", "malformed")
        if ready < 4 + 4 * count:
            return False
        sizes = struct.unpack_from(f"<{count}I", self._scratch, self._start + 4)
        if max(sizes) > self._frame_bytes_max:
            raise ConnectionBroken(f"a frame of {max(sizes)} bytes", "malformed")
        self._sizes.extend(sizes)
        self._start += 4 + 4 * count
        return True

    def _fill(self, buffer: memoryview) -> None:
        """From the scratch first, then from the socket."""
        assert self._waiter is not None
        done = min(len(buffer), self._end - self._start)
        if done:
            buffer[:done] = self._scratch[self._start : self._start + done]
            self._start += done
        while done < len(buffer):
            try:
                got = self._stream.receive(buffer[done:], wait=True)
            except ConnectionClosed:
                raise ConnectionBroken(
                    "it closed the connection in the middle of a message", "truncated"
                ) from None
            if not got:
                self._waiter.check()
                continue
            done += got
            self._waiter.moved()
            # Not only when nothing came: a byte now and then would hold this thread past every deadline.
            if done < len(buffer):
                self._waiter.check()

    def _more_scratch(self, *, wait: bool) -> int:
        """Bytes that came."""
        self._compact()
        try:
            got = self._stream.receive(self._scratch[self._end :], wait=wait, some=True)
        except ConnectionClosed as problem:
            raise ConnectionBroken(str(problem), "truncated" if self._end > self._start else "") from None
        self._end += got
        return got

    def _compact(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._scratch):
            left = bytes(self._scratch[self._start : self._end])
            self._scratch[: len(left)] = left
            self._start, self._end = 0, len(left)
