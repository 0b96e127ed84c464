"""Requests over one inbox subscription: a counter and a future each, nothing more.

A question is asked again each second, and at once after a reconnect, until it is answered or given up: with a server
that dies its message is lost, or the answer's. The responder knows a repeat by its inbox (`halfmoon.bus.serving`), so
nothing is done twice.

Source: the new-style request of NATS clients; written here because two of them are in the way of every first token,
and the client library's costs three times as much.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass

from halfmoon.bus.client import DirectClient, status
from halfmoon.bus.errors import PeerUnreachable
from halfmoon.bus.tasks import end_tasks

ASK_AGAIN_S = 1.0
_NO_RESPONDERS = "503"


@dataclass(slots=True)
class _Question:
    subject: str
    payload: bytes
    answer: asyncio.Future[bytes | None]
    asked_at: float
    #: The server's "no responders" is not the end: the responder is expected back.
    await_responder: bool


class Requests:
    """One per connection. `start` before `ask`."""

    def __init__(self, nc: DirectClient) -> None:
        self._nc = nc
        self._prefix = nc.new_inbox()
        self._numbers = itertools.count()
        self._waiting: dict[bytes, _Question] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._nc.subscribe_raw(f"{self._prefix}.*", self._receive)
        self._tasks = [asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        await end_tasks(self._tasks)

    async def ask(
        self, subject: str, payload: bytes, *, timeout_s: float, await_responder: bool = False
    ) -> bytes:
        """The payload of the first answer. Raises PeerUnreachable, at once when nobody serves the subject and
        not `await_responder`; and NATS' own errors when nothing can be sent.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes | None] = loop.create_future()
        inbox = f"{self._prefix}.{next(self._numbers)}"
        self._waiting[inbox.encode()] = _Question(subject, payload, answer, time.monotonic(), await_responder)
        timer = loop.call_later(
            timeout_s, self._give_up, answer, f"no answer on {subject} within {timeout_s} s"
        )
        try:
            await self._nc.publish(subject, payload, reply=inbox)
            reply = await answer
        finally:
            timer.cancel()
            del self._waiting[inbox.encode()]
        if reply is None:
            raise PeerUnreachable(f"nobody serves {subject}")
        return reply

    def ask_again(self, older_than_s: float = 0.0) -> None:
        """Ask every question again that has no answer after `older_than_s`."""
        now = time.monotonic()
        for inbox, question in self._waiting.items():
            if now - question.asked_at >= older_than_s and not question.answer.done():
                question.asked_at = now
                self._nc.send(question.subject, question.payload, inbox.decode())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(ASK_AGAIN_S / 4)
            self.ask_again(ASK_AGAIN_S)

    @staticmethod
    def _give_up(answer: asyncio.Future[bytes | None], reason: str) -> None:
        if not answer.done():
            answer.set_exception(PeerUnreachable(reason))

    def _receive(self, subject: bytes, _: bytes, payload: bytes, headers: bytes | None) -> None:
        question = self._waiting.get(subject)
        if question is not None and not question.answer.done():
            nobody = not payload and status(headers) == _NO_RESPONDERS
            if nobody and question.await_responder:
                question.asked_at = 0.0  # again at the next turn of the watch
            else:
                question.answer.set_result(None if nobody else payload)
