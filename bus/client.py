"""nats-py's client, with subscriptions that are heard as they are parsed, and messages that leave in the same
turn of the loop: no queue and no task in between.

A request crosses some seventeen deliveries on its way to the first token. For each the library's own
callbacks cost a queue, a turn of the loop and parsed headers, about a sixth of all that the processes do; its
publishing costs two more turns of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import MaxPayloadError

log = logging.getLogger(__name__)

_HEADERS_START = b"NATS/1.0\r\n"

#: (subject, reply subject, payload, headers as they came or None). Must not block.
RawHandler = Callable[[bytes, bytes, bytes, bytes | None], None]


class DirectClient(Client):
    """See the module. What was not subscribed by `subscribe_raw` goes the library's way."""

    def __init__(self) -> None:
        super().__init__()
        self._raw_handlers: dict[int, RawHandler] = {}
        self._writing = False

    def send(self, subject: str, payload: bytes, reply: str = "", headers: bytes = b"") -> bool:
        """Publish, at the end of this turn of the loop and in order with all else; False: there is no
        connection now.

        `headers`: lines as they are sent, each with its line end. The subject is not checked. Raises MaxPayloadError.
        """
        if not self.is_connected:
            return False
        if len(payload) > self._max_payload:
            raise MaxPayloadError
        if headers:
            size = len(_HEADERS_START) + len(headers) + 2
            command = b"HPUB %b %b %d %d\r\n%b%b\r\n%b\r\n" % (
                subject.encode(), reply.encode(), size, size + len(payload), _HEADERS_START, headers, payload
            )  # fmt: skip
        else:
            command = b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload)
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._writing:
            self._writing = True
            asyncio.get_running_loop().call_soon(self._write)
        return True

    def _write(self) -> None:
        """While the connection is away it waits for the reconnect, as all that the library has pending."""
        self._writing = False
        if self._pending and self._transport is not None and self.is_connected:
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            with contextlib.suppress(OSError, RuntimeError):  # see _flush_pending
                self._transport.writelines(pending)

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """As the library's; what is published while the connection is away leaves after the reconnect."""
        if not self.send(subject, payload, reply, header_lines(headers)):
            await super().publish(subject, payload, reply, headers)

    async def subscribe_raw(self, subject: str, handler: RawHandler, *, queue: str = "") -> Subscription:
        """Subscribe; `handler` is called within the reading of the socket. What it raises is logged."""
        subscription = await self.subscribe(subject, queue=queue)
        self._raw_handlers[subscription._id] = handler
        return subscription

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        handler = self._raw_handlers.get(sid)
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
        """While a connection is being lost the library may raise its error in a call that publishes just then.
        The reading of the socket deals with it; what must not be lost is sent again after the reconnect.
        """
        with contextlib.suppress(OSError):
            return await super()._flush_pending(force_flush)

    async def _attempt_reconnect(self) -> None:
        """A server that is cut off takes no leave: over TLS the library would wait half a minute for it to."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._attempt_reconnect()

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._raw_handlers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)


def header_lines(headers: dict[str, str] | None) -> bytes:
    """As `send` wants them; line ends within a value become blanks."""
    lines = (f"{name}: {' '.join(value.splitlines())}\r\n" for name, value in (headers or {}).items())
    return "".join(lines).encode()


def header(headers: bytes | None, name: str) -> str:
    """One header of a block as it came; "" without it."""
    _, found, rest = (headers or b"").partition(f"\r\n{name}:".encode())
    return rest.partition(b"\r\n")[0].strip().decode(errors="replace") if found else ""


def status(headers: bytes | None) -> str:
    """The status that a server put before the headers ("503": nobody is subscribed); "" without one."""
    line = (headers or b"").partition(b"\r\n")[0].split(b" ")
    return line[1].decode(errors="replace") if len(line) > 1 else ""
