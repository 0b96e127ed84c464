"""An engine's batches over ZeroMQ: each once and in order, whatever is missed, repeated, out of order or anew."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest
import zmq
import zmq.asyncio

from halfmoon.workers.adapters import kv_event_reader
from halfmoon.workers.adapters.kv_event_reader import KvEventReader
from halfmoon.workers.adapters.kv_events import EngineRemoved, EventBatch
from tests.eventually import eventually, within


class Publisher:
    """An engine's two ends, and what the reader beside it was told: numbers of batches, "lost", "restarted".

    They are ports of `host`, or, of a test that is marked `pure`, ZeroMQ's own queues within the process.
    """

    def __init__(self, context: zmq.asyncio.Context | None, host: str = "127.0.0.1") -> None:
        self.heard: list[int | str] = []
        self._context = context or zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        if context is None:
            ports = []
            for each in (self._pub, self._router):
                each.setsockopt(zmq.IPV6, 1)
                ports.append(each.bind_to_random_port(f"tcp://{host}"))
            self.events, self.replay = (f"tcp://{host}:{port}" for port in ports)
        else:
            self.events, self.replay = "inproc://events", "inproc://replay"
            self._pub.bind(self.events)
            self._router.bind(self.replay)

    def batch_told(self, batch: EventBatch) -> None:
        (event,) = batch.events
        assert isinstance(event, EngineRemoved)
        (number,) = event.block_hashes
        assert isinstance(number, int)
        self.heard.append(number)

    def batches_lost(self) -> None:
        self.heard.append("lost")

    def engine_restarted(self) -> None:
        self.heard.append("restarted")

    async def subscribed(self) -> None:
        await within(self._pub.recv(), "the reader subscribes")

    async def send(self, *numbers: int, at_s: float = 1.0) -> None:
        for number in numbers:
            await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload(number, at_s)])

    async def answer(self, start: int, numbers: Sequence[int], at_s: float = 1.0) -> None:
        """What the reader asks for from `start` on is these."""
        who, _, asked = await within(self._router.recv_multipart(), "the reader asks for past batches")
        assert int.from_bytes(asked, "big") == start
        for number in numbers:
            await self._router.send_multipart(
                [who, b"", b"", number.to_bytes(8, "big"), payload(number, at_s)]
            )
        await self._router.send_multipart([who, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def told(self, *expected: int | str) -> None:
        """Returns when the reader has told as much, which must be this."""
        await eventually(lambda: len(self.heard) >= len(expected), f"{len(expected)} are told")
        assert self.heard == list(expected)

    def close(self) -> None:
        self._context.destroy(linger=0)


def payload(number: int, at_s: float) -> bytes:
    return msgspec.msgpack.encode([at_s, [{"type": "BlockRemoved", "block_hashes": [number]}], 0])


Reading = Callable[..., AbstractAsyncContextManager[tuple[Publisher, KvEventReader]]]


@pytest.fixture(name="reading")
def any_reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reading:
    """`reading(replay=...)`: a publisher, and the reader that is subscribed to it."""
    context = None
    if request.node.get_closest_marker("pure"):
        context = zmq.asyncio.Context()  # of both ends, as queues within a process need it
        monkeypatch.setattr(context, "term", lambda: None)  # the reader's, while the engine is there
        monkeypatch.setattr(zmq.asyncio, "Context", lambda: context)
    return functools.partial(reading_of, context)


@contextlib.asynccontextmanager
async def reading_of(
    context: zmq.asyncio.Context | None, host: str = "127.0.0.1", *, replay: bool = True
) -> AsyncIterator[tuple[Publisher, KvEventReader]]:
    engine = Publisher(context, host)
    reader = KvEventReader(engine, events=engine.events, replay=engine.replay if replay else "")
    reader.open()
    task = asyncio.create_task(reader.run())
    try:
        await engine.subscribed()
        if replay:
            await engine.answer(0, [])
        yield engine, reader
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        reader.close()
        engine.close()


@pytest.mark.pure
async def test_what_comes_twice_is_told_once(reading: Reading) -> None:
    async with reading() as (engine, _):
        await engine.send(0, 1, 1, 0, 2)
        await engine.told(0, 1, 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_what_was_missed_is_asked_for(reading: Reading, host: str) -> None:
    async with reading(host) as (engine, reader):
        await engine.send(0, 3)
        await engine.answer(1, [1, 2, 3])
        await engine.send(4)
        await engine.told(0, 1, 2, 3, 4)
        assert (reader.counts["gaps"], reader.counts["lost"]) == (1, 0)


@pytest.mark.pure
async def test_past_batches_that_come_out_of_order_are_lost_in_part_and_never_told_backwards(
    reading: Reading,
) -> None:
    async with reading() as (engine, _):
        await engine.send(0, 4)
        await engine.answer(1, [2, 1, 3])
        await engine.told(0, "lost", 2, 3, 4)


@pytest.mark.pure
async def test_what_nobody_has_any_more_is_lost(reading: Reading) -> None:
    async with reading() as (engine, _):
        await engine.send(0, 3)
        await engine.answer(1, [])
        await engine.told(0, "lost", 3)


@pytest.mark.pure
async def test_without_a_way_to_ask_a_gap_is_lost(reading: Reading) -> None:
    async with reading(replay=False) as (engine, _):
        await engine.send(7, 9)
        await engine.told(7, "lost", 9)


async def test_an_engine_that_does_not_answer_is_not_waited_for(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reading() as (engine, reader):
        monkeypatch.setattr(kv_event_reader, "REPLAY_S", 0.01)
        await engine.send(0, 3)
        await engine.told(0, "lost", 3)
        assert reader.counts["replays_unanswered"] == 1


@pytest.mark.pure
async def test_numbers_that_begin_anew_are_those_of_an_engine_that_was_started_again(
    reading: Reading,
) -> None:
    async with reading() as (engine, _):
        await engine.send(0, 1, 2, at_s=1.0)
        await engine.send(0, at_s=2.0)
        await engine.told(0, 1, 2, "restarted", 0)
        # This time its first ones were missed.
        await engine.send(1, 2, at_s=2.0)
        await engine.send(1, at_s=3.0)
        await engine.answer(0, [0, 1], at_s=3.0)
        await engine.told(0, 1, 2, "restarted", 0, 1, 2, "restarted", 0, 1)


@pytest.mark.pure
async def test_nonsense_is_counted_and_passed_over(reading: Reading) -> None:
    async with reading() as (engine, reader):
        for frames in ([b"x"], [b"", b"short", b""], [b"", bytes(8), b"", b""]):
            await engine._pub.send_multipart(frames)
        await engine.send(0)
        await engine.told(0)
        assert reader.counts["malformed"] == 3
