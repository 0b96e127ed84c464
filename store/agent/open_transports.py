"""The one list of transports: each is opened here, and nothing else of the agent knows a transport by name."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from halfmoon.schemas.events import Endpoint, TransportName
from halfmoon.schemas.store import QueuePair
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import TransferError, TransferRefused
from halfmoon.store.pool.segment import host_id
from halfmoon.store.transports.base import Peer, ServedPool, Transport, TransportAbsent
from halfmoon.store.transports.engine import TransferEngine, TransferStats
from halfmoon.store.transports.rdma.transport import Exchange, RdmaTransport
from halfmoon.store.transports.shm import ShmTransport
from halfmoon.store.transports.tcp.transport import TcpTransport
from halfmoon.store.transports.topology import Topology, read_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSite:
    """The node that a transport is opened on, as far as a transport needs it."""

    config: StoreConfig
    pool: ServedPool
    executor: Executor
    #: Asks an agent to connect a queue pair; raises StoreError.
    exchange: Exchange
    topology: Topology = field(default_factory=Topology)


def open_shm(site: TransportSite) -> ShmTransport:
    return ShmTransport(site.pool.view, site.executor, host=host_id())


def open_tcp(site: TransportSite) -> TcpTransport:
    """Raises TransferError: a port is taken."""
    if site.config.data_port < 0:
        raise TransportAbsent("there is no data port")
    transport = TcpTransport(site.pool, site.config.tcp_options, host=host_id(), topology=site.topology)
    transport.start()
    return transport


def open_rdma(site: TransportSite) -> RdmaTransport:
    # A device's registered memory and queue pairs are dear: it is opened only where it may be called over.
    if site.config.transport not in ("auto", "rdma"):
        raise TransportAbsent(f"transport is {site.config.transport}")
    return RdmaTransport(site.pool, site.config.rdma_options, site.executor, exchange=site.exchange)


#: An opener raises TransportAbsent where its transport is not available.
OPENERS: Mapping[TransportName, Callable[[TransportSite], Transport]] = {
    "shm": open_shm,
    "tcp": open_tcp,
    "rdma": open_rdma,
}


class OpenTransports:
    """The transports of an agent: none until `open`."""

    def __init__(self) -> None:
        self._open: dict[TransportName, Transport] = {}
        self._engine: TransferEngine | None = None
        #: Name of a transport, and why it is not there.
        self.absent: dict[str, str] = {}

    async def open(self, site: TransportSite) -> None:
        """Opens each transport of the list. Raises TransferError: a port is taken, or a forced transport is absent."""
        topology = await asyncio.to_thread(read_topology, site.config.topology)
        site = dataclasses.replace(site, topology=topology)
        forced = site.config.transport
        for name, opener in OPENERS.items():
            try:
                self._open[name] = opener(site)
            except TransportAbsent as problem:
                self.absent[name] = str(problem)
                if forced == name:
                    raise TransferError(f"{name.upper()} is not to be had: {problem}") from None
        # All of them serve the peers; only the forced one, where one is forced, is called over.
        calling = [transport for name, transport in self._open.items() if forced in ("auto", name)]
        self._engine = TransferEngine(calling, stripes=site.config.stripe_count, counters=site.pool.counters)

    async def close(self) -> None:
        for transport in self._open.values():
            await transport.close()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where peers reach this node."""
        return [at for transport in self._open.values() for at in transport.endpoints]

    @property
    def stats(self) -> Mapping[tuple[str, str], TransferStats]:
        """By transport and direction."""
        return self._engine.stats if self._engine is not None else {}

    def engine_for(self, peer: Peer) -> TransferEngine:
        """Raises HolderUnreachable when there is no common transport."""
        assert self._engine is not None, "the transports are not open"
        self._engine.paths(peer)
        return self._engine

    def forget(self, node_id: str) -> None:
        """Lets go of connections and mappings of a peer that is gone or restarted."""
        for transport in self._open.values():
            transport.forget(node_id)

    def accept_pair(self, offer: QueuePair, node_id: str) -> QueuePair:
        """Connects the other agent's end of an RDMA connection to one of ours. Raises TransferRefused."""
        rdma = self._open.get("rdma")
        if not isinstance(rdma, RdmaTransport):
            raise TransferRefused(f"{node_id} has no RDMA: {self.absent.get('rdma', 'not started')}")
        return rdma.accept(offer)
