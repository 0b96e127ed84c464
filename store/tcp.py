"""The transport between hosts: blocks over TCP (pyzmq), sent from the segment without a copy and received into the
slots with one.

Links are authenticated always (`tcp_wire`) and encrypted with CURVE by default between hosts; encryption halves the
speed, so that it can be chosen for each agent. A link is used for one move at a time; moves to the same peer at the
same time use several.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import zmq

from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.store import Hello
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import PeerUnreachable, TransferError, TransferRefused
from halfmoon.store.segment import PoolView
from halfmoon.store.tcp_link import Link
from halfmoon.store.tcp_server import TcpServer
from halfmoon.store.transport import Call, Gate, Peer, Slice, Stop, check_items, in_thread

LOOPBACK = "127.0.0.1"
LINK_THREADS = 8
Work = Callable[[Link, Stop], None]


class TcpTransport:
    """Implements Transport, and serves the other agents' calls."""

    def __init__(
        self, view: PoolView, gate: Gate, config: StoreConfig, *, incarnation: str, host: str, counters: Counter[str]
    ) -> None:
        self._view = view
        self._config = config
        self._host = host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = zmq.curve_keypair()
        self._executor = ThreadPoolExecutor(LINK_THREADS, thread_name_prefix="store-link")
        self._idle: dict[str, list[Link]] = defaultdict(list)
        self._running: set[Stop] = set()
        self._closed = False
        self.endpoints: list[Endpoint] = []
        self._server = TcpServer(
            self._context,
            view,
            gate,
            secret=config.cluster_secret,
            incarnation=incarnation,
            keys=self._keys,
            counters=counters,
        )

    def start(self) -> None:
        """Listens. With encryption "auto" there is a plain socket besides, for this host alone. Raises
        TransferError.
        """
        config = self._config
        kinds = {"always": [True], "never": [False], "auto": [True, False]}[config.encryption]
        for encrypted in kinds:
            main = encrypted is kinds[0]
            try:
                bound = self._server.listen(
                    config.bind if main else LOOPBACK, config.port if main else 0, encrypted=encrypted
                )
            except zmq.ZMQError as problem:
                raise TransferError(f"cannot listen on {config.bind}:{config.port}: {problem}") from None
            host, _, port = bound.removeprefix("tcp://").rpartition(":")
            if main and config.advertise:
                host = config.advertise
            key = self._keys[0].decode() if encrypted else ""
            self.endpoints.append(Endpoint(transport="tcp", address=f"tcp://{host}:{port}", public_key=key))
        self._server.start()

    @property
    def public_key(self) -> str:
        """The CURVE key (z85) under which this agent calls others, whatever it serves itself."""
        return self._keys[0].decode()

    def allow(self, hello: Hello) -> None:
        """A genuine hello names the key under which its agent will call."""
        for key in {hello.public_key, *(endpoint.public_key for endpoint in hello.endpoints)} - {""}:
            self._server.allow(key)

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        await self._move(peer, items, call, lambda link, stop: link.read(items, call, stop))

    async def write(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        await self._move(peer, items, call, lambda link, stop: link.write(items, call, stop))

    def forget(self, node_id: str) -> None:
        for link in self._idle.pop(node_id, []):
            link.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stop in self._running:
            stop.tell()
        self._executor.shutdown(wait=True)
        for node_id in list(self._idle):
            self.forget(node_id)
        self._server.close()
        self._context.destroy(linger=0)

    async def _move(self, peer: Peer, items: Sequence[Slice], call: Call, work: Work) -> None:
        if self._closed:
            raise TransferError("the transport is closed")
        check_items(self._view.geometry, peer.geometry, items)
        endpoint = self._endpoint(peer)
        stop = Stop(call)
        stop.check()
        self._running.add(stop)
        try:
            await in_thread(self._executor, functools.partial(self._run, peer, endpoint, work, stop), stop)
        finally:
            self._running.discard(stop)

    def _run(self, peer: Peer, endpoint: Endpoint, work: Work, stop: Stop) -> None:
        """In a thread: on an idle link or a new one, which is idle again afterwards if it did not fail."""
        link: Link | None = None
        with contextlib.suppress(IndexError):
            while link is None:
                link = self._idle[peer.node_id].pop()
                if link.peer.incarnation != peer.incarnation or link.broken():
                    link.close()
                    link = None
        try:
            if link is None:
                link = self._connect(peer, endpoint)
                link.authenticate(stop)
            work(link, stop)
        except zmq.ZMQError as problem:
            if link is not None:
                link.close()
            raise PeerUnreachable(f"{peer.node_id}: {problem}") from None
        except BaseException:
            if link is not None:
                link.close()
            raise
        if self._closed:
            link.close()
        else:
            self._idle[peer.node_id].append(link)

    def _connect(self, peer: Peer, endpoint: Endpoint) -> Link:
        return Link(
            self._context,
            self._view,
            peer,
            node_id=self._config.node_id,
            secret=self._config.cluster_secret,
            address=endpoint.address,
            server_key=endpoint.public_key,
            keys=self._keys,
            stall_ns_max=self._config.stall_ns_max,
        )

    def _endpoint(self, peer: Peer) -> Endpoint:
        """Raises TransferRefused when the two agents do not agree on encryption."""
        offered = [at for at in peer.endpoints if at.transport == "tcp"]
        plain = self._config.encryption == "never" or (self._config.encryption == "auto" and peer.host == self._host)
        for endpoint in offered:
            if bool(endpoint.public_key) != plain:
                return endpoint
        for endpoint in offered:  # encrypted although it need not be
            if endpoint.public_key and self._config.encryption == "auto":
                return endpoint
        wanted = "plain" if plain else "encrypted"
        raise TransferRefused(
            f"{peer.node_id} offers no {wanted} link, and encryption is {self._config.encryption!r} here"
        )
