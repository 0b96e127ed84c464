"""The receiving end of TCP links: a thread for each connection.

A caller has `ADMISSION_S` to prove by TLS that it knows the secret, and is one of a few at a time (`admission`).
Nothing else that it sends is looked at before.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from halfmoon.store.pool.segment import PoolView
from halfmoon.store.transports.tcp.admission import ADMISSION_S, STRANGERS_MAX, Admission
from halfmoon.store.transports.tcp.channel import TcpChannel
from halfmoon.store.transports.tcp.options import TcpOptions
from halfmoon.store.transports.tcp.service import TcpService
from halfmoon.store.transports.tcp.streams import ConnectionBroken, shaken_hands
from halfmoon.store.transports.tcp.wire import Session, frame_bytes_max

SESSIONS_MAX = 1024
#: A host that vanishes closes nothing: the kernel asks after a minute of silence, then every ten seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class TcpServer:
    """Callers of links, each in a thread of its own: bytes of a socket go straight into the slots."""

    def __init__(self, view: PoolView, service: TcpService, options: TcpOptions) -> None:
        self._view = view
        self._service = service
        self._options = options
        self._accepting: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._admission: Admission[socket.socket] = Admission()
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
            for connection in self._connections:
                _end(connection)
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
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        thread = threading.Thread(target=self._serve, args=(connection,), name="store-tcp", daemon=True)
        with self._lock:
            if self._closed or len(self._connections) >= SESSIONS_MAX + STRANGERS_MAX:
                raise ConnectionRefusedError("too many connections")
            self._connections[connection] = thread
            gone = self._admission.enter(connection, address)
            if gone is not None:
                self._service.count("refused_stranger")
                _end(gone)
            try:
                thread.start()
            except RuntimeError:
                self._forget(connection)
                raise

    def _forget(self, connection: socket.socket) -> None:
        self._admission.leave(connection)
        del self._connections[connection]

    def _serve(self, connection: socket.socket) -> None:
        waiting, options = _Waiting(self), self._options
        try:
            # By its address: what it says of its host is not asked for.
            same_host = connection.getpeername()[0] == connection.getsockname()[0]
            stream = shaken_hands(
                connection,
                options.cluster_secret,
                waiting,
                server=True,
                protection=options.protection(same_host=same_host),
            )
            with self._lock:
                self._admission.leave(connection)
            channel = TcpChannel(stream, frame_bytes_max=frame_bytes_max(self._view))
            session = Session(stream.key, "server")
            channel.send(self._service.welcome(session), waiting)
            goes_on = True
            while goes_on:
                waiting.message_ends()
                channel.receive(waiting)
                waiting.message_begins(options.stall_ns_max, options.transfer_ns_max)
                goes_on = self._service.receive(
                    channel, session, lambda frames: channel.send(frames, waiting)
                )
                channel.drain()
        except (ConnectionBroken, OSError) as problem:
            if isinstance(problem, ConnectionBroken) and problem.kind:
                self._service.count(f"refused_{problem.kind}")
        finally:
            # Closed within the lock: until then its number is its own, and `_end` of another thread hits nothing else.
            with self._lock:
                self._forget(connection)
                connection.close()

    @property
    def closed(self) -> bool:
        return self._closed


class _Waiting:
    """How long a connection is waited for: a stranger until its time is over, a peer in the middle of a message until
    it stalls or the message takes too long, and between two messages as long as it likes.
    """

    def __init__(self, server: TcpServer) -> None:
        self._server = server
        self._stall_ns_max: int | None = None
        self._moved_ns = 0
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


def _end(connection: socket.socket) -> None:
    """Its thread wakes, and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
