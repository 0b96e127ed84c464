"""The lines that a server sends, and the subjects that may be sent to it.

nats-py splits a line at any white space, the server at blanks and tabs only: one reply subject with a form feed in it,
which any client may name, would end the reading of whoever hears it. Here a line is split as the server wrote it.

Source: NATS' client protocol (docs.nats.io, "client protocol").
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from halfmoon.bus.errors import SubjectInvalid
from halfmoon.schemas import subjects

#: The server's own bound for lines of clients is 4 KiB; its INFO names all servers of a cluster.
LINE_BYTES_MAX = 1 << 20
_END = b"\r\n"
_END_BYTES = len(_END)

#: Tokens with neither white space nor control characters nor wildcards in them, parted by single dots.
_SUBJECT = re.compile(r"[^\x00-\x20\x7f*>.]+(?:\.[^\x00-\x20\x7f*>.]+)*")
SUBJECT_CHARACTERS_MAX = 1024
#: What every NATS client's inboxes begin with, unless it is told otherwise; and those of our own processes.
CLIENT_INBOXES = ("_INBOX.",)
PROCESS_INBOXES = (f"{subjects.INBOXES}.", *CLIENT_INBOXES)


def is_subject(subject: str) -> bool:
    """Whether something can be published there: no wildcard, no blank, no control character, no empty token."""
    return len(subject) <= SUBJECT_CHARACTERS_MAX and _SUBJECT.fullmatch(subject) is not None


@functools.lru_cache(1024)
def check_subject(subject: str) -> None:
    """Raises SubjectInvalid. The server would end the connection at some of these, and misread others."""
    if not is_subject(subject):
        raise SubjectInvalid(f"no subject to publish on: {subject[:80]!r}")


def reply_subject(reply: bytes | str, inboxes: tuple[str, ...] = PROCESS_INBOXES) -> str:
    """Where a request may be answered: the reply subject that it came with, "" when there is none or it is no inbox.

    Who asks names this subject, and who answers publishes there with rights of its own: an answer to
    `halfmoon.events.…` would be a word in the log. So nothing but an inbox is answered. `inboxes`: how they begin.
    """
    try:
        subject = reply if isinstance(reply, str) else reply.decode()
    except UnicodeDecodeError:
        return ""
    return subject if subject.startswith(inboxes) and is_subject(subject) else ""


class WireParser(Parser):
    """Feeds nats-py's client, in place of its own parser."""

    def __init__(self, nc: Any) -> None:
        self.nc = nc
        self.reset()

    def reset(self) -> None:
        """A new connection begins."""
        #: The beginning of a line, or of a message, whose end has not come yet.
        self.buf = bytearray()
        #: Bytes of `buf` with which that message is whole; 0: it is a line.
        self._whole_bytes = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take in what was read. Raises ProtocolError for what no server sends."""
        if self.buf:
            self.buf += data
            if len(self.buf) < self._whole_bytes:
                return
            data, self.buf = bytes(self.buf), bytearray()
        connection, nc = self.buf, self.nc
        start, size = 0, len(data)
        while start < size:
            end = data.find(_END, start)
            if end < 0:
                if size - start > LINE_BYTES_MAX:
                    raise ProtocolError("nats: a line without an end")
                self._whole_bytes = 0
                break
            line = data[start:end]
            if line.startswith((b"MSG ", b"HMSG ")):
                sid, subject, reply, header_bytes, message_bytes = _message(line)
                begin = end + _END_BYTES
                end = begin + message_bytes
                if end + _END_BYTES > size:
                    self._whole_bytes = end + _END_BYTES - start
                    break
                headers = data[begin : begin + header_bytes] or None
                payload = data[begin + header_bytes : end]
                # Mostly heard at once: a coroutine for each would cost as much as all else here.
                if not nc.hear(sid, subject, reply, payload, headers):
                    await nc._process_msg(sid, subject, reply, payload, headers)
            else:
                await self._take_line(line)
            start = end + _END_BYTES
            if self.buf is not connection:  # it was given up meanwhile
                return
        self.buf += data[start:]

    async def _take_line(self, line: bytes) -> None:
        operation, _, rest = line.partition(b" ")
        if operation == b"PING":
            await self.nc._process_ping()
        elif operation == b"PONG":
            await self.nc._process_pong()
        elif operation == b"-ERR":
            await self.nc._process_err(rest.decode(errors="replace").strip().lower())
        elif operation == b"INFO":
            await self.nc._process_info(json.loads(rest))
        elif operation != b"+OK":
            raise ProtocolError(f"nats: unknown operation {line[:40]!r}")


def _message(line: bytes) -> tuple[int, bytes, bytes, int, int]:
    """`MSG subject sid [reply] bytes`, `HMSG subject sid [reply] bytes of headers bytes`: sid, subject, reply, both
    numbers. Raises ProtocolError.
    """
    parts = line.split(b" ")
    try:
        match parts:
            case [b"MSG", subject, sid, size]:
                message = int(sid), subject, b"", 0, int(size)
            case [b"MSG", subject, sid, reply, size]:
                message = int(sid), subject, reply, 0, int(size)
            case [b"HMSG", subject, sid, headers, size]:
                message = int(sid), subject, b"", int(headers), int(size)
            case [b"HMSG", subject, sid, reply, headers, size]:
                message = int(sid), subject, reply, int(headers), int(size)
            case _:
                raise ValueError
        if not 0 <= message[3] <= message[4]:
            raise ValueError
    except ValueError:
        raise ProtocolError(f"nats: malformed message {line[:40]!r}") from None
    return message
