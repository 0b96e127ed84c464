"""The TCP data port and who comes to it: strangers without a secret, and peers that do not keep to the protocol."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from store_harness import until
from test_tcp_refusals import Raw, raw_story, tell
from transport_harness import Side, call

from halfmoon.schemas.events import Endpoint
from halfmoon.store.errors import TransferError, TransferTimeout
from halfmoon.store.transports.base import Slice
from halfmoon.store.transports.tcp import admission, server, wire
from halfmoon.store.transports.tcp.admission import Admission
from halfmoon.store.transports.tcp.streams import Seal
from tests.eventually import BOUND_S, eventually, eventually_here

#: Far more levels than Python's recursion has, in few bytes.
NESTED = b"\x81\xa1x" + b"\x91" * 1000 + b"\xc0"
#: The begin of a TLS record of 16 KiB, which an end waits for.
RECORD = b"\x16\x03\x01\x40\x00"


@pytest.fixture(autouse=True)
def no_thread_ends_by_an_exception(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    yield
    assert not raised


def address_of(two: Side) -> tuple[str, int]:
    host, _, port = two.hello.endpoints[0].address.partition("://")[2].rpartition(":")
    return host, int(port)


def is_gone(connection: socket.socket, byte: bytes) -> bool:
    """Sends it, and is told whether the other end has closed before."""
    try:
        connection.sendall(byte)
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


class ClockAhead:
    """In place of `time`: as far ahead as a test says."""

    ahead_ns = 0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns


async def reads(one: Side, two: Side) -> None:
    """A peer gets in, and what it asked for."""
    theirs = two.stored(1, order_id="peer")
    await one.transport.read(two.peer, [Slice(0, theirs[0], 0, 1)], call(order_id="peer"))


def serving_threads() -> int:
    return sum(thread.name.startswith("store-tcp") for thread in threading.enumerate())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_nested_header_is_refused_and_ends_the_connection(kind: str) -> None:
    async def story(raw: Raw, two: Side) -> None:
        _, refusal = await raw.ask(genuine_mac(raw, NESTED), NESTED)
        assert isinstance(refusal, wire.RefusalFrame)
        assert two.counters["refused_malformed"] == 1
        await until(raw.channel.broken)

    raw_story(story, kind=kind)


def genuine_mac(raw: Raw, header: bytes) -> bytes:
    """On bytes that are no header: who has the session's key can make it."""
    return raw.key and Seal(raw.key, b"link", server=False).make(header)


def test_a_stranger_that_sends_a_byte_now_and_then_is_gone_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "ADMISSION_S", 0.5)

    async def story(one: Side, two: Side) -> None:
        one.meet(two)
        threads = serving_threads()
        with socket.create_connection(address_of(two), timeout=BOUND_S) as stranger:
            stranger.sendall(RECORD)

            # 600 bytes at the most: the record is not whole.
            await eventually(lambda: is_gone(stranger, b"x"), "the stranger is gone", every_s=0.2)
        await until(lambda: serving_threads() == threads)
        assert two.counters["refused_stranger"] == 1
        await reads(one, two)

    tell(story)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\xff\xff",  # a record that is longer than any
        struct.pack("<III", 2, 0, 400_000),  # no record
    ],
)
def test_a_stranger_that_announces_much_is_gone_at_once(sent: bytes) -> None:
    async def story(one: Side, two: Side) -> None:
        one.meet(two)
        with socket.create_connection(address_of(two), timeout=BOUND_S) as stranger:
            stranger.sendall(sent)
            assert len(await asyncio.to_thread(stranger.recv, 4096)) < 64  # an alert of TLS
            assert await asyncio.to_thread(stranger.recv, 1) == b""
        assert dict(two.counters) == {"refused_wrong_secret": 1}
        await reads(one, two)

    tell(story)


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_any_number_of_silent_strangers_holds_few_connections_and_keeps_no_peer_out(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        await reads(one, two)
        assert one.tcp is not None
        [link] = one.tcp._idle["two"]
        files, threads = open_files(), serving_threads()
        strangers = [socket.create_connection(address_of(two), timeout=BOUND_S) for _ in range(300)]
        try:
            most = admission.STRANGERS_PER_ADDRESS_MAX
            await until(lambda: two.counters["refused_stranger"] >= 300 - most)
            await until(lambda: open_files() - files - 300 <= most + 1)
            await until(lambda: serving_threads() - threads <= most + 1)
            assert not link.broken(), "a peer is no stranger"
            one.transport.forget("two")
            await one.transport.read(two.peer, [Slice(0, 0, 0, 1)], call(order_id="peer"))
        finally:
            for stranger in strangers:
                stranger.close()
        await until(lambda: serving_threads() <= threads)
        await until(lambda: open_files() - files <= 6)

    tell(story, kind=kind)


def test_a_peer_that_sends_a_byte_now_and_then_holds_its_slot_no_longer_than_a_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ClockAhead()
    monkeypatch.setattr(server, "time", clock)

    async def story(raw: Raw, two: Side) -> None:
        slot = two.reserved(1)[0]
        mac, header = raw.write(slot=slot)

        peer = raw.socket
        peer.sendall(struct.pack("<IIII", 3, len(mac), len(header), 8192) + mac + header)

        def gone() -> bool:
            clock.ahead_ns += 10**9
            return is_gone(peer, b"x")

        # A second of the server's after each byte, and 6000 bytes at the most: the message is not whole.
        await eventually(gone, "the peer is gone", every_s=0.02)
        await until(lambda: two.counters["refused_stalled"] == 1)
        assert two.guard.begin_write("o", "w", [slot]) == ""

    raw_story(story, theirs={"transfer_ns_max": 60 * 10**9})


def test_a_server_that_sends_a_byte_now_and_then_holds_no_caller_past_its_deadline() -> None:
    async def story(one: Side, two: Side) -> None:
        with socket.create_server(("127.0.0.1", 0)) as liar:

            def drip() -> None:
                connection = liar.accept()[0]
                with connection:
                    connection.sendall(RECORD)
                    # 12,000 bytes at the most: the record is not whole.
                    eventually_here(lambda: is_gone(connection, b"x"), "the caller is gone", every_s=0.01)

            two.hello.endpoints[0] = Endpoint(
                transport="tcp", address=f"tcp://127.0.0.1:{liar.getsockname()[1]}"
            )
            dripping = asyncio.create_task(asyncio.to_thread(drip))
            with pytest.raises(TransferTimeout, match="the deadline passed"):
                await one.transport.read(two.peer, [Slice(0, 0, 0, 1)], call(seconds=0.7))
            await dripping

    tell(story)


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_read_of_too_much_is_refused(kind: str) -> None:
    async def story(raw: Raw, two: Side) -> None:
        slot = two.stored(1)[0]
        for runs in ([wire.Run(slot, 0, 1)] * 10_000, [wire.Run(slot, 0, 2**62)]):
            _, refusal = await raw.ask(*raw.session.seal(wire.Read(order_id="o", runs=runs)))
            assert isinstance(refusal, wire.RefusalFrame)
        assert (two.counters["refused_too_large"], two.counters["refused_outside"]) == (1, 1)

    raw_story(story, kind=kind)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:",
        "tcp://\0:1",
        f"tcp://{'a' * 300}:1",
        "ipc://x",
        "tcp://127.0.0.1:-1",
    ],
)
@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_an_address_that_is_none_is_a_peer_that_cannot_be_reached(kind: str, address: str) -> None:
    async def story(one: Side, two: Side) -> None:
        wrong = msgspec.structs.replace(two.hello.endpoints[0], address=address)
        with pytest.raises(TransferError):
            await one.transport.read(two.own_peer([wrong]), [Slice(0, 0, 0, 1)], call(seconds=1))

    tell(story, kind=kind)


@pytest.mark.pure
def test_the_stranger_that_waited_longest_goes() -> None:
    strangers: Admission[int] = Admission(strangers_max=4, per_address_max=2)
    assert [strangers.enter(number, "a") for number in range(3)] == [None, None, 0]
    assert [strangers.enter(number, "b") for number in (10, 11, 12)] == [None, None, 10]
    assert strangers.enter(20, "c") == 1
    strangers.leave(2)
    strangers.leave(2)
    assert strangers.enter(21, "c") is None
    assert len(strangers) == 4
