"""A channel: ordered messages between two workers, bounded in both directions.

::

    header = channel.receive(lambda header: memory_for(header), timeout_s=1.0)
    channel.send(MessageHeader(Op.PARTIAL, Dtype.F32, layer=header.layer, ...), out, lse)

Rules of every implementation (`tests/store/test_channels.py`).

- Messages arrive once and in order, or the channel is lost: a gap, a repetition or anything that is no message of
  this protocol is ProtocolBroken.
- Buffers are sent from where they lie, and received into the memory that `into` names.
- An end sends `window` messages ahead of the other's receiving, no more. While it waits for room it takes in arriving
  messages, so that two ends that send at the same time do not wait for each other. Where both have used up their
  windows, `send` raises ChannelFull and has sent nothing.
- Every wait has an end: an end that does not answer in time is lost (ChannelLost), also in the middle of a message. A
  lost channel stays lost, with the same reason; its descriptor goes with `close`.
- One thread may send while another receives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from halfmoon.store.channels.counters import MessageCounts
from halfmoon.store.channels.header import HEADER_BYTES, SEALED_BYTES, MessageHeader, Op, pack_into
from halfmoon.store.channels.hello import ChannelHello, compare, decode_hello, encode_hello
from halfmoon.store.channels.inbox import GAVE_UP, REASON_BYTES_MAX, Inbox, Into
from halfmoon.store.errors import ChannelFull, ChannelLost, ChannelRefused, ProtocolBroken
from halfmoon.store.transports.tcp.streams import POLL_MS, ConnectionBroken, Stream


class WorkerChannel:
    """One end; see the module. Made by `opening.connect` and `listener.ChannelListener`."""

    def __init__(self, stream: Stream, hello: ChannelHello, timeout_s: float) -> None:
        """`timeout_s`: default of every wait, and the time that a message takes at most from its first byte on."""
        self.hello = hello
        self.sent = MessageCounts()
        self._peer: ChannelHello | None = None
        self._stream, self._seal = stream, stream.seal
        self._timeout_s = timeout_s
        self._lost: ChannelLost | None = None
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._inbox = Inbox(stream, hello, timeout_s, self._credited)
        self.received = self._inbox.counts
        self._header = memoryview(bytearray(HEADER_BYTES))
        #: Bytes of a message of the channel's own that the kernel had no room for.
        self._rest = b""
        #: Messages sent; those of data; those of them that the other end has taken, and up to which it may not send.
        self._sequence = self._data = self._taken = 0
        self._window = 0
        #: The count of `consumed` that the other end knows, and the difference at which it gets the new count.
        self._told = 0
        self._owed_max = (hello.window + 1) // 2
        self._awaiting, self._credit = False, threading.Event()
        #: A thread is in `receive`.
        self._receives = False

    def __enter__(self) -> WorkerChannel:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    @property
    def kind(self) -> str:
        return self._stream.kind

    @property
    def peer(self) -> ChannelHello:
        """The other end."""
        assert self._peer is not None, "before the hello"
        return self._peer

    @property
    def lost(self) -> ChannelLost | None:
        """Why the channel is of no use any more."""
        return self._lost

    def fileno(self) -> int:
        """Readable when a message begins, or goes on (`ready` knows of bytes that left the kernel already)."""
        return self._stream.fileno()

    def ready(self) -> bool:
        """`receive_ready` has something to do, even where the descriptor is not readable."""
        return self._lost is not None or self._owes() or self._inbox.ready()

    def restless(self) -> bool:
        """`ready` may change by time alone, so look again every POLL_MS."""
        return self._inbox.begun or bool(self._rest) or self._owes()

    def close(self) -> None:
        """Ends the channel, and the waits of other threads in it. Idempotent."""
        self._lose("closed here")
        with self._sending, self._receiving:
            self._stream.close()

    # --- in -------------------------------------------------------------------------------------------------

    def receive(self, into: Into, timeout_s: float | None = None) -> MessageHeader:
        """The next message, its payload in the memory that `into` gave for its header; `into` is asked once for a
        message. Raises ChannelLost: nothing came in time among its reasons.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        while True:
            header = self._receive(into, deadline_s)
            if header is not None:
                return header
            if time.monotonic() >= deadline_s:
                raise self._lose(f"nothing came for {timeout_s * 1e3:.0f} ms")

    def receive_ready(self, into: Into) -> MessageHeader | None:
        """As `receive`, without waiting; None: no message is whole yet. For a thread that serves several channels
        (`ChannelSelector`): a message that comes slowly holds up no other. Raises ChannelLost.
        """
        return self._receive(into, 0.0)

    def _receive(self, into: Into, until_s: float) -> MessageHeader | None:
        self._receives = True
        try:
            with self._receiving:
                self._check_lost()
                header = self._inbox.take(into, until_s)
        except ConnectionBroken as problem:
            raise self._broke(problem) from None
        except BaseException:
            # Raised by `into`: the next call must not get the second half of a message.
            self._lose("receiving was interrupted")
            raise
        finally:
            self._receives = False
        if self._owes():
            self._tell_credit()
        return header

    def _credited(self, taken: int) -> bool:
        """The other end has taken `taken` of our messages of data. False: that is impossible."""
        if not self._taken <= taken <= self._data:
            return False
        self._taken = taken
        if self._awaiting:
            self._credit.set()
        return True

    # --- out ------------------------------------------------------------------------------------------------

    def send(self, header: MessageHeader, *buffers: memoryview, timeout_s: float | None = None) -> None:
        """Returns when the kernel has all of it, so that the buffers may change. Raises ChannelLost, ChannelFull, and
        ValueError for a header that is none, or a message that is longer than the other end takes.
        """
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        size = 0
        for buffer in buffers:
            size += buffer.nbytes
        if header.op < Op.QUERY:
            raise ValueError(f"op: {header.op.name} is the channel's own")
        if size > self.peer.message_bytes_max:
            raise ValueError(
                f"payload_bytes: {size}, and {self.peer.worker_id} takes {self.peer.message_bytes_max}"
            )
        with self._sending:
            self._check_lost()
            if self._data - self._taken >= self._window:
                self._await_credit(deadline_s)
            self._write(header, buffers, size, deadline_s)
        if self._owes():
            self._tell_credit()

    def _write(
        self, header: MessageHeader, buffers: Sequence[memoryview], size: int, deadline_s: float
    ) -> None:
        out = self._header
        self._seal_header(header, size, out)
        # Counted before it is sent: the answer may come to another thread at once.
        self._data += header.op >= Op.QUERY
        try:
            if self._rest:
                self._push([memoryview(self._rest)], deadline_s)
                self._rest = b""
            pieces = [out, *buffers]
            sent = self._stream.send(pieces)
            if sent < HEADER_BYTES + size:
                self._push(_after(pieces, sent), deadline_s)
        except ConnectionBroken as problem:
            raise self._broke(problem) from None
        except BaseException:
            self._lose("sending was interrupted")  # half of a message is under way
            raise
        self.sent.count(header.op, size)

    def _seal_header(self, header: MessageHeader, size: int, out: memoryview) -> None:
        """The next message's header. Raises ValueError: a field does not fit."""
        consumed = self._inbox.consumed
        pack_into(out, header, size, self._sequence + 1, consumed)
        self._sequence += 1
        self._told = consumed
        if self._seal is not None:
            out[SEALED_BYTES:] = self._seal.make(out[:SEALED_BYTES])

    def _push(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        """The rest of a message, as there is room. Raises ConnectionBroken."""
        while pieces:
            sent = self._stream.send(pieces)
            if sent:
                pieces = _after(pieces, sent)
            elif time.monotonic() >= deadline_s:
                raise ConnectionBroken("takes nothing, and the buffers to it are full")
            else:
                self._check_lost()
                self._take_in(writable=True)

    def _await_credit(self, deadline_s: float) -> None:
        """Until the other end has taken one more. Raises ChannelFull, ChannelLost."""
        full_since: tuple[int, float] | None = None
        self._awaiting = True
        try:
            while True:
                self._credit.clear()
                if self._data - self._taken < self._window:
                    return
                self._check_lost()
                if self._inbox.consumed > self._told:  # the other end may wait for the same
                    self._post(MessageHeader(Op.CREDIT), b"")
                now_s = time.monotonic()
                full_since = self._full_since(full_since, now_s)
                if full_since is not None and now_s - full_since[1] >= POLL_MS / 1e3:
                    raise ChannelFull(
                        f"{self.peer.worker_id} has {self._window} messages to take,"
                        f" and we have {self.hello.window} of it: receive first"
                    )
                if now_s >= deadline_s:
                    raise self._lose(f"has not taken {self._window} messages")
                self._take_in(writable=False)
        except ConnectionBroken as problem:
            raise self._broke(problem) from None
        finally:
            self._awaiting = False

    def _full_since(self, before: tuple[int, float] | None, now_s: float) -> tuple[int, float] | None:
        """Since when all that the other end may send lies here, and no other thread has taken any."""
        if self._receives or not self._inbox.full:
            return None
        if before is not None and before[0] == self._inbox.consumed:
            return before
        return self._inbox.consumed, now_s

    def _take_in(self, *, writable: bool) -> None:
        """Waits for room (or for credit), POLL_MS at most; stores arriving messages. Raises ConnectionBroken."""
        if self._receives:
            # Another thread takes it in.
            if writable:
                self._stream.wait(readable=False, writable=True)
            else:
                self._credit.wait(POLL_MS / 1e3)
        # It waits without the lock, or it would keep out a thread that comes to receive.
        elif self._stream.wait(readable=True, writable=writable) and self._receiving.acquire(blocking=False):
            try:
                self._inbox.store()
            finally:
                self._receiving.release()

    # --- messages of the channel's own ------------------------------------------------------------------------

    def _owes(self) -> bool:
        """Half of the window was consumed here, and the other end does not know it."""
        return self._inbox.consumed - self._told >= self._owed_max

    def _tell_credit(self) -> None:
        """Send the credit in a message of its own. Never waits: a thread that sends carries it, or comes here next."""
        while self._owes() and self._lost is None and self._sending.acquire(blocking=False):
            try:
                if not self._post(MessageHeader(Op.CREDIT), b""):
                    return
            finally:
                self._sending.release()

    def _post(self, header: MessageHeader, payload: bytes) -> bool:
        """Send without waiting; False: there is no room for another. Bytes that the kernel does not take go first next
        time.
        """
        try:
            if self._rest:
                self._rest = self._rest[self._stream.send([memoryview(self._rest)]) :]
                if self._rest:
                    return False
            out = bytearray(HEADER_BYTES)
            self._seal_header(header, len(payload), memoryview(out))
            message = bytes(out) + payload
            # It is under way even if nothing was taken: TLS has made its record, and sends that one next.
            self._rest = message[self._stream.send([memoryview(message)]) :]
        except ConnectionBroken as problem:
            self._lose(str(problem))
            return False
        self.sent.count(header.op, len(payload))
        return True

    def greet(self, *, first: bool, deadline_s: float) -> None:
        """Exchange hellos; the end that connected is `first`. Raises ChannelRefused, naming the field in which the ends
        differ, and ChannelLost.
        """
        try:
            if first:
                self._say_hello(deadline_s)
            while (raw := self._inbox.hello(deadline_s)) is None:
                if time.monotonic() >= deadline_s:
                    raise ConnectionBroken("no hello came in time")
        except ConnectionBroken as problem:
            lost = self._broke(problem)
            if problem.kind == "error":
                raise ChannelRefused(lost.reason.removeprefix(GAVE_UP)) from None
            raise lost from None
        try:
            theirs = decode_hello(raw)
            compare(self.hello, theirs)
        except ChannelRefused as problem:
            self._give_up(str(problem))
            self._lose(str(problem))
            raise
        if not first:
            self._say_hello(deadline_s)
        self._peer, self._window = theirs, theirs.window
        self._inbox.greeted = True

    def _say_hello(self, deadline_s: float) -> None:
        raw = encode_hello(self.hello)
        with self._sending:
            self._write(MessageHeader(Op.HELLO), [memoryview(raw)], len(raw), deadline_s)

    # --- the end --------------------------------------------------------------------------------------------

    def _check_lost(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(self._lost.peer, self._lost.reason)

    def _lose(self, reason: str, kind: type[ChannelLost] = ChannelLost) -> ChannelLost:
        """The channel is lost, for the first reason; the error to raise."""
        if self._lost is None:
            peer = self._peer.worker_id if self._peer is not None else "the other end"
            self._lost = kind(peer, reason)
            self._stream.shut()
        return type(self._lost)(self._lost.peer, self._lost.reason)

    def _broke(self, problem: ConnectionBroken) -> ChannelLost:
        """The connection is of no use; an end that broke the rules gets the name of the rule."""
        if problem.kind != "malformed":
            return self._lose(str(problem))
        self._give_up(str(problem))
        return self._lose(str(problem), ProtocolBroken)

    def _give_up(self, reason: str) -> None:
        """Sends the other end the reason, if that needs no wait."""
        if self._lost is None and self._sending.acquire(blocking=False):
            try:
                self._post(MessageHeader(Op.ERROR), reason.encode(errors="replace")[:REASON_BYTES_MAX])
            finally:
                self._sending.release()


def _after(pieces: Sequence[memoryview], sent: int) -> Sequence[memoryview]:
    """The pieces without their first `sent` bytes."""
    for number, piece in enumerate(pieces):
        if sent < piece.nbytes:
            return [piece.cast("B")[sent:], *pieces[number + 1 :]]
        sent -= piece.nbytes
    return []
