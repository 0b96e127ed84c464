"""Refusals of the TCP server: a reason for the caller, and a count for the operator."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from store_harness import BOUND_NS, keys, until
from transport_harness import Side, call

from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.keys import split_keys
from halfmoon.store.errors import HolderUnreachable, TransferRefused, TransferTimeout
from halfmoon.store.pool.guard import peer_writer
from halfmoon.store.pool.slots import Owner
from halfmoon.store.transports.base import Cancellation, Peer, Slice
from halfmoon.store.transports.tcp import wire
from halfmoon.store.transports.tcp.channel import StallTimer, TcpChannel
from halfmoon.store.transports.tcp.streams import (
    CLEAR,
    ENCRYPTED,
    ConnectionBroken,
    HandshakeRefused,
    connected,
    shaken_hands,
)
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


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_another_secret(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        one.meet(two)
        with pytest.raises(TransferRefused, match="secret"):
            await one.transport.read(two.peer, [Slice(0, 0, 0, 1)], call())

    tell(story, kind=kind, cluster_secret="another")


@pytest.mark.parametrize("their_secret", ["", "another"])
def test_a_server_that_speaks_no_tls_or_under_another_secret_is_refused(their_secret: str) -> None:
    async def story(one: Side, two: Side) -> None:
        with socket.create_server(("127.0.0.1", 0)) as liar:

            def lie() -> None:
                with liar.accept()[0] as connection, contextlib.suppress(ConnectionBroken):
                    if their_secret:
                        shaken_hands(connection, their_secret, patience(), server=True)
                    else:
                        connection.recv(4096)
                        connection.sendall(b"rubbish" * 100)

            lying = asyncio.create_task(asyncio.to_thread(lie))
            with pytest.raises(TransferRefused, match="another secret, or no TLS"):
                await one.transport.read(elsewhere(two, liar), [Slice(0, 0, 0, 1)], call())
            await lying

    tell(story, kind="tls")


def test_two_ends_that_do_not_agree_on_encryption() -> None:
    async def story(one: Side, two: Side) -> None:
        for caller, called in ((one, two), (two, one)):
            with pytest.raises(TransferRefused, match="no agreement on encryption"):
                await caller.transport.read(called.peer, [Slice(0, 0, 0, 1)], call())
        await until(lambda: one.counters["refused_encryption"] == two.counters["refused_encryption"] == 1)

    tell(story, encryption="always", theirs={"encryption": "never"})


@pytest.mark.parametrize(
    ("encryption", "theirs", "kind"),
    [("auto", "auto", "tcp"), ("auto", "always", "tls"), ("auto", "never", "tcp"), ("always", "auto", "tls")],
)
def test_a_link_within_a_host_is_in_the_clear_where_both_ends_may(
    encryption: str, theirs: str, kind: str
) -> None:
    async def story(one: Side, two: Side) -> None:
        stored = two.stored(1)
        await one.transport.read(two.peer, [Slice(0, stored[0], 0, 1)], call())
        [link] = one.tcp._idle["two"]  # type: ignore[union-attr]
        assert link._channel._stream.kind == kind

    tell(story, encryption=encryption, theirs={"encryption": theirs})


def test_a_link_to_another_host_is_encrypted_unless_both_ends_were_told_otherwise() -> None:
    async def story(one: Side, two: Side) -> None:
        two.hello = msgspec.structs.replace(two.hello, host="elsewhere")
        stored = two.stored(1)
        await one.transport.read(two.peer, [Slice(0, stored[0], 0, 1)], call())
        [link] = one.tcp._idle["two"]  # type: ignore[union-attr]
        assert link._channel._stream.kind == "tls"

    tell(story, encryption="auto", theirs={"encryption": "auto"})


@pytest.mark.parametrize(("source", "taken"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_a_caller_from_elsewhere_gets_no_link_in_the_clear(source: str, taken: bool) -> None:
    """By its address: what it says of its host is not asked for."""

    async def story(one: Side, two: Side) -> None:
        port = int(two.hello.endpoints[0].address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), source_address=(source, 0)) as caller:
            refused = contextlib.nullcontext() if taken else pytest.raises(HandshakeRefused)
            with refused:
                shaken_hands(caller, two.config.cluster_secret, patience(), server=False, protection=CLEAR)
        await until(lambda: two.counters["refused_encryption"] == (not taken))

    tell(story, theirs={"encryption": "auto"})


def test_a_peer_that_was_restarted_is_another() -> None:
    async def story(one: Side, two: Side) -> None:
        before = dataclasses.replace(two.peer, incarnation="before")
        with pytest.raises(HolderUnreachable, match="two was restarted"):
            await one.transport.read(before, [Slice(0, 0, 0, 1)], call())

    tell(story)


def test_a_forged_header_ends_the_session() -> None:
    async def story(raw: Raw, two: Side) -> None:
        slot = two.reserved(1)[0]
        _, header = raw.write(slot=slot)
        _, refusal = await raw.ask(bytes(32), header, b"x" * 8192)
        assert refusal.reason == "wrong mac"
        assert not two.view.blocks.any()
        await until(raw.channel.broken)

    raw_story(story)


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
        address = two.hello.endpoints[0].address
        self.socket = connected(address, BOUND_S)
        stream = shaken_hands(
            self.socket,
            two.config.cluster_secret,
            patience(),
            server=False,
            protection=CLEAR if two.config.encryption == "never" else ENCRYPTED,
        )
        self.channel = TcpChannel(stream, frame_bytes_max=1 << 20)
        self.key = stream.key
        self.session = wire.Session(stream.key, "client")
        assert isinstance(self._answer()[1], wire.Welcome)

    async def ask(self, *frames: bytes) -> tuple[bytes, Any]:
        return await asyncio.to_thread(self._ask, frames)

    def _ask(self, frames: tuple[bytes, ...]) -> tuple[bytes, Any]:
        self.channel.send(frames, patience())
        return self._answer()

    def _answer(self) -> tuple[bytes, Any]:
        self.channel.receive(patience())
        return self.channel.small(), wire.decode(self.channel.small())

    def write(
        self, *, slot: int, layers: int = 1, sums: list[int] | None = None, fill: int = 0
    ) -> tuple[bytes, bytes]:
        runs = [wire.Run(slot, 0, layers, fill)]
        return self.session.seal(
            wire.Write(order_id="o", party="w", runs=runs, sums=[0] * layers if sums is None else sums)
        )

    def close(self) -> None:
        self.channel.close()


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


def test_frames_before_the_secret_is_proved_end_the_connection_and_are_counted() -> None:
    async def story(one: Side, two: Side) -> None:
        slot = two.reserved(1)[0]
        header = wire.encode(
            wire.Write(order_id="o", party="w", runs=[wire.Run(slot, 0, 1)], sums=[0], number=1)
        )
        sizes = struct.pack("<4I", 3, 0, len(header), 8192)
        for sent in (sizes + header + b"x" * 8192, b"rubbish" * 100):
            said = await asyncio.to_thread(all_that_is_answered, two, sent)
            assert len(said) < 64  # an alert of TLS
        assert dict(two.counters) == {"refused_wrong_secret": 2}
        assert not two.view.blocks.any()

    tell(story)


def all_that_is_answered(two: Side, sent: bytes) -> bytes:
    """By the port, to a stranger, until it hangs up."""
    said = b""
    with connected(two.hello.endpoints[0].address, BOUND_S) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(sent)
        while some := stranger.recv(4096):
            said += some
    return said


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_wrong_sizes_and_wrong_sums(kind: str) -> None:
    async def story(raw: Raw, two: Side) -> None:
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


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_parts_of_blocks_that_lie(kind: str) -> None:
    async def story(raw: Raw, two: Side) -> None:
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
        _, refusal = await raw.ask(
            *raw.session.seal(wire.Read(order_id="o", runs=[wire.Run(slot, 0, 1, 16)]))
        )
        assert "whole blocks" in refusal.reason

    raw_story(story, kind=kind)


@pytest.mark.parametrize("kind", ["tcp", "tls"])
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


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_replayed_header_ends_the_session(kind: str) -> None:
    async def story(raw: Raw, two: Side) -> None:
        slot = two.reserved(1)[0]
        sealed = raw.write(slot=slot)
        await raw.ask(*sealed, b"x" * 8192)
        _, refusal = await raw.ask(*sealed, b"y" * 8192)
        assert isinstance(refusal, wire.RefusalFrame)
        assert two.view.blocks[slot, 0, 0] != ord("y")
        await until(raw.channel.broken)

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
    async def story(raw: Raw, two: Side) -> None:
        raw.socket.sendall(sent)
        raw.socket.shutdown(socket.SHUT_WR)
        await until(raw.channel.broken)
        await until(lambda: dict(two.counters) == {f"refused_{counted}": 1})

    raw_story(story)


def test_a_writer_that_stops_in_the_middle_of_a_frame_frees_the_slot() -> None:
    async def story(raw: Raw, two: Side) -> None:
        slot = two.reserved(1)[0]
        mac, header = raw.write(slot=slot)
        prefix = struct.pack("<IIII", 3, len(mac), len(header), 8192)
        raw.socket.sendall(prefix + mac + header + b"x" * 8191)
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
