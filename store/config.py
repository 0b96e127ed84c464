"""Configuration of a store agent. Read once, passed down."""

from __future__ import annotations

import ipaddress
import os

from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Layout
from halfmoon.store.options import StoreOptions
from halfmoon.store.pool.segment import Geometry
from halfmoon.store.pool.slots import tenant_mark
from halfmoon.store.tiers.options import SsdOptions
from halfmoon.store.tiers.ssd_file import records_in
from halfmoon.store.transports.rdma.device import Wanted
from halfmoon.store.transports.rdma.options import RdmaOptions
from halfmoon.store.transports.tcp.options import TcpOptions


class StoreConfig(StoreOptions, frozen=True, kw_only=True):
    """One store agent; `ssd` is a file. Raises ValueError, naming the field, when fields contradict each other."""

    #: Names the segments in /dev/shm together with `node_id`, so that two clusters on one machine do not
    #: meet.
    cluster: str = "default"
    node_id: str
    layout: Layout
    #: Blocks in the pool; 0: as many as `pool_mib` hold.
    slots: int = 0
    #: Share of the pool's slots, in percent, that is kept free or saved already, so that evicting it loses
    #: nothing.
    ssd_ahead_percent: int = 50
    #: Time limit for saving blocks at an orderly end.
    ssd_stop_s: float = 5.0
    #: Threads that read and write the file.
    ssd_threads: int = 4
    #: Known to the agents of the cluster alone; it authenticates the data plane.
    cluster_secret: str
    #: Life of a lease or reservation after the last activity of its order.
    lease_ttl_ns: int = 60 * SECOND_NS
    #: A slot is not used again before a writer's deadline plus this: clocks and scheduling of a writer are
    #: not exact.
    writer_grace_ns: int = 1 * SECOND_NS
    #: No single move takes longer; shorter than half the lease, so that no lease ends under a reader.
    transfer_ns_max: int = 20 * SECOND_NS
    #: A TCP peer from which nothing comes for this long is unreachable.
    stall_ns_max: int = 3 * SECOND_NS
    #: How long another agent may take to answer a control request.
    control_timeout_s: float = 2.0
    heartbeat_ns: int = 1 * SECOND_NS
    sweep_ns: int = SECOND_NS // 4
    #: Compare checksums on reads over shared memory too (over TCP always): 0.1 ms a MiB.
    verify_shm: bool = False
    #: An order that could turn to a replica waits this long for a holder's answer first.
    replica_after_s: float = 0.25
    #: Threads that copy and hash.
    threads: int = 2

    def __post_init__(self) -> None:
        if self.layout.block_bytes == 0:
            raise ValueError(
                "layout: a block has no bytes, so there is nothing to store: run without a store agent"
            )
        for name in ("kv_events", "kv_events_replay"):
            address = getattr(self, name)
            if not self.kv_events_public and not is_local(address):
                raise ValueError(
                    f"{name}: {address} asks for no key: --kv-events-public where other hosts may read it"
                )
        if not self.cluster_secret:
            raise ValueError("cluster_secret: must not be empty")
        if self.slot_count < 1:
            raise ValueError(
                f"pool_mib: {self.pool_mib} is less than one block of {self.layout.block_bytes} bytes"
            )
        if self.ssd and records_in(self.layout, self.ssd_bytes) < 1:
            raise ValueError(f"ssd_bytes: {self.ssd_bytes} hold no block of {self.layout.block_bytes} bytes")
        if not 0 <= self.ssd_ahead_percent <= 100:
            raise ValueError(f"ssd_ahead_percent: {self.ssd_ahead_percent} is not in 0..100")
        for tenant, quota in self.quotas.items():
            if quota < self.layout.block_bytes:
                raise ValueError(
                    f"quota: {tenant!r} has {quota} bytes, a block has {self.layout.block_bytes}"
                )
        if 2 * self.transfer_ns_max > self.lease_ttl_ns:
            raise ValueError("transfer_ns_max: must be at most half of lease_ttl_ns")
        if not -1 <= self.data_port <= 65535:
            raise ValueError(f"data_port: {self.data_port} is not in 0..65535")
        if self.transport == "tcp" and self.data_port < 0:
            raise ValueError("data_port: transport tcp needs a port")
        if self.transport == "rdma" and self.rdma == "off":
            raise ValueError("rdma: transport rdma needs a device")
        if self.rdma != "off":
            Wanted.parse(self.rdma)

    @property
    def quotas(self) -> dict[str, int]:
        """Bytes of the pool that a tenant may use, in whole blocks; a tenant without one may use all of it."""
        return {tenant: int(size) for tenant, _, size in (each.rpartition("=") for each in self.quota)}

    @property
    def slot_quotas(self) -> dict[str, int]:
        """By the mark of the tenant (`slots.tenant_mark`)."""
        return {
            tenant_mark(tenant): quota // self.layout.block_bytes for tenant, quota in self.quotas.items()
        }

    @property
    def stripe_count(self) -> int:
        return self.stripes or (4 if (os.cpu_count() or 1) > 4 else 1)

    @property
    def slot_count(self) -> int:
        return self.slots if self.slots else (self.pool_mib << 20) // self.layout.block_bytes

    @property
    def geometry(self) -> Geometry:
        return Geometry.of(self.layout, self.slot_count)

    @property
    def tcp_options(self) -> TcpOptions:
        return TcpOptions(
            cluster_secret=self.cluster_secret,
            bind=self.bind,
            port=self.data_port,
            advertise=self.advertise,
            encryption=self.encryption,
            stall_ns_max=self.stall_ns_max,
            transfer_ns_max=self.transfer_ns_max,
        )

    @property
    def rdma_options(self) -> RdmaOptions:
        return RdmaOptions(
            node_id=self.node_id,
            cluster_secret=self.cluster_secret,
            device=self.rdma,
            stall_ns_max=self.stall_ns_max,
        )

    @property
    def ssd_options(self) -> SsdOptions | None:
        """None: there is no SSD tier."""
        if not self.ssd:
            return None
        return SsdOptions(
            node_id=self.node_id,
            layout=self.layout,
            slots=self.slot_count,
            path=self.ssd,
            file_bytes=self.ssd_bytes,
            eviction=self.eviction,
            hits_min=self.ssd_hits,
            ahead_percent=self.ssd_ahead_percent,
            stop_s=self.ssd_stop_s,
            threads=self.ssd_threads,
        )


def is_local(address: str) -> bool:
    """Whether only this host reaches a ZMQ address; "" is none."""
    transport, _, place = address.partition("://")
    host = place.rpartition(":")[0].strip("[]")
    if not address or transport in ("ipc", "inproc") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
