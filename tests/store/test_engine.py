"""The engine over transports that fail on command, and over real ones: which path, retries, rests, deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path as File

import numpy as np
import pytest
from store_harness import layout
from transport_harness import Side, call

from halfmoon.schemas.events import Endpoint
from halfmoon.store.errors import HolderUnreachable, TransferError, TransferTimeout
from halfmoon.store.pool.segment import Geometry
from halfmoon.store.transports.base import Call, Peer, Slice
from halfmoon.store.transports.engine import REST_NS, SLICE_BYTES, TransferEngine, cut
from halfmoon.store.transports.rdma.transport import RdmaTransport
from halfmoon.store.transports.shm import ShmTransport
from halfmoon.store.transports.tcp.transport import TcpTransport
from halfmoon.store.transports.topology import TopologyInvalid, read_topology
from tests.eventually import eventually

GEOMETRY = Geometry(slots=64, layers=4, layer_block_bytes=1 << 20)


class Clock:
    """The engine's: moves by what scripted moves are said to take. No rest of a path is over, and none is slower than
    another, because the machine was busy.
    """

    now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _time_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.store.transports.engine.time", CLOCK)


class Scripted:
    """Says what it was asked to move, takes `seconds` for each, fails when the endpoint is in `broken`."""

    endpoints: Sequence[Endpoint] = ()

    def __init__(self, seconds: float = 0.0) -> None:
        self.kind = KINDS["tcp"]
        self.seconds = seconds
        #: Without it a move that has begun does not end.
        self.go = asyncio.Event()
        self.go.set()
        self.broken: dict[str, Exception] = {}
        self.moved: list[tuple[str, list[Slice]]] = []
        self.running = self.running_max = 0

    def usable_endpoints(self, peer: Peer) -> list[Endpoint]:
        return [at for at in peer.endpoints if at.transport == self.kind.name]

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        address = peer.endpoints[0].address
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        done_ns = CLOCK.now_ns + int(self.seconds * 1e9)
        try:
            await asyncio.sleep(0)
            await self.go.wait()
        finally:
            self.running -= 1
        CLOCK.now_ns = max(CLOCK.now_ns, done_ns)
        if address in self.broken:
            raise self.broken[address]
        self.moved.append((address, list(items)))

    write = read

    def forget(self, node_id: str) -> None: ...

    async def close(self) -> None: ...

    @property
    def addresses(self) -> list[str]:
        return [address for address, _ in self.moved]


def peer(*endpoints: tuple[str, str, int], incarnation: str = "i") -> Peer:
    found = tuple(Endpoint(transport=kind, address=at, distance=far) for kind, at, far in endpoints)  # type: ignore[arg-type]
    return Peer("n", incarnation, "host", "segment", GEOMETRY, found)


def engine(stripes: int = 1, **transports: Scripted) -> TransferEngine:
    for name, transport in transports.items():
        transport.kind = KINDS[name]
    return TransferEngine(list(transports.values()), stripes=stripes, counters=Counter())


KINDS = {kind.name: kind for kind in (ShmTransport.kind, RdmaTransport.kind, TcpTransport.kind)}
BATCH = [Slice(i, i, 0, 4) for i in range(8)]  # 32 MiB: four slices


@pytest.mark.pure
def test_a_batch_is_cut_into_slices_that_cover_it_once() -> None:
    pieces = cut([Slice(i, 63 - i, 1, 3) for i in range(7)], 1 << 20, 2)
    assert [sum(item.layers for item in piece) << 20 for piece in pieces] == [
        SLICE_BYTES,
        SLICE_BYTES,
        5 << 20,
    ]
    layers = [
        (i.local_slot, i.remote_slot, at)
        for p in pieces
        for i in p
        for at in range(i.first_layer, i.first_layer + i.layers)
    ]
    assert layers == [(i, 63 - i, layer) for i in range(7) for layer in (1, 2, 3)]
    assert cut(BATCH, 1 << 20, 1) == [BATCH]


@pytest.mark.pure
def test_a_failed_path_is_replaced_by_another_then_by_another_transport_then_it_is_said() -> None:
    async def story() -> None:
        rdma, tcp = Scripted(), Scripted()
        over = engine(rdma=rdma, tcp=tcp)
        there = peer(("rdma", "r1", 10), ("rdma", "r2", 20), ("tcp", "t1", 10))
        await over.read(there, BATCH[:1], call())
        assert rdma.addresses == ["r1"]
        rdma.broken["r1"] = HolderUnreachable("cut")
        await over.read(there, BATCH[:1], call())
        assert rdma.addresses == ["r1", "r2"]
        rdma.broken["r2"] = TransferTimeout("slow")
        await over.read(there, BATCH[:1], call())
        assert (rdma.addresses, tcp.addresses) == (["r1", "r2"], ["t1"])
        tcp.broken["t1"] = HolderUnreachable("cut too")
        with pytest.raises(HolderUnreachable, match="cut too"):
            await over.read(there, BATCH[:1], call())
        with pytest.raises(HolderUnreachable, match="rests"):
            await over.read(there, BATCH[:1], call())
        again = peer(("rdma", "r1", 10), incarnation="restarted")
        rdma.broken.clear()
        await over.read(again, BATCH[:1], call())  # another process, another history

    asyncio.run(story())


@pytest.mark.pure
def test_a_path_rests_longer_after_each_failure_and_is_probed_by_one_move() -> None:
    async def story() -> None:
        tcp = Scripted(seconds=0.05)
        over = engine(tcp=tcp)
        there = peer(("tcp", "t1", 10), ("tcp", "t2", 100))
        (best, _) = over.paths(there)
        tcp.broken["t1"] = HolderUnreachable("cut")
        rests = []
        for _ in range(3):
            best.backoff_until_ns = 0
            failed_ns = CLOCK.now_ns + 50_000_000
            await over.read(there, BATCH[:1], call())
            rests.append(best.backoff_until_ns - failed_ns)
        assert rests == [REST_NS, 2 * REST_NS, 4 * REST_NS]
        tcp.broken.clear()
        best.backoff_until_ns = 0
        tcp.moved.clear()
        await asyncio.gather(*(over.read(there, BATCH[:1], call()) for _ in range(3)))
        assert sorted(tcp.addresses) == ["t1", "t2", "t2"]
        await over.read(there, BATCH[:1], call())
        assert tcp.addresses[-1] == "t1"

    asyncio.run(story())


@pytest.mark.pure
def test_slices_are_shared_out_by_bandwidth_and_distance() -> None:
    async def story() -> None:
        tcp = Scripted(seconds=0.01)
        over = engine(stripes=4, tcp=tcp)
        there = peer(("tcp", "near", 10), ("tcp", "far", 30))
        many = [Slice(i, i, 0, 4) for i in range(64)]  # 32 slices
        tcp.go.clear()
        writing = asyncio.create_task(over.write(there, many, call()))
        await eventually(lambda: tcp.running == 4, "as many as there are stripes are under way")
        tcp.go.set()
        await writing
        shares = Counter(tcp.addresses)
        assert 2 * shares["far"] < shares["near"] < 32, shares
        assert tcp.running_max == 4
        moved = [item for _, items in tcp.moved for item in items]
        assert sorted(moved) == many

    asyncio.run(story())


@pytest.mark.pure
def test_no_more_slices_are_under_way_than_there_is_room_and_a_deadline_ends_the_wait() -> None:
    async def story() -> None:
        tcp = Scripted(seconds=0.02)
        over = engine(tcp=tcp)
        there = peer(("tcp", "t1", 10))
        tcp.go.clear()
        reading = [asyncio.create_task(over.read(there, BATCH[:1], call())) for _ in range(100)]
        await eventually(lambda: tcp.running == 32, "32 slices are under way")
        tcp.go.set()
        await asyncio.gather(*reading)
        assert tcp.running_max == 32
        tcp.go.clear()
        waiting = [asyncio.create_task(over.read(there, BATCH[:1], call())) for _ in range(32)]
        await eventually(lambda: tcp.running == 32, "32 slices are under way")
        with pytest.raises(TransferTimeout, match="turn"):
            await over.read(there, BATCH[:1], call(seconds=-1))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        tcp.go.set()
        await over.read(there, BATCH[:1], call())  # what was cancelled gave its room back
        assert over.paths(there)[0].in_flight_bytes == 0

    asyncio.run(story())


def test_real_bytes_come_over_tcp_when_the_memory_cannot_be_mapped_and_striped() -> None:
    async def story() -> None:
        shape = layout(layers=8, block_tokens=1024, kv_heads=2, head_dim=64)
        one, two = Side("tcp", "one", shape=shape, slots=8), Side("tcp", "two", shape=shape, slots=8)
        mapped = Side("shm", "one", shape=shape, slots=8)
        one.meet(two)
        over = TransferEngine([one.transport, mapped.transport], stripes=3, counters=one.counters)
        try:
            theirs, mine = two.stored(*range(6)), one.reserved(6)
            gone = Endpoint(transport="shm", address="nowhere")
            there = Peer(
                "two",
                two.incarnation,
                two.peer.host,
                "halfmoon-nowhere",
                two.peer.geometry,
                (gone, *two.peer.endpoints),
            )
            items = [Slice(mine[i], theirs[i], 0, 8) for i in range(6)]
            await over.read(there, items, call())
            assert all(np.array_equal(one.view.blocks[mine[i]], two.view.blocks[theirs[i]]) for i in range(6))
            assert one.counters["retried_shm"] >= 1
            assert two.counters["tcp_read_bytes"] == 6 * shape.block_bytes
            with pytest.raises(TransferError, match="not leased"):
                await over.read(there, items, call(order_id="other"))
        finally:
            for side in (one, two, mapped):
                await side.close()

    asyncio.run(story())


@pytest.mark.pure
def test_topology_is_read_from_sysfs_and_overridden_by_a_file(tmp_path: File) -> None:
    for name, text in (
        ("sys/class/net/eth0/device/numa_node", "1\n"),
        ("sys/class/infiniband/mlx5_0/device/numa_node", "0\n"),
        ("sys/class/net/lo/address", ""),
        ("sys/devices/system/node/node0/distance", "10 21\n"),
        ("sys/devices/system/node/node1/distance", "21 10\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    found = read_topology(sysfs=tmp_path / "sys")
    assert [found.distance(nic) for nic in ("eth0", "mlx5_0", "lo", "")] == [21, 10, 10, 10]
    file = tmp_path / "topology.toml"
    file.write_text('memory_node = 1\n[nics.eth9]\nnuma_node = 0\n[distances]\n"1-0" = 40\n')
    found = read_topology(str(file), sysfs=tmp_path / "sys")
    assert [found.distance(nic) for nic in ("eth0", "mlx5_0", "eth9")] == [10, 40, 40]
    for text, named in (
        ("nics = 1", "nics"),
        ("[nics.a]", "nics.a"),
        ('[distances]\n"x" = 1', "distances.x"),
        ("more = 1", "more"),
    ):
        file.write_text(text)
        with pytest.raises(TopologyInvalid, match=named):
            read_topology(str(file), sysfs=tmp_path / "sys")
