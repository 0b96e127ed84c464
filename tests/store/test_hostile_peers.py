"""Peers with the secret that do not keep to the protocol: a store agent refuses what makes no sense, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from store_harness import SECRET, Cluster, keys, layout, until
from test_failures import tell

from halfmoon.schemas import store as messages
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.store import Replicate
from halfmoon.store.agent.kv_events import KvEvents, KvEventsOptions
from halfmoon.store.agent.peers import sign
from halfmoon.store.errors import TransferRefused
from halfmoon.store.locate import find_holders
from halfmoon.store.pool.segment import Geometry, PoolView, SegmentError
from halfmoon.store.pool.slots import Owner, tenant_mark
from tests.eventually import BOUND_S

HELLO = messages.Hello(
    node_id="liar",
    incarnation="i",
    host="elsewhere",
    segment="halfmoon-t-liar",
    slots=4,
    layout=layout(),
    endpoints=[],
)


async def liar(here: Cluster, **answers: msgspec.Struct) -> None:
    """Another agent, with the secret, that answers verbs as it is told."""
    bus = await here.bus("liar")
    for verb, answer in {
        "hello": sign(HELLO, SECRET),
        "end_lease": messages.LeaseEnded(held=True),
        **answers,
    }.items():
        kind = {"hello": messages.Hello, "lease": messages.LeaseBlocks, "reserve": messages.ReserveBlocks,
                "end_lease": messages.EndLease, "probe": messages.ProbeBlocks}[verb]  # fmt: skip
        await bus.serve(subjects.store("liar", verb), kind, lambda _, answer=answer: answer)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("slots", "sums"), [([], []), ([1], [1]), ([1, 2, 3], [1, 2, 3]), ([1, 2], []), ([1, 2], [1])]
)
def test_a_lease_of_other_blocks_than_were_asked_for(
    nats_url: str, slots: list[int], sums: list[int]
) -> None:
    async def story(here: Cluster) -> None:
        agent = await here.agent("n1")
        worker = await here.client("n1", "w1")
        await liar(here, lease=messages.Leased(incarnation="i", slots=slots, checksums=sums))
        await worker.open_put("o", keys(1, 2), blocks=2)
        with pytest.raises(TransferRefused, match="where 2 were asked for"):
            await worker.fetch("o", "liar", first_block=0, blocks=2)
        await worker.release("o")
        assert agent.context.guard.counts().free == 32

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("reserved", "said"),
    [
        ({"slots": [1], "epochs": [1], "lease_ttl_ns": 10**10}, "where 2 were asked for"),
        ({"slots": [1, 2], "epochs": [1], "lease_ttl_ns": 10**10}, "where 2 were asked for"),
        (
            {"slots": [1, 2], "epochs": [1, 1], "present": [2], "lease_ttl_ns": 10**10},
            "where 2 were asked for",
        ),
        ({"slots": [1, 2], "epochs": [1, 1], "lease_ttl_ns": 0}, "reserves for 0 ns"),
    ],
)
def test_a_reservation_of_something_else(nats_url: str, reserved: dict[str, Any], said: str) -> None:
    async def story(here: Cluster) -> None:
        agent = await here.agent("n1")
        worker = await here.client("n1", "w1")
        await liar(here, reserve=messages.Reserved(incarnation="i", **reserved))
        await worker.open_put("o", keys(1, 2), blocks=2)
        with pytest.raises(TransferRefused, match=said):
            await worker.open_push("o", "r", target_node_id="liar", decode_worker_id="w2")
        await worker.release("o")
        assert agent.context.guard.counts().free == 32

    tell(nats_url, story)


@pytest.mark.pure
def test_a_holder_of_blocks_that_nobody_asked_for(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1")
        await liar(here, probe=messages.Probed(dram=[0, 7, 2**31 - 1], ssd=[5]))
        holders, silent = await find_holders(await here.bus("asker"), ["n1", "liar"], keys(1, 2))
        assert (holders, silent) == ({0: ["liar"]}, [])

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize("mark", ["zz" * 16, "ab", "AB" * 16, "ab" * 17, "ab" * 16 + "\n"])
def test_a_mark_is_empty_or_a_digest(mark: str) -> None:
    """It goes into the table of the SSD tier's file, and would end the task that writes it."""
    good = [
        messages.ProbeBlocks(block_keys=b"", mark=tenant_mark("a")),
        messages.RemoveBlocks(block_keys=b"", mark=tenant_mark("a")),
        messages.ReserveBlocks(
            order_id="o",
            decode_worker_id="d",
            writer_node_id="n",
            block_keys=b"",
            blocks=0,
            tenant=tenant_mark("a"),
        ),
        Replicate(block_keys=b"", source_node_id="n", mark=tenant_mark("a")),
    ]
    for message in good:
        assert decode(encode(message), type(message)) == message
        name = "tenant" if isinstance(message, messages.ReserveBlocks) else "mark"
        with pytest.raises(MessageInvalid, match=name):
            decode(encode(msgspec.structs.replace(message, **{name: mark})), type(message))


@pytest.mark.pure
def test_another_tenants_mark_on_a_reservation_does_not_end_the_write_back(
    nats_url: str, tmp_path: Path
) -> None:
    async def story(here: Cluster) -> None:
        agent = await here.agent(
            "n1", slots=1, ssd=str(tmp_path / "tier"), ssd_bytes=1 << 20, ssd_ahead_percent=100
        )
        await here.client("n1", "w1")
        bus = await here.bus("n2")
        bad = b'{"type":"ReserveBlocks","order_id":"o","decode_worker_id":"w1","writer_node_id":"n2","blocks":1,' \
              b'"block_keys":"AAAAAAAAAAAAAAAAAAAAAA==","tenant":"not a mark"}'  # fmt: skip
        answer = await bus.nc.request(subjects.store("n1", "reserve"), bad, timeout=BOUND_S)
        assert b"invalid_request" in answer.data
        owner = Owner("p", "w1")
        agent.context.guard.open_put(owner, [b"k" * 16], 1, writer="worker")
        await agent.context.commit(owner, 0, 1)
        agent.context.guard.release(owner, writers=["worker"])
        tier = agent.context.tier
        assert tier is not None
        await until(lambda: tier.find(b"k" * 16) is not None)

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "halfmoon-t/../x", "", "halfmoon-", "halfmoon-a\n", "other-t-n"],
)
def test_a_segment_is_a_name_in_shared_memory_and_no_way_out_of_it(name: str) -> None:
    with pytest.raises(MessageInvalid, match="segment"):
        decode(encode(msgspec.structs.replace(HELLO, segment=name)), messages.Hello)
    with pytest.raises(SegmentError):
        PoolView.attach(name, Geometry(slots=1, layers=1, layer_block_bytes=4096))


@pytest.mark.pure
def test_an_empty_segment_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.store.pool.segment.SHM", tmp_path)
    (tmp_path / "halfmoon-t-n").touch()
    with pytest.raises(SegmentError):
        PoolView.attach("halfmoon-t-n", Geometry(slots=0, layers=1, layer_block_bytes=4096))


@pytest.mark.parametrize(("port", "speaks"), [("_pub", b"SUB"), ("_router", b"REQ")])
def test_who_reads_kv_events_sends_next_to_nothing(port: str, speaks: bytes) -> None:
    """A frame of any length would be held until it is whole, for whoever reaches the port."""

    async def story() -> None:
        options = KvEventsOptions(address="tcp://127.0.0.1:*", replay_address="tcp://127.0.0.1:*")
        feed = KvEvents(options, block_tokens=16, slots=4)
        feed.start()
        _, _, number = getattr(feed, port).getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")
        await asyncio.to_thread(flood, int(number), speaks)
        await feed.stop()

    asyncio.run(story())


def flood(port: int, speaks: bytes) -> None:
    """ZMTP 3.0 by hand: greeting, READY, and one frame of a megabyte. Returns when the other end hangs up."""
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(speaks)) + speaks
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as connection:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        connection.sendall(bytes([4, len(ready)]) + ready)
        with contextlib.suppress(OSError):  # it hangs up before all of it is sent
            connection.sendall(struct.pack(">BQ", 2, 1_000_001) + b"\x01" + b"x" * 1_000_000)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
