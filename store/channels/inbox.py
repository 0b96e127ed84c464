"""The receiving half of a channel: from bytes to messages, each checked before a byte of its payload is taken.

Payload goes straight into the memory that `into` names. Only while this end sends and cannot go on are arriving
messages stored here (`store`): no more of them than the window, none larger than the limit, both by the hello. One
thread at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from halfmoon.store.channels.counters import MessageCounts
from halfmoon.store.channels.header import (
    HEADER_BYTES,
    SEALED_BYTES,
    HeaderInvalid,
    MessageHeader,
    Op,
    unpack,
)
from halfmoon.store.channels.hello import HELLO_BYTES_MAX, ChannelHello
from halfmoon.store.transports.tcp.streams import ConnectionBroken, Stream

#: Writable memory for the payload of this header, of exactly its size. Raises MessageRefused.
Into = Callable[[MessageHeader], memoryview]
#: An ERROR is no longer, nor is a reason that is sent.
REASON_BYTES_MAX = 300
GAVE_UP = "gave the channel up: "
NOTHING = memoryview(b"")


class MessageRefused(Exception):
    """Raised by `into`: this message is not taken, and why. The channel is given up."""


class Inbox:
    """See the module. Raises ConnectionBroken, of kind "malformed" for a message that the other end must not send."""

    def __init__(
        self, stream: Stream, hello: ChannelHello, timeout_s: float, credited: Callable[[int], bool]
    ) -> None:
        """`credited` hears how many of our messages the other end has taken; False: it cannot have."""
        self.counts = MessageCounts()
        #: The other end's hello is here.
        self.greeted = False
        #: Messages of data that were given to the user.
        self.consumed = 0
        self._stream, self._seal = stream, stream.seal
        self._window, self._message_bytes_max = hello.window, hello.message_bytes_max
        self._timeout_s = timeout_s
        self._credited = credited
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_done = self._payload_done = self._sequence = self._data = 0
        self._incoming: MessageHeader | None = None
        self._memory = NOTHING
        #: `_memory` is ours, not the user's.
        self._ours = False
        self._began_s = 0.0
        #: Whole messages; None: the payload is in the user's memory already.
        self._stored: deque[tuple[MessageHeader, memoryview | None]] = deque()

    @property
    def full(self) -> bool:
        """The other end has sent all that it may."""
        return self._data - self.consumed >= self._window

    @property
    def begun(self) -> bool:
        """A message is here in part, when it was last looked at."""
        return self._began_s > 0

    def ready(self) -> bool:
        """Something is here, or overdue, though the stream's descriptor is not readable."""
        return bool(self._stored) or self._overdue() or self._stream.buffered()

    def take(self, into: Into, until_s: float) -> MessageHeader | None:
        """The next message, if it is whole; waits for some of it to come, about until `until_s` (0: not at all)."""
        if self._stored:
            header, memory = self._stored.popleft()
            if memory is not None:
                self._asked(into, header)[:] = memory
        else:
            found = self._advance(into, until_s)
            if found is None:
                return None
            header = found
            if self._ours:
                self._asked(into, header)[:] = self._memory
            self._memory = NOTHING
        self.consumed += 1
        return header

    def store(self) -> None:
        """Stores arrived messages, without waiting."""
        while (header := self._advance(None, 0.0)) is not None:
            self._stored.append((header, self._memory if self._ours else None))
            self._memory = NOTHING

    def hello(self, until_s: float) -> memoryview | None:
        """The payload of the other end's hello."""
        if self._advance(None, until_s) is None:
            return None
        return self._memory

    # --- inside ---------------------------------------------------------------------------------------------

    def _advance(self, into: Into | None, until_s: float) -> MessageHeader | None:
        try:
            return self._advanced(into, until_s)
        except ConnectionBroken as problem:
            if not problem.kind and (self._header_done or self._incoming is not None):
                raise ConnectionBroken(f"{problem} in the middle of a message") from None
            raise

    def _advanced(self, into: Into | None, until_s: float) -> MessageHeader | None:
        stream, wait = self._stream, until_s > 0
        while True:
            header = self._incoming
            if header is None:
                done = self._header_done
                done += stream.receive(self._header[done:] if done else self._header, wait=wait)
                self._header_done = done
                if done < HEADER_BYTES:
                    if done:
                        self._unfinished()
                    return None
                header = self._checked()
                self._begin(header, into)
            done, size = self._payload_done, header.payload_bytes
            while done < size:
                got = stream.receive(self._memory[done:] if done else self._memory, wait=wait)
                done = self._payload_done = done + got
                # Not only when nothing came: a byte now and then would hold this thread past every deadline.
                if not got or (done < size and wait and time.monotonic() >= until_s):
                    self._unfinished()
                    return None
            self._incoming, self._header_done, self._began_s = None, 0, 0.0
            self.counts.count(header.op, size)
            if header.op is Op.ERROR:
                raise ConnectionBroken(GAVE_UP + _text(self._memory), "error")
            if header.op is not Op.CREDIT:
                return header

    def _unfinished(self) -> None:
        """The time of a message runs while it is not whole."""
        if not self._began_s:
            self._began_s = time.monotonic()
        if self._overdue():
            raise ConnectionBroken(f"no more came for {self._timeout_s * 1e3:.0f} ms")

    def _overdue(self) -> bool:
        return self._began_s > 0 and time.monotonic() - self._began_s > self._timeout_s

    def _checked(self) -> MessageHeader:
        raw = self._header
        if self._seal is not None and not self._seal.genuine(raw[:SEALED_BYTES], raw[SEALED_BYTES:]):
            raise ConnectionBroken("a header with a wrong seal", "malformed")
        try:
            header, taken = unpack(raw)
        except HeaderInvalid as problem:
            raise ConnectionBroken(str(problem), "malformed") from None
        self._sequence += 1
        if header.sequence != self._sequence:
            raise ConnectionBroken(f"sequence: {header.sequence} where {self._sequence} was due", "malformed")
        if not self._credited(taken):
            raise ConnectionBroken(f"consumed: {taken} messages, which it cannot have", "malformed")
        most = self._most(header.op)
        if header.payload_bytes > most:
            raise ConnectionBroken(
                f"payload_bytes: {header.op.name} of {header.payload_bytes}, {most} allowed", "malformed"
            )
        return header

    def _most(self, op: Op) -> int:
        """Bytes of a message of this kind, now."""
        if op >= Op.QUERY and self.greeted:
            if self.full:
                raise ConnectionBroken(f"window: more than {self._window} messages at once", "malformed")
            self._data += 1
            return self._message_bytes_max
        if op is Op.ERROR:
            return REASON_BYTES_MAX
        if op is Op.HELLO and not self.greeted:
            return HELLO_BYTES_MAX
        if op is Op.CREDIT and self.greeted:
            return 0
        raise ConnectionBroken(f"op: {op.name} out of place", "malformed")

    def _begin(self, header: MessageHeader, into: Into | None) -> None:
        """Memory for the payload."""
        self._ours = into is None or header.op < Op.QUERY
        if into is not None and header.op >= Op.QUERY:
            self._memory = self._asked(into, header)
        else:
            self._memory = memoryview(bytearray(header.payload_bytes))
        self._incoming, self._payload_done = header, 0

    def _asked(self, into: Into, header: MessageHeader) -> memoryview:
        try:
            memory = into(header)
        except MessageRefused as problem:
            raise ConnectionBroken(f"{header.op.name}: {problem}", "malformed") from None
        if memory.nbytes != header.payload_bytes:
            raise ConnectionBroken(
                f"payload_bytes: {header.op.name} of {header.payload_bytes} where {memory.nbytes} were due",
                "malformed",
            )
        return memory if memory.ndim == 1 and memory.format == "B" else memory.cast("B")


def _text(raw: memoryview) -> str:
    """A reason of the other end, safe to print."""
    text = bytes(raw).decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
