"""Refusals of the TCP server: a reason for the caller, and a count for the operator."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import zmq
from store_harness import BOUND_NS, keys, until
from transport_harness import Side, another_key, call

from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.keys import split_keys
from halfmoon.store.errors import HolderUnreachable, TransferError, TransferRefused, TransferTimeout
from halfmoon.store.pool.guard import peer_writer
from halfmoon.store.pool.slots import Owner
from halfmoon.store.transports.base import Cancellation, Peer, Slice
from halfmoon.store.transports.tcp import wire
from halfmoon.store.transports.tcp.channel import CurveChannel, PlainChannel, StallTimer
from tests.eventually import BOUND_S

Story = Callable[[Side, Side], Awaitable[None]]
NONE: Mapping[str, Any] = MappingProxyType({})


def tell(story: Story, *, kind: str = "tcp", theirs: Mapping[str, Any] = NONE, **changes: Any) -> None:
    """`changes` are of the calling side, `theirs` of the other one."""

    async def run() -> None:
        one, two = Side(kind, "one", **changes), Side(kind, "two", **theirs)
        try:
            await story(one, two)
        finally:
            await one.close()
            await two.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["tcp", "curve"])
def test_another_secret(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        one.meet(two)
        with pytest.raises(TransferRefused, match="secret"):
            await one.transport.read(two.peer, [Slice(0, 0, 0, 1)], call())

    tell(story, kind=kind, cluster_secret="another")


def test_a_server_that_knows_the_greeting_but_not_the_secret() -> None:
    async def story(one: Side, two: Side) -> None:
        with socket.create_server(("127.0.0.1", 0)) as liar:

            def lie() -> None:
                channel = PlainChannel(liar.accept()[0], frame_bytes_max=65536)
                timer = patience()
                channel.receive(timer)
                challenge = wire.Challenge(nonce=secrets.token_bytes(16), proof=secrets.token_bytes(32))
                channel.send([b"", wire.encode(challenge)], timer)
                channel.close()

            lying = asyncio.create_task(asyncio.to_thread(lie))
            with pytest.raises(TransferRefused, match="does not know the cluster's secret"):
                await one.transport.read(elsewhere(two, liar), [Slice(0, 0, 0, 1)], call())
            await lying

    tell(story)


def test_a_curve_key_that_is_not_on_the_allow_list() -> None:
    async def story(one: Side, two: Side) -> None:
        with pytest.raises(TransferRefused, match="does not allow our key"):
            await one.transport.read(two.peer, [Slice(0, 0, 0, 1)], call())
        assert two.counters["refused_curve_key"] >= 1
        two.meet(one)
        theirs = two.stored(1)
        await one.transport.read(two.peer, [Slice(0, theirs[0], 0, 1)], call())

    tell(story, kind="curve")


def test_a_server_with_another_curve_key() -> None:
    async def story(one: Side, two: Side) -> None:
        one.meet(two)
        wrong = another_key(two.peer, zmq.curve_keypair()[0].decode())
        with pytest.raises(TransferError):
            await one.transport.read(wrong, [Slice(0, 0, 0, 1)], call(seconds=2))

    tell(story, kind="curve")


def test_a_plain_caller_at_an_encrypted_link() -> None:
    async def story(one: Side, two: Side) -> None:
        with pytest.raises(TransferError):
            await one.transport.read(another_key(two.peer, ""), [Slice(0, 0, 0, 1)], call(seconds=2))
        assert not two.counters["tcp_read_bytes"]

    tell(story, kind="curve", encryption="never")


def test_reads_without_a_lease_and_writes_without_a_reservation() -> None:
    async def story(one: Side, two: Side) -> None:
        theirs = two.stored(1)
        with pytest.raises(TransferRefused, match="not leased"):
            await one.transport.read(two.peer, [Slice(0, theirs[0], 0, 1)], call(order_id="other"))
        with pytest.raises(TransferRefused, match="no reservation"):
            await one.transport.write(two.peer, [Slice(0, theirs[0], 0, 1)], call(party="other"))
        with pytest.raises(TransferRefused, match="committed"):
            await one.transport.write(two.peer, [Slice(0, theirs[0], 0, 1)], call(party="store"))
        assert (two.counters["refused_no_lease"], two.counters["refused_no_reservation"]) == (1, 2)

    tell(story)


def patience() -> StallTimer:
    return StallTimer(Cancellation(call()), BOUND_NS, "raw")


def elsewhere(two: Side, listener: socket.socket) -> Peer:
    """The peer, but reached at another socket."""
    two.hello.endpoints[0] = Endpoint(transport="tcp", address=f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    return two.peer


class Raw:
    """A caller that speaks frames by hand, over either kind of link."""

    def __init__(self, two: Side) -> None:
        self._two = two
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = two.hello.endpoints[0]
        self.channel: PlainChannel | CurveChannel
        if not endpoint.public_key:
            self.channel = PlainChannel.connect(
                endpoint.address, patience(), frame_bytes_max=1 << 20, timeout_s=BOUND_S
            )
        else:
            keys = zmq.curve_keypair()
            two.tcp.admit(msgspec.structs.replace(two.hello, public_key=keys[0].decode()))  # type: ignore[union-attr]
            self.channel = CurveChannel(
                self._context,
                endpoint.address,
                peer="two",
                server_key=endpoint.public_key,
                keys=keys,
                frame_bytes_max=1 << 20,
            )
            self.channel.handshake(patience())
        self.session: wire.Session | None = None

    async def enter(self) -> None:
        nonce, secret = secrets.token_bytes(16), self._two.config.cluster_secret
        _, challenge = await self.ask(b"", wire.encode(wire.Greeting(nonce=nonce)))
        nonces = nonce + challenge.nonce
        answer = wire.Answer(node_id="raw", proof=wire.proof(secret, "client", nonces, "raw"))
        await self.ask(b"", wire.encode(answer))
        self.session = wire.Session(wire.proof(secret, "session", nonces), "client")

    async def ask(self, *frames: bytes) -> tuple[bytes, Any]:
        return await asyncio.to_thread(self._ask, frames)

    def _ask(self, frames: tuple[bytes, ...]) -> tuple[bytes, Any]:
        self.channel.send(frames, patience())
        self.channel.receive(patience())
        return self.channel.small(), wire.decode(self.channel.small())

    def write(
        self, *, slot: int, layers: int = 1, sums: list[int] | None = None, fill: int = 0
    ) -> tuple[bytes, bytes]:
        assert self.session is not None
        runs = [wire.Run(slot, 0, layers, fill)]
        return self.session.seal(
            wire.Write(order_id="o", party="w", runs=runs, sums=[0] * layers if sums is None else sums)
        )

    def close(self) -> None:
        self.channel.close()
        self._context.destroy(linger=0)


def raw_story(
    story: Callable[[Raw, Side], Awaitable[None]], *, kind: str = "tcp", theirs: Mapping[str, Any] = NONE
) -> None:
    async def run(one: Side, two: Side) -> None:
        raw = await asyncio.to_thread(Raw, two)
        try:
            await story(raw, two)
        finally:
            raw.close()

    tell(run, kind=kind, theirs=theirs)


@pytest.mark.parametrize("kind", ["tcp", "curve"])
def test_frames_before_authentication(kind: str) -> None:
    async def story(raw: Raw, two: Side) -> None:
        slot = two.reserved(1)[0]
        header = wire.encode(
            wire.Write(order_id="o", party="w", runs=[wire.Run(slot, 0, 1)], sums=[0], number=1)
        )
        for frames in ((b"", header, b"x" * 8192), (b"\0" * 32, header), (b"", b"rubbish"), (b"",)):
            _, refusal = await raw.ask(*frames)
            assert isinstance(refusal, wire.RefusalFrame)
        assert two.counters["refused_unauthenticated"] == 2
        assert two.counters["refused_malformed"] == 2
        assert not two.view.blocks.any()

    raw_story(story, kind=kind)


@pytest.mark.parametrize("kind", ["tcp", "curve"])
def test_wrong_sizes_and_wrong_sums(kind: str) -> None:
    async def story(raw: Raw, two: Side) -> None:
        await raw.enter()
        slot = two.reserved(1)[0]
        good = b"x" * 8192
        for payload in ([b"x" * 8191], [b"x" * 8193], [], [good, good]):
            _, refusal = await raw.ask(*raw.write(slot=slot), *payload)
            assert isinstance(refusal, wire.RefusalFrame), payload
        assert (two.counters["refused_wrong_size"], two.counters["refused_corrupted"]) == (3, 1)
        _, refusal = await raw.ask(*raw.write(slot=slot), good)
        assert (refusal.kind, two.counters["refused_corrupted"]) == ("corrupted", 2)
        _, refusal = await raw.ask(*raw.write(slot=slot, sums=[]), good)
        assert "checksums" in refusal.reason
        _, refusal = await raw.ask(*raw.write(slot=slot, layers=5), good)
        _, refusal = await raw.ask(*raw.write(slot=slot + 99), good)
        assert two.counters["refused_outside"] == 2
        two.guard.release(Owner("o", "w"))
        two.guard.close_writer(Owner("o", "w"), "node-one")
        assert two.guard.counts().free == 16

    raw_story(story, kind=kind)


@pytest.mark.parametrize("kind", ["tcp", "curve"])
def test_parts_of_blocks_that_lie(kind: str) -> None:
    async def story(raw: Raw, two: Side) -> None:
        await raw.enter()
        slot = two.reserved(1)[0]
        two.view.blocks[slot] = 7
        for fill in (4097, 2**62, -1):
            await raw.ask(*raw.write(slot=slot, fill=fill), b"x" * 8192)
        assert two.counters["refused_outside"] == 3
        for payload in (b"x" * 31, b"x" * 33, b"x" * 8192):
            await raw.ask(*raw.write(slot=slot, fill=16), payload)
        assert two.counters["refused_wrong_size"] == 3
        await raw.ask(*raw.write(slot=slot, fill=16), b"x" * 32)
        assert two.counters["refused_corrupted"] == 1
        assert (two.view.blocks[slot] == 7).all()
        assert raw.session is not None
        _, refusal = await raw.ask(
            *raw.session.seal(wire.Read(order_id="o", runs=[wire.Run(slot, 0, 1, 16)]))
        )
        assert "whole blocks" in refusal.reason

    raw_story(story, kind=kind)


@pytest.mark.parametrize("kind", ["tcp", "curve"])
def test_a_block_with_a_key_is_written_whole(kind: str) -> None:
    """Else what another request left in its slot would be committed with it."""

    async def story(one: Side, two: Side) -> None:
        one.meet(two)
        hold = two.guard.open_put(Owner("o", "w"), split_keys(keys(1)), 2, writer=peer_writer("one"))
        with pytest.raises(TransferRefused, match=f"slot {hold.slots[0]} has a key"):
            await one.transport.write(two.peer, [Slice(0, hold.slots[0], 0, 4, 16)], call())
        assert two.counters["refused_no_reservation"] == 1
        items = [Slice(0, hold.slots[0], 0, 4), Slice(1, hold.slots[1], 0, 4, 16)]
        await one.transport.write(two.peer, items, call())

    tell(story, kind=kind)


@pytest.mark.parametrize("kind", ["tcp", "curve"])
def test_a_replayed_or_forged_header_ends_the_session(kind: str) -> None:
    async def story(raw: Raw, two: Side) -> None:
        await raw.enter()
        slot = two.reserved(1)[0]
        sealed = raw.write(slot=slot)
        await raw.ask(*sealed, b"x" * 8192)
        _, refusal = await raw.ask(*sealed, b"y" * 8192)
        assert isinstance(refusal, wire.RefusalFrame)
        assert two.view.blocks[slot, 0, 0] != ord("y")
        _, refusal = await raw.ask(*raw.write(slot=slot), b"z" * 8192)
        assert refusal.reason == "authenticate first"

    raw_story(story, kind=kind)


@pytest.mark.parametrize(
    ("sent", "counted"),
    [
        (struct.pack("<I", 100_000), "malformed"),  # so many frames
        (struct.pack("<II", 1, 2**31), "malformed"),  # so long a frame
        (struct.pack("<III", 2, 0, 100) + b"x" * 99, "truncated"),  # a frame that never ends
        (struct.pack("<II", 3, 0), "truncated"),
    ],
)
def test_bytes_that_are_no_message_end_the_connection_and_are_counted(sent: bytes, counted: str) -> None:
    async def story(one: Side, two: Side) -> None:
        one.meet(two)
        host, _, port = two.hello.endpoints[0].address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=BOUND_S) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(stranger.recv, 1) == b""
        assert dict(two.counters) == {f"refused_{counted}": 1}
        theirs = two.stored(1)
        await one.transport.read(two.peer, [Slice(0, theirs[0], 0, 1)], call())

    tell(story)


def test_a_writer_that_stops_in_the_middle_of_a_frame_frees_the_slot() -> None:
    async def story(raw: Raw, two: Side) -> None:
        await raw.enter()
        slot = two.reserved(1)[0]
        mac, header = raw.write(slot=slot)
        prefix = struct.pack("<IIII", 3, len(mac), len(header), 8192)
        assert isinstance(raw.channel, PlainChannel)
        raw.channel.socket.sendall(prefix + mac + header + b"x" * 8191)
        await until(raw.channel.broken)  # after stall_ns_max
        assert two.counters["tcp_written_bytes"] == 0
        two.guard.release(Owner("o", "w"))
        two.guard.close_writer(Owner("o", "w"), "node-one")
        assert two.guard.counts().free == 16

    raw_story(story, theirs={"stall_ns_max": 10**9})


def test_a_server_that_hangs_is_a_timeout_and_one_that_is_not_there_is_unreachable() -> None:
    async def story(one: Side, two: Side) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            peer = elsewhere(two, silent)
            with pytest.raises(TransferTimeout, match="nothing from two for 1000 ms"):
                await one.transport.read(peer, [Slice(0, 0, 0, 1)], call())
        with pytest.raises(HolderUnreachable):
            await one.transport.read(peer, [Slice(0, 0, 0, 1)], call())

    tell(story, stall_ns_max=10**9)
