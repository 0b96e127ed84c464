"""The transport between hosts: blocks over TCP, sent from the segment and received into the slots without a
copy of our own.

Links are authenticated always (`wire`) and encrypted with CURVE by default between hosts; encryption
halves the speed, so that it can be chosen for each agent. A link is used for one move at a time; moves to the
same peer at the same time use several.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import zmq

from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.store import Hello
from halfmoon.store.errors import HolderUnreachable, TransferError, TransferRefused
from halfmoon.store.transports.base import (
    Call,
    Cancellation,
    Peer,
    ServedPool,
    Slice,
    TransportKind,
    check_items,
    in_thread,
    moved_bytes,
)
from halfmoon.store.transports.tcp.channel import ConnectionBroken, CurveChannel, PlainChannel, StallTimer
from halfmoon.store.transports.tcp.curve import CurveServer
from halfmoon.store.transports.tcp.link import TcpLink
from halfmoon.store.transports.tcp.options import TcpOptions
from halfmoon.store.transports.tcp.server import PlainServer
from halfmoon.store.transports.tcp.service import TcpService
from halfmoon.store.transports.tcp.wire import RUNS_PER_MESSAGE, frame_bytes_max
from halfmoon.store.transports.topology import Topology

LOOPBACK = "127.0.0.1"
LINK_THREADS = 8
#: Up to here a move is one exchange on the event loop (some 60 µs), beyond it is for a thread.
SMALL_BYTES = 32 * 1024
Work = Callable[[TcpLink, StallTimer], None]


class TcpTransport:
    """Implements Transport, and serves the other agents' calls."""

    kind = TransportKind("tcp", rank=2, assumed_bytes_s=1.5e9)

    def __init__(
        self,
        pool: ServedPool,
        options: TcpOptions,
        *,
        host: str,
        topology: Topology | None = None,
    ) -> None:
        """`host`: an id of this machine (`segment.host_id`). `topology` gives the distances of the NICs."""
        self._view = view = pool.view
        self._options = options
        self._topology = topology or Topology()
        self._host = host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = zmq.curve_keypair()
        self._executor = ThreadPoolExecutor(LINK_THREADS, thread_name_prefix="store-link")
        self._idle: dict[str, deque[TcpLink]] = defaultdict(deque)
        self._running: set[Cancellation] = set()
        self._closed = False
        self.endpoints: list[Endpoint] = []
        service = TcpService(
            view,
            pool.access,
            secret=options.cluster_secret,
            incarnation=pool.incarnation,
            counters=pool.counters,
        )
        self._plain = PlainServer(
            view, service, stall_ns_max=options.stall_ns_max, message_ns_max=options.transfer_ns_max
        )
        self._curve = CurveServer(self._context, view, service, self._keys)

    def start(self) -> None:
        """Listens. With encryption "auto" there is a plain socket besides, for this host alone. Raises
        TransferError.
        """
        options = self._options
        kinds = {"always": [True], "never": [False], "auto": [True, False]}[options.encryption]
        for encrypted in kinds:
            main = encrypted is kinds[0]
            for address in options.bind.split(",") if main else [LOOPBACK]:
                self._listen(
                    address.strip(), options.port if main else 0, encrypted, options.advertise if main else ""
                )
        self._plain.start()
        self._curve.start()

    def _listen(self, address: str, port: int, encrypted: bool, advertise: str) -> None:
        server = self._curve if encrypted else self._plain
        try:
            bound = server.listen(address, port)
        except (zmq.ZMQError, OSError) as problem:
            raise TransferError(f"cannot listen on {address}:{port}: {problem}") from None
        host, _, port_bound = bound.removeprefix("tcp://").rpartition(":")
        key = self._keys[0].decode() if encrypted else ""
        reached_at = advertise or host
        self.endpoints.append(
            Endpoint(
                transport="tcp",
                address=f"tcp://{reached_at}:{port_bound}",
                public_key=key,
                distance=self._topology.distance_of_address(reached_at),
            )
        )

    @property
    def public_key(self) -> str:
        """The CURVE key (z85) under which this agent calls others, whatever it serves itself."""
        return self._keys[0].decode()

    def admit(self, hello: Hello) -> None:
        """A genuine hello names the key under which its agent will call."""
        keys = {hello.public_key, *(endpoint.public_key for endpoint in hello.endpoints)}
        self._curve.allow(hello.node_id, keys - {""})

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        if not await self._small(peer, items, call, reading=True):
            await self._move(peer, items, call, lambda link, timer: link.read(items, call, timer))

    async def write(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        if not await self._small(peer, items, call, reading=False):
            await self._move(peer, items, call, lambda link, timer: link.write(items, call, timer))

    def forget(self, node_id: str) -> None:
        for link in self._idle.pop(node_id, ()):
            link.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for cancellation in self._running:
            cancellation.cancel()
        self._executor.shutdown(wait=True)
        for node_id in list(self._idle):
            self.forget(node_id)
        self._plain.close()
        self._curve.close()
        self._context.destroy(linger=0)

    # --- a few KiB ------------------------------------------------------------------------------------------

    async def _small(self, peer: Peer, items: Sequence[Slice], call: Call, *, reading: bool) -> bool:
        """True when the move was made here: it is small, and an idle plain link is there."""
        if self._closed or len(items) > RUNS_PER_MESSAGE:
            return False
        check_items(self._view.geometry, peer.geometry, items)
        if not items or moved_bytes(items, peer.geometry.layer_block_bytes) > SMALL_BYTES:
            return False
        link = self._take_idle(peer, self._endpoint(peer))
        if link is None or not link.can_exchange():
            if link is not None:
                self._idle[peer.node_id].append(link)
            return False
        cancellation = Cancellation(call)
        self._running.add(cancellation)
        try:
            cancellation.check()
            timer = StallTimer(cancellation, self._options.stall_ns_max, peer.node_id)
            await link.exchange(list(items), call, timer, reading=reading)
        except BaseException as problem:
            link.close()
            if isinstance(problem, ConnectionBroken):
                raise HolderUnreachable(f"{peer.node_id}: {problem}") from None
            raise
        finally:
            self._running.discard(cancellation)
        self._put_idle(link)
        return True

    # --- in a thread ----------------------------------------------------------------------------------------

    async def _move(self, peer: Peer, items: Sequence[Slice], call: Call, work: Work) -> None:
        if self._closed:
            raise TransferError("the transport is closed")
        check_items(self._view.geometry, peer.geometry, items)
        endpoint = self._endpoint(peer)
        cancellation = Cancellation(call)
        cancellation.check()
        self._running.add(cancellation)
        try:
            await in_thread(
                self._executor, functools.partial(self._run, peer, endpoint, work, cancellation), cancellation
            )
        finally:
            self._running.discard(cancellation)

    def _run(self, peer: Peer, endpoint: Endpoint, work: Work, cancellation: Cancellation) -> None:
        """On an idle link or a new one, which is idle again afterwards if it did not fail."""
        link = self._take_idle(peer, endpoint)
        timer = StallTimer(cancellation, self._options.stall_ns_max, peer.node_id)
        try:
            if link is None:
                link = self._connect(peer, endpoint, timer)
                link.authenticate(self._options.node_id, self._options.cluster_secret, timer)
            work(link, timer)
        except (zmq.ZMQError, ConnectionBroken) as problem:
            if link is not None:
                link.close()
            raise HolderUnreachable(f"{peer.node_id}: {problem}") from None
        except BaseException:
            if link is not None:
                link.close()
            raise
        self._put_idle(link)

    def _take_idle(self, peer: Peer, endpoint: Endpoint) -> TcpLink | None:
        """An idle link to this endpoint of this incarnation. (Of a deque, `popleft` and `append` are atomic.)"""
        idle = self._idle[peer.node_id]
        for _ in range(len(idle)):
            try:
                link = idle.popleft()
            except IndexError:
                break
            if link.peer.incarnation != peer.incarnation or link.broken():
                link.close()
            elif link.address != endpoint.address:
                idle.append(link)
            else:
                return link
        return None

    def _put_idle(self, link: TcpLink) -> None:
        if self._closed:
            link.close()
        else:
            self._idle[link.peer.node_id].append(link)

    def _connect(self, peer: Peer, endpoint: Endpoint, timer: StallTimer) -> TcpLink:
        longest = frame_bytes_max(self._view)
        if not endpoint.public_key:
            timeout_s = self._options.stall_ns_max / 1e9
            plain = PlainChannel.connect(
                endpoint.address, timer, frame_bytes_max=longest, timeout_s=timeout_s
            )
            return TcpLink(plain, self._view, peer, endpoint.address)
        curve = CurveChannel(
            self._context,
            endpoint.address,
            peer=peer.node_id,
            server_key=endpoint.public_key,
            keys=self._keys,
            frame_bytes_max=longest,
        )
        try:
            curve.handshake(timer)
        except BaseException:
            curve.close()
            raise
        return TcpLink(curve, self._view, peer, endpoint.address)

    def usable_endpoints(self, peer: Peer) -> list[Endpoint]:
        # Where the two ends do not agree on encryption one endpoint stays, so that the call fails with that reason.
        return self._agreed_endpoints(peer) or _offered(peer)[:1]

    def _agreed_endpoints(self, peer: Peer) -> list[Endpoint]:
        """The peer's endpoints on which both ends agree on encryption."""
        offered = _offered(peer)
        right = [at for at in offered if bool(at.public_key) != self._goes_plain(peer)]
        if not right and self._options.encryption == "auto":  # encrypted although it need not be
            right = [at for at in offered if at.public_key]
        return right

    def _goes_plain(self, peer: Peer) -> bool:
        return self._options.encryption == "never" or (
            self._options.encryption == "auto" and peer.host == self._host
        )

    def _endpoint(self, peer: Peer) -> Endpoint:
        """Raises TransferRefused when the two agents do not agree on encryption."""
        for endpoint in self._agreed_endpoints(peer):
            return endpoint
        wanted = "plain" if self._goes_plain(peer) else "encrypted"
        raise TransferRefused(
            f"{peer.node_id} offers no {wanted} link, and encryption is {self._options.encryption!r} here"
        )


def _offered(peer: Peer) -> list[Endpoint]:
    return [at for at in peer.endpoints if at.transport == "tcp"]
