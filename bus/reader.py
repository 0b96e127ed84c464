"""An ordered read of a JetStream stream from a sequence on: no gap, no repeat, across reconnects and server
restarts.

It is an ephemeral push consumer without acknowledgements. A gap in its delivery sequence, a missing idle
heartbeat, a reconnect or a consumer that the server forgot all end the same way: a new consumer from the last
sequence seen.

Source: NATS ADR-17 (ordered consumer); written here because the log needs the stream sequence and the
server's timestamp of each message at little cost per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from halfmoon.bus.client import DirectClient, header
from halfmoon.bus.errors import PeerUnreachable, StreamRecreated, StreamRefused
from halfmoon.bus.jetstream import API, JetStream

IDLE_HEARTBEAT_S = 1.0
_HEARTBEATS_MISSED = 3


class StreamMessage:
    """One stored message: `seq` in the stream, `at_ns` the server's time."""

    __slots__ = ("at_ns", "payload", "pending", "seq", "subject")

    def __init__(self, seq: int, at_ns: int, subject: str, payload: bytes, pending: int) -> None:
        self.seq = seq
        self.at_ns = at_ns
        self.subject = subject
        self.payload = payload
        self.pending = pending


class StreamReader:
    """`async for message in StreamReader(...)`: endless, from after a sequence on. Raises StreamRecreated."""

    def __init__(self, nc: DirectClient, stream: str, *, subjects: Sequence[str], after: int = 0) -> None:
        self._nc = nc
        self._jetstream = JetStream(nc)
        self._stream = stream
        self._subjects = list(subjects)
        self._created = ""
        self.last_seq = after
        self._expected = 1
        self._consumer = ""
        self._inbox = ""
        self._sub: Subscription | None = None
        self._flowing: asyncio.Future[None] | None = None
        self._received: deque[StreamMessage] = deque()
        self._wake = asyncio.Event()
        self._heard_at = 0.0
        self._reset = True
        self._closed = False

    async def open(self) -> None:
        """Nothing published after this returns is missed. Reading calls it where nobody did."""
        await self._subscribe()

    async def close(self) -> None:
        self._closed = True
        self._wake.set()
        await self._drop()

    def lost_connection(self) -> None:
        """The client reconnected: messages that were under way to us may be gone."""
        self._reset = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[StreamMessage]:
        while not self._closed:
            while self._received:
                message = self._received.popleft()
                self.last_seq = message.seq
                yield message
            if self._reset or time.monotonic() - self._heard_at > IDLE_HEARTBEAT_S * _HEARTBEATS_MISSED:
                await self._restart()
                continue
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_HEARTBEAT_S):  # wait_for may swallow a cancellation
                    await self._wake.wait()

    async def _restart(self) -> None:
        try:
            await self._subscribe()
        except (NatsError, PeerUnreachable, StreamRefused):
            await asyncio.sleep(0.1)  # server away or stream not ready: keep trying until closed

    async def _subscribe(self) -> None:
        await self._drop()
        self._received.clear()
        created = (await self._jetstream.info(self._stream)).created
        if self._created not in ("", created):
            raise StreamRecreated(
                f"the stream {self._stream} was made anew; what was read up to {self.last_seq} is gone"
            )
        self._created = created
        self._expected = 1
        self._reset = False  # from here on: messages may come before the answer to the request below
        self._inbox = inbox = self._nc.new_inbox()
        self._sub = await self._nc.subscribe_raw(inbox, functools.partial(self._on_message, inbox))
        config = {
            "deliver_subject": inbox,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.last_seq + 1,
            # Not acknowledged and not delivered again: a gap in the consumer's own numbers makes a new consumer.
            "ack_policy": "none",
            "max_deliver": 1,
            "filter_subjects": self._subjects,
            "idle_heartbeat": int(IDLE_HEARTBEAT_S * 1e9),
            "flow_control": True,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": 30_000_000_000,
        }
        try:
            answer = await self._jetstream.ask(
                f"CONSUMER.CREATE.{self._stream}", {"stream_name": self._stream, "config": config}
            )
        except BaseException:
            self._reset = True
            raise
        self._consumer = str(answer["name"])
        self._heard_at = time.monotonic()

    async def _drop(self) -> None:
        sub, self._sub = self._sub, None
        name, self._consumer = self._consumer, ""
        if sub is None or self._nc.is_closed:
            return
        try:
            await sub.unsubscribe()
            if name and self._nc.is_connected:
                await self._nc.publish(f"{API}.CONSUMER.DELETE.{self._stream}.{name}", b"")
        except NatsError:
            return  # the server forgets an inactive consumer by itself

    def _on_message(
        self, inbox: str, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None
    ) -> None:
        if inbox != self._inbox:
            return  # of a consumer that we have left
        self._heard_at = time.monotonic()
        if not reply.startswith(b"$JS.ACK."):
            stalled = header(headers, "Nats-Consumer-Stalled") or reply.decode()
            if stalled:
                self._flowing = asyncio.ensure_future(self._nc.publish(stalled, b""))
            # A heartbeat names the last number delivered: so a lost message is noticed though none comes after it.
            last = header(headers, "Nats-Last-Consumer")
            if last and int(last) != self._expected - 1:
                self._reset = True
                self._wake.set()
            return
        # $JS.ACK.[domain.account.]stream.consumer.delivered.stream_seq.consumer_seq.time.pending[.token]
        tokens = reply.split(b".")
        if len(tokens) >= 12:
            tokens = tokens[2:]
        # The consumer's number: the stream's has gaps where subjects are filtered or messages expired.
        if int(tokens[6]) != self._expected:
            self._reset = True
        elif not self._reset:
            self._expected += 1
            self._received.append(
                StreamMessage(int(tokens[5]), int(tokens[7]), subject.decode(), payload, int(tokens[8]))
            )
        self._wake.set()
