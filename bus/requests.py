"""Requests over one inbox subscription: a counter and a future each, nothing more.

Source: what NATS clients call the new-style request; written here because two of them are in the way of every first
token, and the client library's costs three times as much.
"""

from __future__ import annotations

import asyncio
import itertools

from nats.aio.client import Client
from nats.aio.msg import Msg

from halfmoon.bus.errors import PeerUnreachable

_NO_RESPONDERS = "503"


class Requests:
    """One per connection. `start` before `ask`."""

    def __init__(self, nc: Client) -> None:
        self._nc = nc
        self._prefix = nc.new_inbox()
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[Msg]] = {}

    async def start(self) -> None:
        await self._nc.subscribe(f"{self._prefix}.*", cb=self._receive)

    async def ask(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The payload of the first answer. Raises PeerUnreachable; and NATS' own errors when nothing can be sent."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Msg] = loop.create_future()
        inbox = f"{self._prefix}.{next(self._numbers)}"
        self._waiting[inbox] = answer
        timer = loop.call_later(timeout_s, self._give_up, answer, f"no answer on {subject} within {timeout_s} s")
        try:
            await self._nc.publish(subject, payload, reply=inbox)
            reply = await answer
        finally:
            timer.cancel()
            del self._waiting[inbox]
        if not reply.data and reply.headers and reply.headers.get("Status") == _NO_RESPONDERS:
            raise PeerUnreachable(f"nobody serves {subject}")
        return reply.data

    @staticmethod
    def _give_up(answer: asyncio.Future[Msg], reason: str) -> None:
        if not answer.done():
            answer.set_exception(PeerUnreachable(reason))

    async def _receive(self, msg: Msg) -> None:
        answer = self._waiting.get(msg.subject)
        if answer is not None and not answer.done():
            answer.set_result(msg)
