"""The receiving end of encrypted TCP links: one thread for all of them, and a pyzmq ROUTER.

The caller's CURVE key must be on the allow list (ZAP) before a byte of its messages is looked at. Until a connection
has sent its first message, which needs such a key, it is a stranger (`admission`): one of a few at a time, and not for
long.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import zmq
import zmq.utils.monitor
from zmq.utils import z85

from halfmoon.store.pool.segment import PoolView
from halfmoon.store.transports.tcp.admission import ADMISSION_S, Admission
from halfmoon.store.transports.tcp.channel import FrameMissing
from halfmoon.store.transports.tcp.service import Caller, TcpService
from halfmoon.store.transports.tcp.wire import frame_bytes_max

#: Callers whose sessions are kept; the one that was silent for longest goes first.
SESSIONS_MAX = 1024
#: Answers that wait for a caller to read them. It asks for a few at a time; answers beyond that are not sent.
UNREAD_MAX = 64


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
        self._own_key = keys[0]
        #: By node: of an agent that restarted only the new keys.
        self._allowed: dict[str, frozenset[bytes]] = {}
        self._admission: Admission[int] = Admission()
        self._ports: set[int] = set()
        self._callers: OrderedDict[bytes, Caller] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._stop = context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = UNREAD_MAX
        self._socket.sndtimeo = 0
        self._socket.rcvhwm = 64
        self._socket.router_mandatory = 1
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(ADMISSION_S * 1000))
        self._socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max(view))
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys[1]
        self._socket.zap_domain = b"halfmoon"
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def listen(self, host: str, port: int) -> str:
        """Binds; the address. Raises zmq.ZMQError (port taken, no such address)."""
        self._socket.bind(f"tcp://{host}:{port or '*'}")
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._ports.add(int(bound.rpartition(":")[2]))
        return bound

    def start(self) -> None:
        """Serves the bound socket, which from here on is the serving thread's alone."""
        self._thread = threading.Thread(target=self._run, name="store-curve", daemon=True)
        self._thread.start()

    def allow(self, node_id: str, public_keys: Iterable[str]) -> None:
        """Puts the CURVE keys of a node's agent on the list, in place of those that the node had."""
        self._allowed[node_id] = frozenset(key.encode() for key in public_keys)

    def close(self) -> None:
        """Ends the thread and closes its sockets."""
        if self._thread is not None:
            teller = self._context.socket(zmq.PAIR)
            teller.connect("inproc://stop")
            teller.send(b"")
            self._thread.join()
            teller.close(linger=0)
        self._socket.disable_monitor()
        for closing in (self._zap, self._stop, self._socket):
            closing.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for polled in (self._zap, self._stop, self._monitor, self._socket):
            poller.register(polled, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                return
            if self._monitor in ready:
                self._connection_changed()
            if self._zap in ready:
                self._judge_key()
            if self._socket in ready:
                self._receive()

    def _judge_key(self) -> None:
        """ZAP, RFC 27: version, request id, domain, address, identity, mechanism, credentials."""
        version, request_id, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism != b"CURVE" or (
            len(credentials) == 1 and self._is_allowed(z85.encode(credentials[0]))
        )
        if not known:
            self._service.count("refused_curve_key")
        status = (b"200", b"OK") if known else (b"400", b"key is not on the allow list")
        self._zap.send_multipart([version, request_id, *status, b"", b""])

    def _is_allowed(self, key: bytes) -> bool:
        return key == self._own_key or any(key in keys for keys in list(self._allowed.values()))

    def _connection_changed(self) -> None:
        """A stranger came, for which another one may have to go; or a connection ended."""
        event = zmq.utils.monitor.recv_monitor_message(self._monitor)
        number = int(event["value"])
        if event["event"] != zmq.EVENT_ACCEPTED:
            self._admission.leave(number)
            return
        with contextlib.suppress(OSError), self._connection(number) as connection:
            if connection.getsockname()[1] not in self._ports:
                return  # it has ended already, and its number is another's
            gone = self._admission.enter(number, connection.getpeername()[0])
            if gone is not None:
                self._service.count("refused_stranger")
                with self._connection(gone) as longest:
                    # Its socket is pyzmq's, which sees that the connection ended.
                    if longest.getsockname()[1] in self._ports:
                        longest.shutdown(socket.SHUT_RDWR)

    def _connection(self, number: int) -> socket.socket:
        """The connection of this file descriptor, by a descriptor of our own. Raises OSError."""
        return socket.socket(fileno=os.dup(number))

    def _receive(self) -> None:
        """One message, all of its frames, whatever is wrong with it."""
        first = self._socket.recv(copy=False)
        self._admission.leave(int(first.get(zmq.SRCFD)))
        identity = first.bytes
        frames = _ZmqFrames(self._socket)
        caller = self._callers.get(identity) or Caller()

        def reply(message: Sequence[bytes | memoryview]) -> None:
            with contextlib.suppress(zmq.ZMQError):  # the caller is gone
                self._socket.send_multipart([identity, *message], copy=False)

        self._service.receive(frames, caller, reply)
        frames.drain()
        if caller.nonces or caller.session is not None:
            self._callers[identity] = caller
            self._callers.move_to_end(identity)
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
