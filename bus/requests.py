"""Requests over one inbox subscription: a counter and a future each, nothing more.

Source: what NATS clients call the new-style request; written here because two of them are in the way of every first
token, and the client library's costs three times as much.
"""

from __future__ import annotations

import asyncio
import itertools

from halfmoon.bus.client import DirectClient, status
from halfmoon.bus.errors import PeerUnreachable

_NO_RESPONDERS = "503"


class Requests:
    """One per connection. `start` before `ask`."""

    def __init__(self, nc: DirectClient) -> None:
        self._nc = nc
        self._prefix = nc.new_inbox()
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[bytes | None]] = {}

    async def start(self) -> None:
        await self._nc.hear(f"{self._prefix}.*", self._receive)

    async def ask(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The payload of the first answer. Raises PeerUnreachable; and NATS' own errors when nothing can be sent."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes | None] = loop.create_future()
        inbox = f"{self._prefix}.{next(self._numbers)}"
        self._waiting[inbox.encode()] = answer
        timer = loop.call_later(timeout_s, self._give_up, answer, f"no answer on {subject} within {timeout_s} s")
        try:
            await self._nc.publish(subject, payload, reply=inbox)
            reply = await answer
        finally:
            timer.cancel()
            del self._waiting[inbox.encode()]
        if reply is None:
            raise PeerUnreachable(f"nobody serves {subject}")
        return reply

    @staticmethod
    def _give_up(answer: asyncio.Future[bytes | None], reason: str) -> None:
        if not answer.done():
            answer.set_exception(PeerUnreachable(reason))

    def _receive(self, subject: bytes, _: bytes, payload: bytes, headers: bytes | None) -> None:
        answer = self._waiting.get(subject)
        if answer is not None and not answer.done():
            answer.set_result(None if not payload and status(headers) == _NO_RESPONDERS else payload)
