"""The receiving ends of TCP: a thread for each plain connection, and one for all encrypted ones (a pyzmq
ROUTER).

On an encrypted link the caller's CURVE key must be on the allow list (ZAP) before a byte of it is looked at.
Over a plain link a caller has `ADMISSION_S` to prove that it knows the secret, and there are at most
`SESSIONS_MAX` of them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import zmq
from zmq.utils import z85

from halfmoon.store.pool.segment import PoolView
from halfmoon.store.transports.tcp.channel import ConnectionBroken, FrameMissing, PlainChannel
from halfmoon.store.transports.tcp.service import Caller, TcpService
from halfmoon.store.transports.tcp.wire import frame_bytes_max

SESSIONS_MAX = 1024
ADMISSION_S = 10.0


class PlainServer:
    """Callers of plain links, each in a thread of its own: what a socket delivers goes straight into the
    slots.
    """

    def __init__(self, view: PoolView, service: TcpService, *, stall_ns_max: int) -> None:
        self._view = view
        self._service = service
        self._stall_ns_max = stall_ns_max
        self._accepting: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._connections: dict[PlainChannel, threading.Thread] = {}
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
        """Serves what was bound."""
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
                with contextlib.suppress(OSError):
                    channel.socket.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.05)  # out of file descriptors
                continue
            with self._lock:
                if self._closed or len(self._connections) >= SESSIONS_MAX:
                    self._service.count("refused_connection")
                    connection.close()
                    continue
                channel = PlainChannel(connection, frame_bytes_max=frame_bytes_max(self._view))
                thread = threading.Thread(target=self._serve, args=(channel,), name="store-tcp", daemon=True)
                self._connections[channel] = thread
            thread.start()

    def _serve(self, channel: PlainChannel) -> None:
        caller = Caller()
        idle, busy = _Waiting(self, caller), _Moving(self, self._stall_ns_max)
        try:
            while True:
                channel.receive(idle)
                busy.moved()
                channel.during(busy)
                self._service.receive(channel, caller, lambda frames: channel.send(frames, busy))
                channel.drain()
        except ConnectionBroken as problem:
            if problem.kind:
                self._service.count(f"refused_{problem.kind}")
        finally:
            with self._lock:
                del self._connections[channel]
            channel.close()

    @property
    def closed(self) -> bool:
        return self._closed


class _Waiting:
    """Between two messages: a peer may be silent as long as it likes, a stranger may not."""

    def __init__(self, server: PlainServer, caller: Caller) -> None:
        self._server = server
        self._caller = caller
        self._since_s = time.monotonic()

    def moved(self) -> None:
        pass

    def check(self) -> None:
        if self._server.closed:
            raise ConnectionBroken("closed")
        if self._caller.session is None and time.monotonic() - self._since_s > ADMISSION_S:
            raise ConnectionBroken("not admitted in time")


class _Moving:
    """In the middle of a message: it goes on, or the connection ends."""

    def __init__(self, server: PlainServer, stall_ns_max: int) -> None:
        self._server = server
        self._stall_ns_max = stall_ns_max
        self._moved_ns = 0

    def moved(self) -> None:
        self._moved_ns = time.monotonic_ns()

    def check(self) -> None:
        if self._server.closed or time.monotonic_ns() - self._moved_ns > self._stall_ns_max:
            raise ConnectionBroken("stalled")


class CurveServer:
    """Callers of encrypted links, in one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        view: PoolView,
        service: TcpService,
        keys: tuple[bytes, bytes],
    ) -> None:
        self._context = context
        self._service = service
        self._allowed: frozenset[bytes] = frozenset({keys[0]})
        self._callers: OrderedDict[bytes, Caller] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._stop = context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # what is sent is not copied, and callers ask for little at a time
        self._socket.rcvhwm = 64
        self._socket.router_mandatory = 1
        self._socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max(view))
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys[1]
        self._socket.zap_domain = b"halfmoon"

    def listen(self, host: str, port: int) -> str:
        """Binds; the address. Raises zmq.ZMQError (port taken, no such address)."""
        self._socket.bind(f"tcp://{host}:{port or '*'}")
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        """Serves what was bound; of the socket's threads, from here on only its own."""
        self._thread = threading.Thread(target=self._run, name="store-curve", daemon=True)
        self._thread.start()

    def allow(self, public_key: str) -> None:
        """Puts a CURVE key on the list."""
        self._allowed = self._allowed | {public_key.encode()}

    def close(self) -> None:
        """Ends the thread and closes its sockets."""
        if self._thread is not None:
            teller = self._context.socket(zmq.PAIR)
            teller.connect("inproc://stop")
            teller.send(b"")
            self._thread.join()
            teller.close(linger=0)
        for closing in (self._zap, self._stop, self._socket):
            closing.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for polled in (self._zap, self._stop, self._socket):
            poller.register(polled, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                return
            if self._zap in ready:
                self._judge_key()
            if self._socket in ready:
                self._receive()

    def _judge_key(self) -> None:
        """ZAP, RFC 27: version, request id, domain, address, identity, mechanism, credentials."""
        version, request_id, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism != b"CURVE" or (
            len(credentials) == 1 and z85.encode(credentials[0]) in self._allowed
        )
        if not known:
            self._service.count("refused_curve_key")
        status = (b"200", b"OK") if known else (b"400", b"key is not on the allow list")
        self._zap.send_multipart([version, request_id, *status, b"", b""])

    def _receive(self) -> None:
        """One message, all of its frames, whatever is wrong with it."""
        identity = self._socket.recv()
        frames = _ZmqFrames(self._socket)
        caller = self._callers.get(identity) or Caller()

        def reply(message: Sequence[bytes | memoryview]) -> None:
            with contextlib.suppress(zmq.ZMQError):  # the caller is gone
                self._socket.send_multipart([identity, *message], copy=False)

        self._service.receive(frames, caller, reply)
        frames.drain()
        if caller.nonces or caller.session is not None:
            self._callers[identity] = caller
            if len(self._callers) > SESSIONS_MAX:
                self._callers.popitem(last=False)
        else:
            self._callers.pop(identity, None)


class _ZmqFrames:
    """The frames of one message, one after the other."""

    def __init__(self, polled: zmq.Socket[bytes]) -> None:
        self._socket = polled

    def more(self) -> bool:
        return bool(self._socket.getsockopt(zmq.RCVMORE))

    def small(self) -> bytes:
        if not self.more():
            raise FrameMissing("a frame is missing")
        return self._socket.recv()

    def into(self, buffer: memoryview) -> int:
        return self._socket.recv_into(buffer) if self.more() else -1

    def drain(self) -> None:
        while self.more():
            self._socket.recv(copy=False)
