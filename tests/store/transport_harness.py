"""Two ends of a transport without agents: memory, pool, transport, and what each knows of the other."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from store_harness import BOUND_NS, SECRET, keys, layout, until

from halfmoon.schemas.codec import decode, encode
from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.store import Hello, QueuePair
from halfmoon.store.agent.open_transports import OPENERS, TransportSite
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import HolderUnreachable
from halfmoon.store.pool.checksums import block_sum, layer_sums
from halfmoon.store.pool.fence import SegmentFence
from halfmoon.store.pool.guard import PoolGuard, peer_writer
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.segment import Geometry, Segment, host_id, segment_name
from halfmoon.store.pool.slots import Owner
from halfmoon.store.transports.base import Call, Peer, ServedPool
from halfmoon.store.transports.rdma.transport import RdmaTransport
from halfmoon.store.transports.tcp.transport import TcpTransport
from tests.eventually import BOUND_S
from tests.guardian import cluster_name

#: The guest of `make test-rdma` says which devices it has, one for each end.
DEVICES = os.environ.get("HALFMOON_RDMA_DEVICES", "").split()
#: Each transport of the list, and TCP once more with encryption.
KINDS = (*(name for name in OPENERS if name != "rdma" or DEVICES), "tls")
#: Of an end's executor.
THREADS = 2
ENCRYPTION = {"shm": "auto", "tcp": "never", "tls": "always", "rdma": "auto"}


class Side:
    """One end. `kind`: a transport of the list (tcp: in the clear), or tls."""

    def __init__(
        self, kind: str, node_id: str, *, shape: Layout | None = None, slots: int = 16, **changes: Any
    ) -> None:
        self.kind = kind
        self.closed = False
        fields: dict[str, Any] = {
            "cluster": cluster_name(),
            "node_id": node_id,
            "layout": shape or layout(),
            "slots": slots,
            "cluster_secret": SECRET,
            "encryption": ENCRYPTION[kind],
            # Long enough that neither runs out unless the test is about it.
            "lease_ttl_ns": 4 * BOUND_NS,
            "transfer_ns_max": BOUND_NS,
            "stall_ns_max": BOUND_NS,
            "rdma": DEVICES[node_id != "one"] if kind == "rdma" else "off",
        }
        self.config = StoreConfig(**{**fields, **changes})
        self.incarnation = uuid.uuid4().hex[:16]
        self.counters: Counter[str] = Counter()
        self.guard = PoolGuard(
            Pool(slots), ttl_ns=4 * BOUND_NS, grace_ns=10**9, announce=lambda changes: None
        )
        self.segment = Segment.create(segment_name(self.config.cluster, node_id), self.config.geometry)
        self.view = self.segment.view
        self.guard.fence_by(SegmentFence(self.view))
        self.executor = ThreadPoolExecutor(THREADS)
        self.others: dict[str, Side] = {}
        self.site = TransportSite(
            config=self.config,
            pool=ServedPool(
                view=self.view,
                access=self.guard,
                incarnation=self.incarnation,
                counters=self.counters,
            ),
            executor=self.executor,
            exchange=self.exchange,
        )
        self.transport = OPENERS["tcp" if kind == "tls" else kind](self.site)
        self.tcp = self.transport if isinstance(self.transport, TcpTransport) else None
        self.rdma = self.transport if isinstance(self.transport, RdmaTransport) else None
        self.hello = Hello(
            node_id=node_id,
            incarnation=self.incarnation,
            host=host_id(),
            segment=self.view.name,
            slots=slots,
            layout=self.config.layout,
            endpoints=list(self.transport.endpoints),
        )

    @property
    def peer(self) -> Peer:
        return self.own_peer(self.hello.endpoints)

    def own_peer(self, endpoints: Sequence[Endpoint]) -> Peer:
        """This end as others see it, reached at these endpoints."""
        geometry = Geometry.of(self.config.layout, self.config.slot_count)
        hello = self.hello
        return Peer(hello.node_id, hello.incarnation, hello.host, hello.segment, geometry, tuple(endpoints))

    def meet(self, other: Side) -> None:
        for one, two in ((self, other), (other, self)):
            one.others[two.config.node_id] = two

    async def exchange(self, node_id: str, offer: QueuePair) -> QueuePair:
        """As over the bus: encoded, and nobody answers for an agent that is gone."""
        rdma = self.others[node_id].rdma
        if rdma is None or self.others[node_id].closed:
            raise HolderUnreachable(f"nobody serves {node_id}")
        return decode(encode(rdma.accept(decode(encode(offer), QueuePair))), QueuePair)

    def stored(self, *numbers: int, seed: int = 1, order_id: str = "o") -> list[int]:
        """Committed blocks, leased under the order; their slots."""
        owner = Owner(order_id, "store")
        hold = self.guard.open_put(owner, split_keys(keys(*numbers)), len(numbers), writer="worker")
        for i, slot in enumerate(hold.slots):
            self.view.blocks[slot] = noise(self.view.blocks[slot].shape, seed + i)
            self.view.sums[slot] = layer_sums(self.view, slot)
        self.guard.commit(owner, {i: block_sum(self.view.sums[slot]) for i, slot in enumerate(hold.slots)})
        return list(hold.slots)

    def reserved(self, blocks: int, *, order_id: str = "o", party: str = "w") -> list[int]:
        owner = Owner(order_id, party)
        return list(self.guard.open_put(owner, [], blocks, writer=peer_writer("one")).slots)

    async def idle(self) -> None:
        """Waits until each thread of the executor has done what it was given before."""
        met = threading.Barrier(THREADS)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self.executor, met.wait) for _ in range(THREADS)))

    async def end_links(self) -> None:
        """As what lies between two hosts may end connections to this one."""
        if self.tcp is not None:
            connections = self.tcp._server._connections
            for connection in list(connections):
                connection.shutdown(socket.SHUT_RDWR)
            await until(lambda: not connections)

    async def close(self) -> None:
        self.closed = True
        await self.transport.close()
        self.executor.shutdown()
        self.segment.close()


def noise(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def call(*, order_id: str = "o", party: str = "w", seconds: float = BOUND_S, verify: bool = False) -> Call:
    return Call(order_id, party, time.monotonic_ns() + int(seconds * 1e9), verify)
