"""nats-py's client, with subscriptions that are heard as they are parsed, and messages that leave in the same
turn of the loop: no queue and no task in between.

Nothing that a message holds ends the reading of the socket: one that cannot be taken is dropped. And
nothing leaves that the server would end the connection for: a malformed subject, more than its max_payload.

A request crosses some seventeen deliveries on its way to the first token. For each the library's own
callbacks cost a queue, a turn of the loop and parsed headers, about a sixth of all that the processes do; its
publishing costs two more turns of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from halfmoon.bus.wire import WireParser, check_subject

log = logging.getLogger(__name__)

_HEADERS_START = b"NATS/1.0\r\n"
#: Between two lines of the log about messages that could not be taken.
DROPPED_SAID_S = 10.0

#: (subject, reply subject, payload, headers as they came or None). Must not block.
RawHandler = Callable[[bytes, bytes, bytes, bytes | None], None]


class DirectClient(Client):
    """See the module. Messages of other subscriptions than `subscribe_raw`'s go the library's way."""

    def __init__(self) -> None:
        super().__init__()
        self._raw_handlers: dict[int, RawHandler] = {}
        self._writing = False
        self._ps: WireParser = WireParser(self)
        #: Of the connection that there is now.
        self._reader: Any = None
        #: Messages that could not be taken.
        self.dropped = 0
        self._dropped_said_at = -math.inf

    def send(self, subject: str, payload: bytes, reply: str = "", headers: bytes = b"") -> bool:
        """Publish, at the end of this turn of the loop and in order with all else; False: there is no
        connection now.

        `headers`: lines as they are sent, each with its line end. Raises SubjectInvalid, MaxPayloadError.
        """
        check_subject(subject)
        if reply:
            check_subject(reply)
        if not self.is_connected:
            return False
        size = envelope_bytes(headers)
        if len(payload) + size > self._max_payload:
            raise MaxPayloadError
        if headers:
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
        """As the library's; a message that is published while the connection is away leaves after the reconnect."""
        if not self.send(subject, payload, reply, header_lines(headers)):
            await super().publish(subject, payload, reply, headers)

    async def subscribe_raw(self, subject: str, handler: RawHandler, *, queue: str = "") -> Subscription:
        """Subscribe; `handler` is called within the reading of the socket. Its errors are logged."""
        subscription = await self.subscribe(subject, queue=queue)
        self._raw_handlers[subscription._id] = handler
        return subscription

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        self._read_at_once()

    def _read_at_once(self) -> None:
        """From now on messages are delivered as the socket is read: by way of the library's stream each would cost a
        turn of the loop and two copies. What is no message, or is the library's, goes its way, and all behind it.
        """
        reader: Any = getattr(self._transport, "_io_reader", None)
        self._reader = reader
        if reader is not None:
            reader.feed_data = functools.partial(self._feed, reader, reader.feed_data)

    def _feed(self, reader: Any, queue: Callable[[bytes], None], data: bytes) -> None:
        """`queue` is the library's, of a connection that may be an earlier one. What came before goes first."""
        if reader is not self._reader or reader._buffer or self._ps.parsing or not self.is_connected:
            queue(data)
        elif rest := self._ps.take(data):
            queue(rest)

    def hears(self, sid: int) -> bool:
        """A message of this subscription is `deliver`ed."""
        return sid in self._raw_handlers

    def deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        """To its handler, if it has one still."""
        handler = self._raw_handlers.get(sid)
        if handler is None:
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            handler(subject, reply, data, headers)
        except Exception as problem:  # whatever it is: raised here it would end the reading for everybody
            self._drop(subject, problem, whole=True)

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        if self.hears(sid):
            self.deliver(sid, subject, reply, data, headers)
            return
        try:
            # The library decodes subjects and headers, and reports a malformed one by any error.
            await super()._process_msg(sid, subject, reply, data, headers)  # type: ignore[arg-type]
        except Exception as problem:  # whatever it is: raised here it would end the reading for everybody
            self._drop(subject, problem, whole=False)

    def _drop(self, subject: bytes, problem: Exception, *, whole: bool) -> None:
        """Log the dropped message, at most once in `DROPPED_SAID_S`; `whole`: with the traceback, for the mistake is
        ours.
        """
        self.dropped += 1
        now = time.monotonic()
        if now - self._dropped_said_at >= DROPPED_SAID_S:
            self._dropped_said_at = now
            where = subject.decode(errors="replace")
            reason = f"{type(problem).__name__}: {problem}"
            log.error(
                "a message on %s was not taken (%d so far): %s",
                where,
                self.dropped,
                reason,
                exc_info=problem if whole else None,
            )

    async def _process_err(self, err_msg: str) -> None:
        """The library closes for ever at most of the server's errors; we connect again, as after a lost connection."""
        if "authorization violation" in err_msg or "permissions violation" in err_msg or self.is_connecting:
            await super()._process_err(err_msg)
        else:
            await self._error_cb(NatsError(f"nats: {err_msg}"))
            await self._process_op_err(NatsError(f"nats: {err_msg}"))

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """While a connection is being lost the library may raise its error in a call that publishes just then.
        The reading of the socket deals with it; messages that must not be lost are sent again after the reconnect.
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


def envelope_bytes(headers: bytes) -> int:
    """The bytes that header lines add to a message: the server counts them in its max_payload."""
    return len(_HEADERS_START) + len(headers) + 2 if headers else 0


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
