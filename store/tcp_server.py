"""The receiving end of TCP: one thread, one ROUTER socket for each kind of link (CURVE, plain), plain pyzmq.

Nobody is served who has not proved that he knows the cluster's secret; on a CURVE link his key must be on the allow
list besides (ZAP). Every write is checked against the book before a byte of it reaches a slot: right order,
reserved slots, exact sizes. What is refused is answered with a reason and counted (`refused_…`).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from halfmoon.store import tcp_wire as wire
from halfmoon.store.segment import PoolView
from halfmoon.store.transport import Gate

SESSIONS_MAX = 1024


@dataclass(slots=True)
class Caller:
    """One connection."""

    nonces: bytes
    node_id: str = ""
    session: wire.Session | None = None


@dataclass(frozen=True, slots=True)
class Listening:
    """`address`: as bound, `tcp://host:port`. `encrypted`: CURVE with the agent's key."""

    socket: zmq.Socket[bytes]
    address: str
    encrypted: bool
    callers: OrderedDict[bytes, Caller] = field(default_factory=OrderedDict)


class Refuse(Exception):
    """`name` counts it, the text is the answer."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


class TcpServer:
    """Serves reads and writes of the pool to authenticated peers, in a thread of its own."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        view: PoolView,
        gate: Gate,
        *,
        secret: str,
        incarnation: str,
        keys: tuple[bytes, bytes],
        counters: Counter[str],
    ) -> None:
        self._context = context
        self._view = view
        self._gate = gate
        self._secret = secret
        self._incarnation = incarnation
        self._keys = keys
        self._counters = counters
        self._allowed: frozenset[bytes] = frozenset({keys[0]})
        self._listening: list[Listening] = []
        self._thread: threading.Thread | None = None
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._stop = context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")

    def listen(self, host: str, port: int, *, encrypted: bool) -> str:
        """Binds; the address. Raises zmq.ZMQError (port taken, no such address)."""
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.sndhwm = 0  # what is sent is not copied, and callers ask for little at a time
        socket.rcvhwm = 64
        socket.router_mandatory = 1
        layer_bytes = self._view.geometry.layer_block_bytes
        socket.setsockopt(zmq.MAXMSGSIZE, max(wire.FRAME_BYTES, layer_bytes) + 65536)
        if encrypted:
            socket.curve_server = True
            socket.curve_secretkey = self._keys[1]
            socket.zap_domain = b"halfmoon"
        socket.bind(f"tcp://{host}:{port or '*'}")
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._listening.append(Listening(socket, address, encrypted))
        return address

    def allow(self, public_key: str) -> None:
        """Puts a CURVE key on the list."""
        self._allowed = self._allowed | {public_key.encode()}

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="store-tcp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes its sockets."""
        if self._thread is not None:
            teller = self._context.socket(zmq.PAIR)
            teller.connect("inproc://stop")
            teller.send(b"")
            self._thread.join()
            teller.close(linger=0)
        for socket in [self._zap, self._stop, *(at.socket for at in self._listening)]:
            socket.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._zap, self._stop, *(at.socket for at in self._listening)):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                return
            if self._zap in ready:
                self._judge_key()
            for listening in self._listening:
                if listening.socket in ready:
                    self._receive(listening)

    def _judge_key(self) -> None:
        """ZAP, RFC 27: version, request id, domain, address, identity, mechanism, credentials."""
        version, request_id, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism != b"CURVE" or (len(credentials) == 1 and z85.encode(credentials[0]) in self._allowed)
        if not known:
            self._counters["refused_curve_key"] += 1
        status = (b"200", b"OK") if known else (b"400", b"key is not on the allow list")
        self._zap.send_multipart([version, request_id, *status, b"", b""])

    def _receive(self, listening: Listening) -> None:
        """One message, all of its frames, whatever is wrong with it."""
        socket = listening.socket
        identity = socket.recv()
        frames = _Frames(socket)
        caller = listening.callers.get(identity)
        try:
            mac, raw = frames.small(), frames.small()
            if caller is None or caller.session is None:
                self._admit(listening, identity, caller, wire.decode(raw))
                return
            header = caller.session.open(mac, raw)
            match header:
                case wire.Read():
                    self._read(socket, identity, caller.session, header)
                case wire.Write():
                    self._write(header, frames)
                    self._send(socket, identity, caller.session.seal(wire.Ack()))
                case _:
                    raise Refuse("malformed", f"{type(header).__name__} is no request")
        except (Refuse, wire.FrameInvalid) as problem:
            name = problem.name if isinstance(problem, Refuse) else "malformed"
            if name == "malformed" and caller is not None and caller.session is not None:
                del listening.callers[identity]
                caller = None
            self._counters[f"refused_{name}"] += 1
            refusal = wire.Refusal(reason=str(problem), kind="corrupted" if name == "corrupted" else "refused")
            sealed = caller.session.seal(refusal) if caller and caller.session else (b"", wire.encode(refusal))
            self._send(socket, identity, sealed)
        finally:
            frames.drain()

    def _admit(self, listening: Listening, identity: bytes, caller: Caller | None, header: wire.AnyHeader) -> None:
        match header:
            case wire.Greeting(nonce=nonce) if len(nonce) == wire.NONCE_BYTES:
                nonces = nonce + secrets.token_bytes(wire.NONCE_BYTES)
                listening.callers[identity] = Caller(nonces)
                if len(listening.callers) > SESSIONS_MAX:
                    listening.callers.popitem(last=False)
                mine = wire.proof(self._secret, "server", nonces)
                challenge = wire.Challenge(nonce=nonces[wire.NONCE_BYTES :], proof=mine)
                self._send(listening.socket, identity, (b"", wire.encode(challenge)))
            case wire.Answer(node_id=node_id, proof=theirs) if caller is not None:
                expected = wire.proof(self._secret, "client", caller.nonces, node_id)
                if not secrets.compare_digest(theirs, expected):
                    del listening.callers[identity]
                    raise Refuse("wrong_secret", "the cluster's secret is another")
                caller.node_id = node_id
                caller.session = wire.Session(wire.proof(self._secret, "session", caller.nonces), "server")
                welcome = caller.session.seal(wire.Welcome(incarnation=self._incarnation))
                self._send(listening.socket, identity, welcome)
            case _:
                raise Refuse("unauthenticated", "authenticate first")

    def _read(self, socket: zmq.Socket[bytes], identity: bytes, session: wire.Session, header: wire.Read) -> None:
        self._check_runs(header.runs)
        if reason := self._gate.begin_read(header.order_id, [run.slot for run in header.runs]):
            raise Refuse("no_lease", reason)
        sums: list[int] = []
        for run in header.runs:
            sums += self._view.sums[run.slot, run.first_layer : run.first_layer + run.layers].tolist()
        payload = [wire.memory(self._view, run.slot, run.first_layer, run.layers) for run in header.runs]
        self._counters["tcp_read_bytes"] += sum(map(len, payload))
        self._send(socket, identity, session.seal(wire.Chunk(sums=sums)), payload)

    def _write(self, header: wire.Write, frames: _Frames) -> None:
        self._check_runs(header.runs)
        if len(header.sums) != sum(run.layers for run in header.runs):
            raise Refuse("malformed_write", "as many checksums as layers, please")
        slots = [run.slot for run in header.runs]
        if reason := self._gate.begin_write(header.order_id, header.party, slots):
            raise Refuse("no_reservation", reason)
        try:
            sums = iter(header.sums)
            for run in header.runs:
                into = wire.memory(self._view, run.slot, run.first_layer, run.layers)
                frames.into(into)
                self._counters["tcp_written_bytes"] += len(into)
                expected = [next(sums) for _ in range(run.layers)]
                if wire.run_sums(self._view, run.slot, run.first_layer, run.layers) != expected:
                    raise Refuse("corrupted", f"slot {run.slot} is not what was sent")
            if frames.more():
                raise Refuse("wrong_size", "more payload than was announced")
        finally:
            self._gate.end_write(header.order_id, header.party)

    def _check_runs(self, runs: Sequence[wire.Run]) -> None:
        at = self._view.geometry
        for run in runs:
            inside = 0 <= run.slot < at.slots and run.first_layer >= 0 and run.layers >= 1
            if not inside or run.first_layer + run.layers > at.layers:
                raise Refuse("outside", f"slot {run.slot}, layers {run.first_layer}+{run.layers} outside of the pool")

    def _send(
        self,
        socket: zmq.Socket[bytes],
        identity: bytes,
        sealed: tuple[bytes, bytes],
        payload: Sequence[memoryview] = (),
    ) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the caller is gone
            socket.send_multipart([identity, *sealed, *payload], copy=False)


class _Frames:
    """The frames of one message, one after the other."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def more(self) -> bool:
        return bool(self._socket.getsockopt(zmq.RCVMORE))

    def small(self) -> bytes:
        if not self.more():
            raise Refuse("malformed", "a frame is missing")
        return self._socket.recv()

    def into(self, buffer: memoryview) -> None:
        """Exactly this many bytes. Raises Refuse."""
        if not self.more():
            raise Refuse("wrong_size", "payload is missing")
        size = self._socket.recv_into(buffer)
        if size != len(buffer):
            raise Refuse("wrong_size", f"a frame of {size} bytes where {len(buffer)} were due")

    def drain(self) -> None:
        while self.more():
            self._socket.recv(copy=False)
