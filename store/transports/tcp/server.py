"""The receiving end of plain TCP links: a thread for each connection.

A caller has `ADMISSION_S` to prove that it knows the secret, may send very little before, and is one of a few at a time
(`admission`). Encrypted links have a server of their own (`curve`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from halfmoon.store.pool.segment import PoolView
from halfmoon.store.transports.tcp.admission import ADMISSION_S, STRANGERS_MAX, Admission
from halfmoon.store.transports.tcp.channel import ConnectionBroken, PlainChannel
from halfmoon.store.transports.tcp.service import Caller, TcpService
from halfmoon.store.transports.tcp.wire import frame_bytes_max

SESSIONS_MAX = 1024
#: A host that vanishes closes nothing: the kernel asks after a minute of silence, then every ten seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class PlainServer:
    """Callers of plain links, each in a thread of its own: bytes of a socket go straight into the slots."""

    def __init__(
        self, view: PoolView, service: TcpService, *, stall_ns_max: int, message_ns_max: int
    ) -> None:
        self._view = view
        self._service = service
        self._stall_ns_max = stall_ns_max
        self._message_ns_max = message_ns_max
        self._accepting: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._connections: dict[PlainChannel, threading.Thread] = {}
        self._admission: Admission[PlainChannel] = Admission()
        self._closed = False

    def listen(self, host: str, port: int) -> str:
        """Binds; the address. Raises OSError (port taken, no such address)."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=128)
        bound = listener.getsockname()
        at = f"[{bound[0]}]" if family == socket.AF_INET6 else bound[0]
        self._accepting[listener] = threading.Thread(
            target=self._accept, args=(listener,), name="store-tcp", daemon=True
        )
        return f"tcp://{at}:{bound[1]}"

    def start(self) -> None:
        """Serves the bound socket."""
        for thread in self._accepting.values():
            thread.start()

    def close(self) -> None:
        """Ends every connection and its thread. Idempotent."""
        self._closed = True
        for listener, accepting in self._accepting.items():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; closing does not
            if accepting.ident is not None:
                accepting.join()
            listener.close()
        with self._lock:
            threads = list(self._connections.values())
            for channel in self._connections:
                _end(channel)
        for thread in threads:
            thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, address = listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.05)  # out of file descriptors
                continue
            try:
                self._take(connection, address[0])
            # The second one: there is no memory, or no right, for one more thread.
            except (OSError, RuntimeError):
                self._service.count("refused_connection")
                connection.close()

    def _take(self, connection: socket.socket, address: str) -> None:
        """Begins to serve a stranger. Raises OSError, RuntimeError."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        channel = PlainChannel(connection, frame_bytes_max=frame_bytes_max(self._view), stranger=True)
        thread = threading.Thread(target=self._serve, args=(channel, address), name="store-tcp", daemon=True)
        with self._lock:
            if self._closed or len(self._connections) >= SESSIONS_MAX + STRANGERS_MAX:
                raise ConnectionRefusedError("too many connections")
            self._connections[channel] = thread
            self._enter(channel, address)
            try:
                thread.start()
            except RuntimeError:
                self._forget(channel)
                raise

    def _enter(self, channel: PlainChannel, address: str) -> None:
        """It is a stranger, for which another one may have to go."""
        gone = self._admission.enter(channel, address)
        if gone is not None:
            self._service.count("refused_stranger")
            _end(gone)

    def _forget(self, channel: PlainChannel) -> None:
        self._admission.leave(channel)
        del self._connections[channel]

    def _serve(self, channel: PlainChannel, address: str) -> None:
        caller = Caller()
        waiting = _Waiting(self)
        known = False
        try:
            while True:
                channel.receive(waiting)
                if known:
                    waiting.message_begins(self._stall_ns_max, self._message_ns_max)
                channel.during(waiting)
                self._service.receive(channel, caller, lambda frames: channel.send(frames, waiting))
                channel.drain()
                if known != (caller.session is not None):
                    known = not known
                    channel.trust(known)
                    waiting.stranger_comes()
                    with self._lock:
                        if known:
                            self._admission.leave(channel)
                        else:
                            self._enter(channel, address)
                if known:
                    waiting.message_ends()
        except ConnectionBroken as problem:
            if problem.kind:
                self._service.count(f"refused_{problem.kind}")
        finally:
            # Closed within the lock: until then its number is its own, and `_end` of another thread hits nothing else.
            with self._lock:
                self._forget(channel)
                channel.close()

    @property
    def closed(self) -> bool:
        return self._closed


class _Waiting:
    """How long a connection is waited for: a stranger until its time is over, a peer in the middle of a message until
    it stalls or the message takes too long, and between two messages as long as it likes.
    """

    def __init__(self, server: PlainServer) -> None:
        self._server = server
        self._stall_ns_max: int | None = None
        self._moved_ns = 0
        self.stranger_comes()

    def stranger_comes(self) -> None:
        self._stall_ns_max = None
        self._until_ns: int | None = time.monotonic_ns() + int(ADMISSION_S * 1e9)
        self._why = "stranger"

    def message_begins(self, stall_ns_max: int, message_ns_max: int) -> None:
        self._moved_ns = time.monotonic_ns()
        self._stall_ns_max = stall_ns_max
        self._until_ns = self._moved_ns + message_ns_max
        self._why = "stalled"

    def message_ends(self) -> None:
        self._stall_ns_max = self._until_ns = None

    def moved(self) -> None:
        self._moved_ns = time.monotonic_ns()

    def check(self) -> None:
        """Raises ConnectionBroken when the wait is over."""
        if self._server.closed:
            raise ConnectionBroken("closed")
        now_ns = time.monotonic_ns()
        if self._until_ns is not None and now_ns > self._until_ns:
            raise ConnectionBroken("it took too long", self._why)
        if self._stall_ns_max is not None and now_ns - self._moved_ns > self._stall_ns_max:
            raise ConnectionBroken("stalled", "stalled")


def _end(channel: PlainChannel) -> None:
    """Its thread wakes, and closes it."""
    with contextlib.suppress(OSError):
        channel.socket.shutdown(socket.SHUT_RDWR)
