"""Messages of a stream's subject as they are published; those that a lost connection swallowed are read later.

A plain subscription delivers sooner than any consumer, because it need not wait for the message to be stored, and costs
the server nothing more. After a reconnect, messages from the last known place of the stream on are read again, and only
then those that came meanwhile. So nothing is missed; something may come twice. Decisions carry an identity that drops
repeats, KV progress may be repeated at will.

Missed messages are asked for one by one, not by a consumer: a process that may make a push consumer can have the server
send stored messages to any subject, and that is a permission that workers shall not need.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from halfmoon.bus.client import DirectClient
from halfmoon.bus.errors import PeerUnreachable, StreamRefused
from halfmoon.bus.jetstream import JetStream
from halfmoon.bus.tasks import end_tasks

#: Period of noting the place in the stream, which bounds the messages that are read again.
MARK_S = 5.0
#: A message published this long ago has reached the stream, however busy the server is.
SETTLE_S = 0.5


class StreamTail:
    """`open`, then iterate over (subject, payload); endless. `lost_connection` is called by the bus after each
    reconnect.
    """

    def __init__(self, nc: DirectClient, stream: str, subject: str) -> None:
        self._nc = nc
        self._jetstream = JetStream(nc)
        self._stream = stream
        self._subject = subject
        self._mark = 0
        self._created = ""
        self._received: deque[tuple[str, bytes]] = deque()
        self._held: deque[tuple[str, bytes]] | None = None
        self._wake = asyncio.Event()
        self._losses = 0
        #: Of the connection whose loss is known here.
        self._reconnects = nc.stats["reconnects"]
        self._sub: Subscription | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def open(self) -> None:
        """Nothing published after this returns is missed."""
        self._sub = await self._nc.subscribe_raw(self._subject, self._on_message)
        self._mark = await self._last_seq()  # an answered request: the server has the subscription
        self._tasks = [asyncio.create_task(self._keep_mark())]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        await end_tasks(self._tasks)
        if self._sub is not None and not self._nc.is_closed:
            with contextlib.suppress(NatsError):
                await self._sub.unsubscribe()

    def lost_connection(self) -> None:
        """Hold messages that come from now on until the missed ones have been read."""
        self._losses += 1
        self._reconnects = self._nc.stats["reconnects"]
        if self._held is None:
            self._held = deque()
            self._tasks.append(asyncio.create_task(self._catch_up()))

    async def __aiter__(self) -> AsyncIterator[tuple[str, bytes]]:
        while not self._closed:
            while self._received:
                yield self._received.popleft()
            self._wake.clear()
            if not self._received:
                await self._wake.wait()

    def _on_message(self, subject: bytes, _: bytes, payload: bytes, __: bytes | None) -> None:
        # Messages of a new connection that come before the bus reports it would overtake those that the old one lost.
        if self._nc.stats["reconnects"] != self._reconnects:
            self.lost_connection()
        (self._received if self._held is None else self._held).append((subject.decode(), payload))
        self._wake.set()

    async def _catch_up(self) -> None:
        while True:
            losses = self._losses
            try:
                last = await self._last_seq()
                if last > self._mark:
                    await self._read_up_to(last)
                if losses == self._losses:  # else something after `last` was missed too
                    break
            except (PeerUnreachable, StreamRefused):  # the server is not ready yet
                await asyncio.sleep(0.1)
        held, self._held = self._held or deque(), None
        self._received.extend(held)
        self._wake.set()
        # Published just before we were subscribed again, a message may not have been in the stream when that
        # was asked.
        await asyncio.sleep(SETTLE_S)
        with contextlib.suppress(PeerUnreachable, StreamRefused):
            if losses == self._losses:
                await self._read_up_to(await self._last_seq())

    async def _read_up_to(self, last: int) -> None:
        while self._mark < last:
            message = await self._jetstream.message(
                self._stream, seq=self._mark + 1, next_by_subj=self._subject
            )
            if message is None:
                self._mark = last
                return
            self._received.append((message.subject, message.payload))
            self._wake.set()
            self._mark = message.seq

    async def _keep_mark(self) -> None:
        """Moves the mark to the stream's end by the answer before the last.

        Everything up to there has been sent to us since. For the newest answer that is certain only with one server:
        with three, an answer and a message come by different ways. An answer that comes after a loss, to a question
        from before it, is of no use.
        """
        earlier = self._mark
        while True:
            before = self._losses, self._created
            await asyncio.sleep(MARK_S)
            if self._held is None and self._nc.is_connected:
                with contextlib.suppress(PeerUnreachable, StreamRefused):
                    last = await self._last_seq()
                    if before == (self._losses, self._created):
                        self._mark, earlier = earlier, last
                        continue
            earlier = self._mark

    async def _last_seq(self) -> int:
        info = await self._jetstream.info(self._stream)
        # A stream that is kept in memory is lost with its server, and made again: it counts from 1.
        if info.created != self._created:
            self._created, self._mark = info.created, 0
        return info.last_seq
