"""The lines that a server sends, and the subjects that may be sent to it.

nats-py splits a line at any white space, the server at blanks and tabs only: one reply subject with a form feed in it,
which any client may name, would end the reading of its receiver. Here a line is split as the server wrote it.

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
_NO_MESSAGE = -1

#: Tokens with neither white space nor control characters nor wildcards in them, parted by single dots.
_SUBJECT = re.compile(r"[^\x00-\x20\x7f*>.]+(?:\.[^\x00-\x20\x7f*>.]+)*")
SUBJECT_CHARACTERS_MAX = 1024
#: Default prefix of every NATS client's inboxes; and the prefixes of our own processes.
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
    """The request's reply subject, where it may be answered; "" when there is none or it is no inbox.

    The asker names this subject, and the responder publishes there with rights of its own: an answer to
    `halfmoon.events.…` would be an event in the log. So nothing but an inbox is answered. `inboxes`: their prefixes.
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
        #: `parse` is under way.
        self.parsing = False
        self.buf = bytearray()
        self._message: tuple[int, bytes, bytes] = 0, b"", b""
        self._header_bytes = 0
        #: Of the payload, headers included; below 0: a line comes next.
        self._message_bytes = _NO_MESSAGE

    def take(self, data: bytes) -> bytes:
        """Deliver messages to those who hear them at once, and return what is for `parse`: all from the first line on
        that is something else. Only while `parse` has nothing to do.
        """
        if self._message_bytes != _NO_MESSAGE and not self.nc.hears(self._message[0]):
            return data  # the rest of a message that `parse` began
        received: bytes | bytearray = data
        if self.buf:
            self.buf += data
            received = self.buf
        start, rest = 0, b""
        while True:
            if self._message_bytes == _NO_MESSAGE:
                end = received.find(_END, start)
                if end < 0 and len(received) - start <= LINE_BYTES_MAX:
                    break
                if end < 0 or not self._begin_heard(bytes(received[start:end])):
                    rest, start = bytes(received[start:]), len(received)
                    break
                start = end + len(_END)
            body, end = start + self._header_bytes, start + self._message_bytes
            if len(received) < end + len(_END):
                break
            headers = bytes(received[start:body]) or None
            payload = bytes(received[body:end])
            start, self._message_bytes = end + len(_END), _NO_MESSAGE
            self.nc.deliver(*self._message, payload, headers)
        if received is data:
            self.buf += data[start:]
        else:
            del self.buf[:start]
        return rest

    def _begin_heard(self, line: bytes) -> bool:
        """Whether it begins a message that is heard at once."""
        operation, _, rest = line.partition(b" ")
        if operation not in (b"MSG", b"HMSG"):
            return False
        try:
            self._begin_message(rest, with_headers=operation == b"HMSG")
        except ProtocolError:
            return False  # which `parse` raises
        if self.nc.hears(self._message[0]):
            return True
        self._message_bytes = _NO_MESSAGE
        return False

    async def parse(self, data: bytes = b"") -> None:
        """Take in bytes from the socket. Raises ProtocolError for bytes that no server sends."""
        self.parsing = True
        try:
            await self._parse(data)
        finally:
            self.parsing = False

    async def _parse(self, data: bytes) -> None:
        received = self.buf
        received += data
        while received is self.buf:  # else the connection was given up meanwhile
            if self._message_bytes == _NO_MESSAGE:
                end = received.find(_END)
                if end < 0:
                    if len(received) > LINE_BYTES_MAX:
                        raise ProtocolError("nats: a line without an end")
                    return
                line = bytes(received[:end])
                del received[: end + len(_END)]
                await self._take_line(line)
            else:
                size = self._message_bytes
                if len(received) < size + len(_END):
                    return
                headers = bytes(received[: self._header_bytes]) or None
                payload = bytes(received[self._header_bytes : size])
                del received[: size + len(_END)]
                self._message_bytes = _NO_MESSAGE
                sid, subject, reply = self._message
                await self.nc._process_msg(sid, subject, reply, payload, headers)

    async def _take_line(self, line: bytes) -> None:
        operation, _, rest = line.partition(b" ")
        if operation in (b"MSG", b"HMSG"):
            self._begin_message(rest, with_headers=operation == b"HMSG")
        elif operation == b"PING":
            await self.nc._process_ping()
        elif operation == b"PONG":
            await self.nc._process_pong()
        elif operation == b"-ERR":
            await self.nc._process_err(rest.decode(errors="replace").strip().lower())
        elif operation == b"INFO":
            await self.nc._process_info(json.loads(rest))
        elif operation != b"+OK":
            raise ProtocolError(f"nats: unknown operation {line[:40]!r}")

    def _begin_message(self, arguments: bytes, *, with_headers: bool) -> None:
        """`subject sid [reply] [bytes of headers] bytes`."""
        parts = arguments.split(b" ")
        sizes = 2 if with_headers else 1
        if len(parts) - sizes not in (2, 3):
            raise ProtocolError(f"nats: malformed message {arguments[:40]!r}")
        try:
            sid, size = int(parts[1]), int(parts[-1])
            header_bytes = int(parts[-2]) if with_headers else 0
        except ValueError:
            raise ProtocolError(f"nats: malformed message {arguments[:40]!r}") from None
        if not 0 <= header_bytes <= size:
            raise ProtocolError(f"nats: malformed message {arguments[:40]!r}")
        self._message = sid, parts[0], parts[2] if len(parts) - sizes == 3 else b""
        self._header_bytes, self._message_bytes = header_bytes, size
