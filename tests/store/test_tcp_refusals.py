"""What the TCP server refuses, with a reason to the caller and a count for the operator."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio
from transport_harness import Side, another_key, call

from halfmoon.store import tcp_wire as wire
from halfmoon.store.errors import PeerUnreachable, TransferError, TransferRefused, TransferTimeout
from halfmoon.store.slots import Owner
from halfmoon.store.transport import Slice

Story = Callable[[Side, Side], Awaitable[None]]


def tell(story: Story, *, kind: str = "tcp", **changes: Any) -> None:
    """`changes` are of the calling side."""

    async def run() -> None:
        one, two = Side(kind, "one", **changes), Side(kind, "two")
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
        context: Any = zmq.asyncio.Context()
        liar = context.socket(zmq.ROUTER)
        port = liar.bind_to_random_port("tcp://127.0.0.1")

        async def lie() -> None:
            identity, _, _ = await liar.recv_multipart()
            challenge = wire.Challenge(nonce=secrets.token_bytes(16), proof=secrets.token_bytes(32))
            await liar.send_multipart([identity, b"", wire.encode(challenge)])

        lying = asyncio.create_task(lie())
        two.hello.endpoints[0] = type(two.hello.endpoints[0])(transport="tcp", address=f"tcp://127.0.0.1:{port}")
        with pytest.raises(TransferRefused, match="does not know the cluster's secret"):
            await one.transport.read(two.peer, [Slice(0, 0, 0, 1)], call())
        await lying
        context.destroy(linger=0)

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


class Raw:
    """A caller that speaks frames by hand."""

    def __init__(self, two: Side) -> None:
        self._two = two
        self._context: Any = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(two.hello.endpoints[0].address)
        self.session: wire.Session | None = None

    async def enter(self) -> None:
        nonce, secret = secrets.token_bytes(16), self._two.config.cluster_secret
        _, challenge = await self.ask(b"", wire.encode(wire.Greeting(nonce=nonce)))
        nonces = nonce + challenge.nonce
        answer = wire.Answer(node_id="raw", proof=wire.proof(secret, "client", nonces, "raw"))
        await self.ask(b"", wire.encode(answer))
        self.session = wire.Session(wire.proof(secret, "session", nonces), "client")

    async def ask(self, *frames: bytes) -> tuple[bytes, Any]:
        await self.socket.send_multipart(list(frames))
        mac, raw, *_ = await asyncio.wait_for(self.socket.recv_multipart(), 3)
        return mac, wire.decode(raw)

    def write(self, *, slot: int, layers: int = 1, sums: list[int] | None = None) -> tuple[bytes, bytes]:
        assert self.session is not None
        runs = [wire.Run(slot, 0, layers)]
        return self.session.seal(
            wire.Write(order_id="o", party="w", runs=runs, sums=[0] * layers if sums is None else sums)
        )

    def close(self) -> None:
        self._context.destroy(linger=0)


def raw_story(story: Callable[[Raw, Side], Awaitable[None]]) -> None:
    async def run(one: Side, two: Side) -> None:
        raw = Raw(two)
        try:
            await story(raw, two)
        finally:
            raw.close()

    tell(run)


def test_frames_before_authentication() -> None:
    async def story(raw: Raw, two: Side) -> None:
        slot = two.reserved(1)[0]
        header = wire.encode(wire.Write(order_id="o", party="w", runs=[wire.Run(slot, 0, 1)], sums=[0], number=1))
        for frames in ((b"", header, b"x" * 8192), (b"\0" * 32, header), (b"", b"rubbish"), (b"",)):
            _, refusal = await raw.ask(*frames)
            assert isinstance(refusal, wire.Refusal)
        assert two.counters["refused_unauthenticated"] == 2
        assert two.counters["refused_malformed"] == 2
        assert not two.view.blocks.any()

    raw_story(story)


def test_wrong_sizes_and_wrong_sums() -> None:
    async def story(raw: Raw, two: Side) -> None:
        await raw.enter()
        slot = two.reserved(1)[0]
        good = b"x" * 8192
        for payload in ([b"x" * 8191], [b"x" * 8193], [], [good, good]):
            _, refusal = await raw.ask(*raw.write(slot=slot), *payload)
            assert isinstance(refusal, wire.Refusal), payload
        assert (two.counters["refused_wrong_size"], two.counters["refused_corrupted"]) == (3, 1)
        _, refusal = await raw.ask(*raw.write(slot=slot), good)
        assert (refusal.kind, two.counters["refused_corrupted"]) == ("corrupted", 2)
        _, refusal = await raw.ask(*raw.write(slot=slot, sums=[]), good)
        assert "checksums" in refusal.reason
        _, refusal = await raw.ask(*raw.write(slot=slot, layers=5), good)
        _, refusal = await raw.ask(*raw.write(slot=slot + 99), good)
        assert two.counters["refused_outside"] == 2
        two.book.release_order("o")
        two.book.close_writer(Owner("o", "w"), "node-one")
        assert two.book.counts().free == 16

    raw_story(story)


def test_a_replayed_or_forged_header_ends_the_session() -> None:
    async def story(raw: Raw, two: Side) -> None:
        await raw.enter()
        slot = two.reserved(1)[0]
        sealed = raw.write(slot=slot)
        await raw.ask(*sealed, b"x" * 8192)
        _, refusal = await raw.ask(*sealed, b"y" * 8192)
        assert isinstance(refusal, wire.Refusal)
        assert two.view.blocks[slot, 0, 0] != ord("y")
        _, refusal = await raw.ask(*raw.write(slot=slot), b"z" * 8192)
        assert refusal.reason == "authenticate first"

    raw_story(story)


def test_a_server_that_hangs_is_a_timeout_and_one_that_is_not_there_is_unreachable() -> None:
    async def story(one: Side, two: Side) -> None:
        context: Any = zmq.Context()
        silent = context.socket(zmq.ROUTER)
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        endpoint = type(two.hello.endpoints[0])
        two.hello.endpoints[0] = endpoint(transport="tcp", address=f"tcp://127.0.0.1:{port}")
        started = time.monotonic()
        with pytest.raises(TransferTimeout):
            await one.transport.read(two.peer, [Slice(0, 0, 0, 1)], call())
        assert 0.9 < time.monotonic() - started < 2
        context.destroy(linger=0)
        with pytest.raises(PeerUnreachable):
            await one.transport.read(two.peer, [Slice(0, 0, 0, 1)], call())

    tell(story)
