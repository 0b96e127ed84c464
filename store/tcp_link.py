"""The calling end of TCP: one connection to a peer, blocking, used by one thread at a time.

Requests of up to 4 MiB, several under way, so that the peer never waits for us. A peer that dies is seen at once
(the socket's monitor reports the broken connection), one that hangs after `stall_ns_max`. A link that failed is not
used again.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.utils.monitor

from halfmoon.store import tcp_wire as wire
from halfmoon.store.errors import BytesCorrupted, PeerUnreachable, TransferRefused, TransferTimeout
from halfmoon.store.segment import PoolView
from halfmoon.store.transport import Call, Peer, Slice, Stop

UNDER_WAY = 4
POLL_MS = 50
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_KEY_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Link:
    """Raises TransferErrors. `keys`: own CURVE key pair; `server_key`: the peer's, "" for a plain link."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        view: PoolView,
        peer: Peer,
        *,
        node_id: str,
        secret: str,
        address: str,
        server_key: str,
        keys: tuple[bytes, bytes],
        stall_ns_max: int,
    ) -> None:
        self.peer = peer
        self._view = view
        self._node_id = node_id
        self._secret = secret
        self._stall_ns_max = stall_ns_max
        self._session: wire.Session | None = None
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = -1
        self._socket.immediate = 1
        self._socket.sndhwm = 0
        self._socket.sndtimeo = 0  # with no high-water mark, a send waits only when the connection is gone
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(wire.FRAME_BYTES, view.geometry.layer_block_bytes) + 65536)
        if server_key:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
            self._socket.curve_serverkey = server_key.encode()
        events = _GONE | _KEY_REFUSED | _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self._socket.get_monitor_socket(events)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._connected = False
        self._socket.connect(address)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(linger=0)

    def broken(self) -> bool:
        """Whether an idle link's connection has ended meanwhile."""
        return bool(self._monitor.poll(0))

    def authenticate(self, stop: Stop) -> None:
        """Both ends prove that they know the secret. Raises TransferRefused when either does not."""
        while not self._connected:
            self._wait(stop, time.monotonic_ns() + self._stall_ns_max)
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self._socket.send_multipart([b"", wire.encode(wire.Greeting(nonce=nonce))])
        challenge = self._plain(stop)
        if not isinstance(challenge, wire.Challenge):
            raise TransferRefused(f"{self.peer.node_id} answers a greeting with {type(challenge).__name__}")
        nonces = nonce + challenge.nonce
        if not secrets.compare_digest(challenge.proof, wire.proof(self._secret, "server", nonces)):
            raise TransferRefused(f"{self.peer.node_id} does not know the cluster's secret")
        answer = wire.Answer(node_id=self._node_id, proof=wire.proof(self._secret, "client", nonces, self._node_id))
        self._socket.send_multipart([b"", wire.encode(answer)])
        self._session = wire.Session(wire.proof(self._secret, "session", nonces), "client")
        welcome = self._answer(stop)
        if not isinstance(welcome, wire.Welcome) or welcome.incarnation != self.peer.incarnation:
            raise PeerUnreachable(f"{self.peer.node_id} was restarted")

    def read(self, items: Sequence[Slice], call: Call, stop: Stop) -> None:
        messages = wire.split(items, self._view.geometry.layer_block_bytes)
        waiting: deque[list[Slice]] = deque()
        while True:
            while len(waiting) < UNDER_WAY and (message := next(messages, None)) is not None:
                runs = [wire.Run(item.remote_slot, item.first_layer, item.layers) for item in message]
                self._send(wire.Read(order_id=call.order_id, runs=runs))
                waiting.append(message)
            if not waiting:
                return
            chunk = self._answer(stop)
            if not isinstance(chunk, wire.Chunk):
                raise TransferRefused(f"{self.peer.node_id} answers a read with {type(chunk).__name__}")
            self._take(waiting.popleft(), chunk, stop)

    def write(self, items: Sequence[Slice], call: Call, stop: Stop) -> None:
        under_way = 0
        for message in wire.split(items, self._view.geometry.layer_block_bytes):
            stop.check()
            sums: list[int] = []
            for item in message:
                sums += wire.run_sums(self._view, item.local_slot, item.first_layer, item.layers)
            runs = [wire.Run(item.remote_slot, item.first_layer, item.layers) for item in message]
            header = wire.Write(order_id=call.order_id, party=call.party, runs=runs, sums=sums)
            self._send(header, [wire.memory(self._view, i.local_slot, i.first_layer, i.layers) for i in message])
            under_way += 1
            if under_way == UNDER_WAY:
                self._acknowledged(stop)
                under_way -= 1
        for _ in range(under_way):
            self._acknowledged(stop)

    def _take(self, message: list[Slice], chunk: wire.Chunk, stop: Stop) -> None:
        """The payload of a chunk, straight into the slots, verified."""
        sums = iter(chunk.sums)
        for item in message:
            stop.check()
            into = wire.memory(self._view, item.local_slot, item.first_layer, item.layers)
            if not self._socket.getsockopt(zmq.RCVMORE) or self._socket.recv_into(into) != len(into):
                raise TransferRefused(f"{self.peer.node_id} sent a truncated frame")
            expected = [next(sums, -1) for _ in range(item.layers)]
            if wire.run_sums(self._view, item.local_slot, item.first_layer, item.layers) != expected:
                raise BytesCorrupted(f"slot {item.remote_slot} from {self.peer.node_id} is not what was committed")

    def _acknowledged(self, stop: Stop) -> None:
        answer = self._answer(stop)
        if not isinstance(answer, wire.Ack):
            raise TransferRefused(f"{self.peer.node_id} answers a write with {type(answer).__name__}")

    def _send(self, header: wire.AnyHeader, payload: Sequence[memoryview] = ()) -> None:
        assert self._session is not None
        self._socket.send_multipart([*self._session.seal(header), *payload], copy=False)

    def _answer(self, stop: Stop) -> wire.AnyHeader:
        """The next header of the session; its payload is still to be received."""
        assert self._session is not None
        mac, raw = self._frames(stop)
        try:
            header = self._session.open(mac, raw) if mac else wire.decode(raw)
        except wire.FrameInvalid as problem:
            raise TransferRefused(f"{self.peer.node_id}: {problem}") from None
        if isinstance(header, wire.Refusal):
            kind = BytesCorrupted if header.kind == "corrupted" else TransferRefused
            raise kind(f"{self.peer.node_id}: {header.reason}")
        if not mac:
            raise TransferRefused(f"{self.peer.node_id} answers without a mac")
        return header

    def _plain(self, stop: Stop) -> wire.AnyHeader:
        _, raw = self._frames(stop)
        try:
            header = wire.decode(raw)
        except wire.FrameInvalid as problem:
            raise TransferRefused(f"{self.peer.node_id}: {problem}") from None
        if isinstance(header, wire.Refusal):
            raise TransferRefused(f"{self.peer.node_id}: {header.reason}")
        return header

    def _frames(self, stop: Stop) -> tuple[bytes, bytes]:
        stall_ns = time.monotonic_ns() + self._stall_ns_max
        while not self._wait(stop, stall_ns):
            pass
        mac = self._socket.recv()
        if not self._socket.getsockopt(zmq.RCVMORE):
            raise TransferRefused(f"{self.peer.node_id} sent a message without a header")
        return mac, self._socket.recv()

    def _wait(self, stop: Stop, stall_ns: int) -> bool:
        """Whether a message is there, within POLL_MS."""
        stop.check()
        ready = dict(self._poller.poll(POLL_MS))
        if self._socket in ready:
            return True
        if self._monitor in ready:
            event = int(zmq.utils.monitor.recv_monitor_message(self._monitor)["event"])
            if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event & _KEY_REFUSED:
                raise TransferRefused(f"{self.peer.node_id} does not allow our key")
            elif event & _HANDSHAKE_FAILED:
                raise TransferRefused(f"{self.peer.node_id} and we do not agree on encryption, or its key is another")
            else:
                raise PeerUnreachable(f"the connection to {self.peer.node_id} broke")
        elif time.monotonic_ns() >= stall_ns:
            raise TransferTimeout(f"nothing from {self.peer.node_id} for {self._stall_ns_max // 1_000_000} ms")
        return False
