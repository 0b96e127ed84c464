"""The transport between hosts: blocks over TCP, sent from the segment and received into the slots without a
copy of our own.

Both ends of a link prove by TLS that they know the cluster's secret, always; by default, links between hosts are
encrypted too (`streams`). A link is used for one move at a time; moves to the same peer at the same time use several.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from halfmoon.schemas.events import Endpoint
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
from halfmoon.store.transports.tcp.channel import StallTimer, TcpChannel
from halfmoon.store.transports.tcp.link import TcpLink
from halfmoon.store.transports.tcp.options import TcpOptions
from halfmoon.store.transports.tcp.server import TcpServer
from halfmoon.store.transports.tcp.service import TcpService
from halfmoon.store.transports.tcp.streams import (
    ConnectionBroken,
    HandshakeRefused,
    connected,
    shaken_hands,
)
from halfmoon.store.transports.tcp.wire import RUNS_PER_MESSAGE, Session, frame_bytes_max
from halfmoon.store.transports.topology import Topology

LINK_THREADS = 8
#: Up to here a move is one exchange on the event loop, beyond it is for a thread.
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
        self._executor = ThreadPoolExecutor(LINK_THREADS, thread_name_prefix="store-link")
        #: By node: for moves in a thread, and for exchanges on the event loop.
        self._idle: dict[str, deque[TcpLink]] = defaultdict(deque)
        self._watched: dict[str, deque[TcpLink]] = defaultdict(deque)
        self._running: set[Cancellation] = set()
        self._closed = False
        self.endpoints: list[Endpoint] = []
        service = TcpService(
            view,
            pool.access,
            incarnation=pool.incarnation,
            counters=pool.counters,
        )
        self._server = TcpServer(view, service, options)

    def start(self) -> None:
        """Listens. Raises TransferError."""
        options = self._options
        for address in filter(None, (each.strip() for each in options.bind.split(","))):
            try:
                bound = self._server.listen(address, options.port)
            except OSError as problem:
                raise TransferError(f"cannot listen on {address}:{options.port}: {problem}") from None
            host, _, port = bound.removeprefix("tcp://").rpartition(":")
            reached_at = options.advertise or host
            distance = self._topology.distance_of_address(reached_at)
            self.endpoints.append(
                Endpoint(transport="tcp", address=f"tcp://{reached_at}:{port}", distance=distance)
            )
        self._server.start()

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        if not await self._small(peer, items, call, reading=True):
            await self._move(peer, items, call, lambda link, timer: link.read(items, call, timer))

    async def write(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        if not await self._small(peer, items, call, reading=False):
            await self._move(peer, items, call, lambda link, timer: link.write(items, call, timer))

    def forget(self, node_id: str) -> None:
        for link in (*self._idle.pop(node_id, ()), *self._watched.pop(node_id, ())):
            link.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for cancellation in self._running:
            cancellation.cancel()
        self._executor.shutdown(wait=True)
        for node_id in [*self._idle, *self._watched]:
            self.forget(node_id)
        self._server.close()

    # --- a few KiB ------------------------------------------------------------------------------------------

    async def _small(self, peer: Peer, items: Sequence[Slice], call: Call, *, reading: bool) -> bool:
        """True when the move was made here: it is small, and an idle link is there."""
        if self._closed or len(items) > RUNS_PER_MESSAGE:
            return False
        check_items(self._view.geometry, peer.geometry, items)
        if not items or moved_bytes(items, peer.geometry.layer_block_bytes) > SMALL_BYTES:
            return False
        endpoint = self._endpoint(peer)
        link = _taken(self._watched[peer.node_id], peer, endpoint)
        if link is None:
            link = _taken(self._idle[peer.node_id], peer, endpoint)
            if link is None:
                return False
            link.watch()
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
        self._put(self._watched, link)
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
        link = _taken(self._idle[peer.node_id], peer, endpoint)
        timer = StallTimer(cancellation, self._options.stall_ns_max, peer.node_id)
        try:
            if link is None:
                link = self._connect(peer, endpoint, timer)
                link.enter(timer)
            work(link, timer)
        except ConnectionBroken as problem:
            if link is not None:
                link.close()
            raise HolderUnreachable(f"{peer.node_id}: {problem}") from None
        except BaseException:
            if link is not None:
                link.close()
            raise
        self._put(self._idle, link)

    def _put(self, links: dict[str, deque[TcpLink]], link: TcpLink) -> None:
        if self._closed:
            link.close()
        else:
            links[link.peer.node_id].append(link)

    def _connect(self, peer: Peer, endpoint: Endpoint, timer: StallTimer) -> TcpLink:
        options = self._options
        timer.check()
        connection = connected(endpoint.address, options.stall_ns_max / 1e9)
        try:
            stream = shaken_hands(
                connection,
                options.cluster_secret,
                timer,
                server=False,
                protection=options.protection(same_host=peer.host == self._host),
            )
        except HandshakeRefused as problem:
            connection.close()
            raise TransferRefused(f"{peer.node_id}: {problem}") from None
        except BaseException:
            connection.close()
            raise
        channel = TcpChannel(stream, frame_bytes_max=frame_bytes_max(self._view))
        session = Session(stream.key, "client")
        return TcpLink(channel, session, self._view, peer, endpoint.address)

    def usable_endpoints(self, peer: Peer) -> list[Endpoint]:
        return [at for at in peer.endpoints if at.transport == "tcp"]

    def _endpoint(self, peer: Peer) -> Endpoint:
        """Raises TransferRefused: the peer has no TCP."""
        for endpoint in self.usable_endpoints(peer):
            return endpoint
        raise TransferRefused(f"{peer.node_id} offers no TCP")


def _taken(links: deque[TcpLink], peer: Peer, endpoint: Endpoint) -> TcpLink | None:
    """One of these idle links, to this endpoint of this incarnation. (`popleft` and `append` of a deque are atomic.)"""
    for _ in range(len(links)):
        try:
            link = links.popleft()
        except IndexError:
            break
        if link.peer.incarnation != peer.incarnation or link.broken():
            link.close()
        elif link.address != endpoint.address:
            links.append(link)
        else:
            return link
    return None
