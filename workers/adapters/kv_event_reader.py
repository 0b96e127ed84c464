"""Reader of an engine's KV events: each batch once, in order, and a notice where some are lost.

The engine publishes batches with numbers (PUB), and keeps the newest to be asked for (ROUTER). Batches that a slow or
cut connection swallowed are asked for again; those that the engine does not have any more are lost. Numbers that begin
anew, later by the engine's clock, are those of an engine that was started again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import zmq
import zmq.asyncio

from halfmoon.workers.adapters.kv_events import EventBatch, read_batch

#: Of one message: a batch has the tokens of a step's blocks.
MESSAGE_BYTES_MAX = 64 << 20
#: The engine answers between two steps.
REPLAY_S = 5.0
_SEQ_BYTES = 8
_END = (-1).to_bytes(_SEQ_BYTES, "big", signed=True)
_UNREAD_MAX = 100_000


async def replayed(
    context: zmq.asyncio.Context, address: str, start: int, wait_s: float, malformed: Callable[[], None]
) -> AsyncGenerator[tuple[int, bytes], None]:
    """The batches from number `start` on that the publisher still has: number and payload. Raises TimeoutError when no
    message comes in time; ZMQError for an address that makes no sense. `malformed` is called for a malformed message.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    # Without it ZeroMQ takes an address in brackets, and never connects.
    dealer.setsockopt(zmq.IPV6, int("[" in address))
    try:
        dealer.connect(address)
        await dealer.send_multipart([b"", start.to_bytes(_SEQ_BYTES, "big")])
        while True:
            frames = await asyncio.wait_for(dealer.recv_multipart(), wait_s)
            # `["", topic, seq, payload]`; releases before 0.20 leave the topic out.
            if len(frames) < 3 or len(frames[-2]) != _SEQ_BYTES:
                malformed()
                continue
            if frames[-2] == _END:
                return
            yield int.from_bytes(frames[-2], "big"), frames[-1]
    finally:
        dealer.close(linger=0)


class KvEventListener(Protocol):
    """The receiver of an engine's KV events."""

    def batch_told(self, batch: EventBatch) -> None:
        """The next one."""

    def batches_lost(self) -> None:
        """Some batches before the next one will never come."""

    def engine_restarted(self) -> None:
        """The engine restarted: earlier batches no longer hold."""


class KvEventReader:
    """`open`, then `run` as a task; `close` at the end. `replay` "": missed batches are lost."""

    def __init__(self, listener: KvEventListener, *, events: str, replay: str = "", topic: str = "") -> None:
        self._listener = listener
        self._events, self._replay, self._topic = events, replay, topic
        #: "batches", "malformed", "gaps", "replays", "lost", "restarts".
        self.counts: Counter[str] = Counter()
        self._context: zmq.asyncio.Context | None = None
        self._sub: zmq.asyncio.Socket | None = None
        #: Number of the next batch; None: none was heard yet.
        self._expected: int | None = None
        self._newest_s = 0.0

    def open(self) -> None:
        """Raises ValueError: an address makes no sense."""
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set_hwm(_UNREAD_MAX)
        self._sub.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self._sub.setsockopt(zmq.IPV6, int("[" in self._events))
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
        try:
            self._sub.connect(self._events)
        except zmq.ZMQError as problem:
            raise ValueError(f"{self._events}: {problem}") from None

    async def run(self) -> None:
        """Until it is cancelled."""
        assert self._sub is not None
        if self._replay:
            await self._ask_again(0)
        while True:
            frames = await self._sub.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != _SEQ_BYTES:
                self.counts["malformed"] += 1
                continue
            await self._hear(int.from_bytes(frames[1], "big"), frames[2])

    def close(self) -> None:
        if self._sub is not None:
            self._sub.close(linger=0)
        if self._context is not None:
            self._context.term()
        self._sub = self._context = None

    async def _hear(self, seq: int, payload: bytes) -> None:
        batch = read_batch(payload)
        expected = self._expected
        if expected is not None and seq < expected:
            if batch.at_s <= self._newest_s:
                # Delivered already: it came live and in the replay.
                return
            self.counts["restarts"] += 1
            self._listener.engine_restarted()
            self._expected = expected = 0
        if expected is not None and seq > expected:
            self.counts["gaps"] += 1
            if self._replay:
                await self._ask_again(expected)
            if self._expected is not None and seq > self._expected:
                self._lose()
                self._expected = seq
        if self._expected is None or seq == self._expected:
            self._tell(seq, batch)

    def _tell(self, seq: int, batch: EventBatch) -> None:
        self._expected = seq + 1
        self._newest_s = max(self._newest_s, batch.at_s)
        self.counts["batches"] += 1
        self.counts["malformed"] += batch.malformed
        self._listener.batch_told(batch)

    def _lose(self) -> None:
        self.counts["lost"] += 1
        self._listener.batches_lost()

    async def _ask_again(self, start: int) -> None:
        """Deliver all batches that the engine still has from `start` on."""
        assert self._context is not None
        self.counts["replays"] += 1
        first = True
        try:
            async for seq, payload in replayed(self._context, self._replay, start, REPLAY_S, self._malformed):
                if seq < (self._expected or start):
                    continue
                if seq > (self._expected or start):
                    if first and start == 0 and self._expected is None:
                        pass  # from before this adapter's time
                    else:
                        self._lose()
                first = False
                self._tell(seq, read_batch(payload))
        except TimeoutError:
            self.counts["replays_unanswered"] += 1

    def _malformed(self) -> None:
        self.counts["malformed"] += 1
