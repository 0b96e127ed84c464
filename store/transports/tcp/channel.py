"""A connection as both ends of a TCP link see it: messages of a few frames. Blocking; one thread at a time.

`PlainChannel` is a socket: in front of a message go the number of its frames and their sizes (u32, little-endian).
A frame is received straight into the slot that it is for. (Links without encryption went over pyzmq before:
its I/O threads cost four thread switches a round trip, 53 µs in place of 15, and a copy.) `CurveChannel` is
the calling end of an encrypted link, a pyzmq DEALER.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import zmq
import zmq.utils.monitor

from halfmoon.store.errors import HolderUnreachable, TransferRefused, TransferTimeout
from halfmoon.store.transports.base import Cancellation

POLL_MS = 50
SCRATCH_BYTES = 96 * 1024
#: Frames of a message, and bytes of one that is not payload.
FRAMES_MAX = 1024
SMALL_BYTES_MAX = 1024 * 1024
#: The same of a stranger, which sends a greeting and its proof only; and the bytes of all of its frames together.
STRANGER_FRAMES_MAX = 16
STRANGER_SMALL_BYTES_MAX = 1024
STRANGER_MESSAGE_BYTES_MAX = 64 * 1024
STRANGER_SCRATCH_BYTES = 4096
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_KEY_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ConnectionBroken(Exception):
    """The connection ended. `kind`: "malformed" or "truncated" when its bytes are no message."""

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind


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


class Waiter(Protocol):
    """Asked by a channel while it waits (`StallTimer` here, the server has its own)."""

    def moved(self) -> None: ...

    def check(self) -> None: ...


class Frames(Protocol):
    """The frames of one message, one after the other."""

    def more(self) -> bool: ...

    def small(self) -> bytes:
        """The next frame. Raises FrameMissing."""

    def into(self, buffer: memoryview) -> int:
        """The next frame, into `buffer`; its size, which may be another than that of the buffer. -1: there is
        none.
        """


class TcpChannel(Frames, Protocol):
    """One end of a connection. Its methods raise ConnectionBroken, and the errors of `waiter`."""

    def send(self, frames: Sequence[bytes | memoryview], waiter: Waiter) -> None: ...

    def receive(self, waiter: Waiter) -> None:
        """Waits for a message; its frames come next."""

    def broken(self) -> bool:
        """True: an idle connection has ended meanwhile."""

    def close(self) -> None: ...


class PlainChannel:
    """Over a connected socket, which it owns. `stranger`: the other end may send very little until it is trusted."""

    def __init__(self, connection: socket.socket, *, frame_bytes_max: int, stranger: bool = False) -> None:
        self.socket = connection
        self._frame_bytes_max = frame_bytes_max
        self._stranger = stranger
        self._sizes: deque[int] = deque()
        self._scratch = memoryview(bytearray(STRANGER_SCRATCH_BYTES if stranger else SCRATCH_BYTES))
        self._start = self._end = 0
        self._waiter: Waiter | None = None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own timeouts: one system call moves megabytes and still returns to ask the waiter.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, POLL_MS * 1000))

    @classmethod
    def connect(
        cls, address: str, waiter: StallTimer, *, frame_bytes_max: int, timeout_s: float
    ) -> PlainChannel:
        """`address`: `tcp://host:port`. Raises ConnectionBroken."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        waiter.check()
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        # A peer chooses its address: it may have no port, a port of six digits, a host that is no name.
        except (OSError, ValueError, OverflowError) as problem:
            raise ConnectionBroken(str(problem)) from None
        return cls(connection, frame_bytes_max=frame_bytes_max)

    def detach(self) -> socket.socket:
        """The socket, for another protocol from here on. Raises ConnectionBroken: the other end did not wait."""
        if self._sizes or self._start != self._end:
            raise ConnectionBroken("it said more than was asked for", "malformed")
        return self.socket

    def trust(self, trusted: bool) -> None:
        """The other end has proved itself; or it has not kept to the protocol, and is a stranger again."""
        self._stranger = not trusted
        if trusted and len(self._scratch) < SCRATCH_BYTES:
            larger = memoryview(bytearray(SCRATCH_BYTES))
            larger[: self._end] = self._scratch[: self._end]
            self._scratch = larger

    def close(self) -> None:
        self.socket.close()

    def broken(self) -> bool:
        """True when there is anything to read: the peer never speaks first, so that it is the connection's end."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    # --- out ------------------------------------------------------------------------------------------------

    def send(self, frames: Sequence[bytes | memoryview], waiter: Waiter) -> None:
        sizes = [len(frame) for frame in frames]
        # Sizes first and all together, so that the receiver knows where each frame goes before its first byte.
        prefix = struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes)
        pending = [memoryview(frame) for frame in (prefix, *frames)]
        first = 0
        while first < len(pending):
            try:
                sent = self.socket.sendmsg(pending[first : first + FRAMES_MAX])
            except BlockingIOError:
                waiter.check()
                continue
            except OSError as problem:
                raise ConnectionBroken(str(problem)) from None
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
            self._more_scratch(waiter)

    def during(self, waiter: Waiter) -> None:
        """`waiter` is asked while the frames of this message come."""
        self._waiter = waiter

    def whole(self) -> bool:
        """Reads arrived bytes, without waiting; whether all of a message (of less than SCRATCH_BYTES) is here."""
        while not self._prefix() or sum(self._sizes) > self._end - self._start:
            # It may never fit into the scratch, and the event loop would ask for ever.
            if sum(self._sizes) > SCRATCH_BYTES // 2:
                raise ConnectionBroken("an answer that is too long", "malformed")
            self._compact()
            try:
                self._got(self.socket.recv_into(self._scratch[self._end :], 0, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return False
            except OSError as problem:
                raise ConnectionBroken(str(problem)) from None
        return True

    def more(self) -> bool:
        return bool(self._sizes)

    def small(self) -> bytes:
        if not self._sizes:
            raise FrameMissing("a frame is missing")
        size = self._sizes.popleft()
        # The sender chooses the size, and may be a stranger.
        if size > (STRANGER_SMALL_BYTES_MAX if self._stranger else SMALL_BYTES_MAX):
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
        if not 1 <= count <= (STRANGER_FRAMES_MAX if self._stranger else FRAMES_MAX):
            raise ConnectionBroken(f"a message of {count} frames", "malformed")
        if ready < 4 + 4 * count:
            return False
        sizes = struct.unpack_from(f"<{count}I", self._scratch, self._start + 4)
        if max(sizes) > self._frame_bytes_max:
            raise ConnectionBroken(f"a frame of {max(sizes)} bytes", "malformed")
        if self._stranger and sum(sizes) > STRANGER_MESSAGE_BYTES_MAX:
            raise ConnectionBroken(f"a message of {sum(sizes)} bytes from a stranger", "malformed")
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
                # MSG_WAITALL: one system call for a frame and not one for each segment that arrives.
                got = self.socket.recv_into(buffer[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                self._waiter.check()
                continue
            except OSError as problem:
                raise ConnectionBroken(str(problem)) from None
            if not got:
                raise ConnectionBroken("it closed the connection in the middle of a message", "truncated")
            done += got
            self._waiter.moved()
            # Not only when nothing came: a byte now and then would hold this thread past every deadline.
            if done < len(buffer):
                self._waiter.check()

    def _more_scratch(self, waiter: Waiter) -> None:
        self._compact()
        try:
            self._got(self.socket.recv_into(self._scratch[self._end :]))
            waiter.moved()
            waiter.check()
        except BlockingIOError:
            waiter.check()
        except OSError as problem:
            raise ConnectionBroken(str(problem)) from None

    def _compact(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._scratch):
            left = bytes(self._scratch[self._start : self._end])
            self._scratch[: len(left)] = left
            self._start, self._end = 0, len(left)

    def _got(self, size: int) -> None:
        if not size:
            kind = "truncated" if self._end > self._start or self._sizes else ""
            raise ConnectionBroken("it closed the connection", kind)
        self._end += size


class CurveChannel:
    """The calling end of an encrypted link. `keys`: own CURVE key pair; `server_key`: the peer's."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        peer: str,
        server_key: str,
        keys: tuple[bytes, bytes],
        frame_bytes_max: int,
    ) -> None:
        self._peer = peer
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        # No reconnection: a link that broke is not used again, and its session would not continue.
        self._socket.reconnect_ivl = -1
        self._socket.immediate = 1
        self._socket.sndhwm = 0
        self._socket.sndtimeo = 0  # with no high-water mark, a send waits only when the connection is gone
        self._socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.curve_serverkey = server_key.encode()
        events = _GONE | _KEY_REFUSED | _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self._socket.get_monitor_socket(events)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._connected = False
        self._first = False
        self._socket.connect(address)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(linger=0)

    def broken(self) -> bool:
        return bool(self._monitor.poll(0))

    def handshake(self, waiter: Waiter) -> None:
        """Waits until both ends took the other's key. Raises TransferRefused, HolderUnreachable."""
        while not self._connected:
            self._wait(waiter)

    def send(self, frames: Sequence[bytes | memoryview], waiter: Waiter) -> None:
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.ZMQError as problem:
            raise ConnectionBroken(str(problem)) from None

    def receive(self, waiter: Waiter) -> None:
        while not self._wait(waiter):
            pass
        waiter.moved()
        self._first = True

    def more(self) -> bool:
        return self._first or bool(self._socket.getsockopt(zmq.RCVMORE))

    def small(self) -> bytes:
        if not self.more():
            raise FrameMissing("a frame is missing")
        self._first = False
        return self._socket.recv()

    def into(self, buffer: memoryview) -> int:
        return self._socket.recv_into(buffer) if self.more() else -1

    def _wait(self, waiter: Waiter) -> bool:
        """True: a message came within POLL_MS."""
        ready = dict(self._poller.poll(POLL_MS))
        if self._socket in ready:
            return True
        if self._monitor in ready:
            event = int(zmq.utils.monitor.recv_monitor_message(self._monitor)["event"])
            if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event & _KEY_REFUSED:
                raise TransferRefused(f"{self._peer} does not allow our key")
            elif event & _HANDSHAKE_FAILED:
                raise TransferRefused(
                    f"{self._peer} and we do not agree on encryption, or its key is another"
                )
            else:
                raise HolderUnreachable(f"the connection to {self._peer} broke")
        else:
            waiter.check()
        return False
