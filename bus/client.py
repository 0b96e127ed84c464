"""nats-py's client, with subscriptions that are heard as they are parsed: no queue and no task in between.

A request crosses some seventeen deliveries on its way to the first token. For each the library's own callbacks cost a
queue, a turn of the loop and parsed headers, about a sixth of all that the processes do.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.subscription import Subscription

log = logging.getLogger(__name__)

#: (subject, reply subject, payload, headers as they came or None). Must not block.
Hear = Callable[[bytes, bytes, bytes, bytes | None], None]


class DirectClient(Client):
    """See the module. What was not subscribed by `hear` goes the library's way."""

    def __init__(self) -> None:
        super().__init__()
        self._hearing: dict[int, Hear] = {}

    async def hear(self, subject: str, handler: Hear, *, queue: str = "") -> Subscription:
        """Subscribe; `handler` is called within the reading of the socket. What it raises is logged."""
        subscription = await self.subscribe(subject, queue=queue)
        self._hearing[subscription._id] = handler
        return subscription

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        handler = self._hearing.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)  # type: ignore[arg-type]
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            handler(subject, reply, data, headers)
        except Exception:  # whatever it is: raised here it would end the reading for everybody
            log.exception("a message on %s was not taken", subject.decode(errors="replace"))

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """While a connection is being lost the library may raise its error to whoever publishes just then. The reading
        of the socket deals with it; what must not be lost is sent again after the reconnect.
        """
        with contextlib.suppress(OSError):
            return await super()._flush_pending(force_flush)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._hearing.pop(sid, None)
        super()._remove_sub(sid, max_msgs)


def header(headers: bytes | None, name: str) -> str:
    """One header of a block as it came; "" without it."""
    _, found, rest = (headers or b"").partition(f"\r\n{name}:".encode())
    return rest.partition(b"\r\n")[0].strip().decode(errors="replace") if found else ""


def status(headers: bytes | None) -> str:
    """The status that a server put before the headers ("503": nobody is subscribed); "" without one."""
    line = (headers or b"").partition(b"\r\n")[0].split(b" ")
    return line[1].decode(errors="replace") if len(line) > 1 else ""
