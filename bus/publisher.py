"""Pipelined publishing into JetStream: in order, with message ids, sent again until acknowledged.

Messages leave in the order of `submit`. One that was lost with a connection is sent again, together with all
unacknowledged ones after it, in the same order; the stream drops a message id that it has (its duplicate window is far
longer than our patience). So a fact is stored once, and two facts of one process are not swapped: while a stream has no
leader (three servers, one of them just died) the server answers so, and nothing new leaves before the messages that it
could not take. Only when a leader ends may messages that were under way to it be lost in silence and a later one reach
the next leader: then these are swapped, which is rare, and which readers must bear.
"""

# The idea is go-back-n, as in a sliding window: send without waiting, number everything, and when an acknowledgement
# is missing begin again at the oldest message that lacks one. It is simpler here than between two machines, because
# the receiver forgives repeats: JetStream drops a message id that it has seen, so sending too much again costs bytes
# and nothing else. It is harder because there are several receivers in turn, the leaders of a stream, and one that
# dies does not report the messages that it took along.
#
# Turned down:
# - One message at a time, as the NATS client's own publish does it: each fact would wait a round trip for the one
#   before it.
# - A queue with a task that empties it: every message left one turn of the event loop later. `submit` writes at once.
# - Sending only the overdue message again: newer ones would overtake it.
# - An expected last sequence on every message, which would make the order certain: the log has many authors, so
#   nearly every message would be refused. `submit` offers it to a caller that must be the only author.
#
# In doubt: the swap at a leader's end. JetStream compares the last message of a stream or of a subject, not of an
# author, so it cannot refuse the later one. The core takes an early event for an unknown one, and heartbeats mend that.

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
from nats.errors import MaxPayloadError

from halfmoon.bus.client import DirectClient, envelope_bytes
from halfmoon.bus.errors import BusError, BusOverloaded, LogMoved
from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.wire import check_subject

UNACKED_MAX = 100_000
RESEND_AFTER_S = 1.0
SETTLE_PAUSE_S = 0.02
WRONG_LAST_SEQUENCE = 10071
#: Of several servers: another's copy of this message is just being stored.
IN_PROCESS = 10158
IN_PROCESS_S = 0.02


class _AckError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct):
    """The stream's answer. A message that is no answer of a stream has neither `stream` nor `error`."""

    stream: str = ""
    seq: int = 0
    error: _AckError | None = None


_decode_ack = msgspec.json.Decoder(_Ack).decode


class _Outgoing:
    __slots__ = ("done", "headers", "payload", "reply", "sent_at", "subject", "submitted_at")

    def __init__(
        self, subject: str, payload: bytes, reply: str, headers: bytes, done: asyncio.Future[int] | None
    ) -> None:
        self.subject = subject
        self.payload = payload
        self.reply = reply
        self.headers = headers
        self.done = done
        self.submitted_at = time.monotonic()
        self.sent_at = 0.0


class Publisher:
    """One per connection. `submit` never blocks; `flush` waits until all is stored."""

    def __init__(self, nc: DirectClient) -> None:
        self._nc = nc
        self._prefix = nc.new_inbox()
        self._next = 0
        self._pending: dict[int, _Outgoing] = {}
        #: Count of reconnects when everything pending was last sent: after another one the old goes before the new.
        self._reconnects = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: list[asyncio.Task[None]] = []
        #: The stream could not take a message: everything pending goes again, before anything new.
        self._held = False

    async def start(self) -> None:
        self._reconnects = self._nc.stats["reconnects"]
        await self._nc.subscribe_raw(f"{self._prefix}.*", self._on_ack)
        self._tasks = [asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        for item in self._pending.values():
            if item.done and not item.done.done():
                item.done.set_exception(BusError("the connection was closed before the message was stored"))
        self._pending.clear()

    @property
    def unacked(self) -> int:
        return len(self._pending)

    @property
    def oldest_s(self) -> float:
        """How long the oldest message that is not stored has waited for it; 0 when all are stored."""
        oldest = next(iter(self._pending.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.submitted_at

    def submit(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str,
        expected_last_seq: int | None = None,
        done: asyncio.Future[int] | None = None,
    ) -> None:
        """Send one message; `done` gets its stream sequence.

        Raises BusOverloaded when too many are unacknowledged, MaxPayloadError when the server would not carry
        it, SubjectInvalid.
        """
        check_subject(subject)
        lines = f"Nats-Msg-Id: {message_id}\r\n"
        if expected_last_seq is not None:
            lines += f"Nats-Expected-Last-Sequence: {expected_last_seq}\r\n"
        headers = lines.encode()
        if len(payload) + envelope_bytes(headers) > self._nc.max_payload:
            raise MaxPayloadError
        if len(self._pending) >= UNACKED_MAX:
            raise BusOverloaded(f"{UNACKED_MAX} messages wait for their acknowledgement")
        number = self._next
        self._next += 1
        item = _Outgoing(subject, payload, f"{self._prefix}.{number}", headers, done)
        self._pending[number] = item
        self._empty.clear()
        # After a reconnect that `resend_all` has not seen, it would overtake older ones: it goes with them.
        if not self._held and self._nc.stats["reconnects"] == self._reconnects:
            self._send(item)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything submitted so far is stored; False when time ran out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._empty.is_set()

    async def settle(self, timeout_s: float) -> bool:
        """Wait until all messages from before this call are stored, whatever is submitted meanwhile; False: not yet."""
        mark = self._next
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._oldest() < mark:
                    await asyncio.sleep(SETTLE_PAUSE_S)
        return self._oldest() >= mark

    def _oldest(self) -> int:
        return next(iter(self._pending), self._next)

    def resend_all(self) -> None:
        """After a reconnect: everything unacknowledged again, in order."""
        self._reconnects = self._nc.stats["reconnects"]
        for item in self._pending.values():
            self._send(item)

    def _send(self, item: _Outgoing) -> None:
        item.sent_at = time.monotonic()
        self._nc.send(item.subject, item.payload, item.reply, item.headers)

    async def _watch(self) -> None:
        """Some acknowledgement is overdue: send everything unacknowledged again, from the oldest on."""
        while True:
            await asyncio.sleep(RESEND_AFTER_S / 4)
            if self._held and self._nc.is_connected:
                self._held = False
                self.resend_all()
            elif self._pending and self._nc.is_connected:
                oldest = next(iter(self._pending.values()))
                # All, not the overdue one alone, which newer ones would overtake; the stream drops second copies.
                if oldest.sent_at < time.monotonic() - RESEND_AFTER_S:
                    self.resend_all()

    def _on_ack(self, subject: bytes, _: bytes, payload: bytes, __: bytes | None) -> None:
        name = subject[len(self._prefix) + 1 :]
        number = int(name) if name.isdigit() else -1
        item = self._pending.get(number)
        if item is None:
            return
        if not payload:
            # 503: no stream listens. Newer messages wait too, or they would be stored first once one does.
            self._held = True
            return
        try:
            ack = _decode_ack(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # No stream's answer. The message stays pending, and `_watch` sends it again.
            return
        if ack.error is not None:
            if ack.error.err_code == IN_PROCESS:
                # The copy that is being stored may still fail. Asked again, the server acknowledges it or takes ours.
                asyncio.get_running_loop().call_later(IN_PROCESS_S, self._again, number, item)
            elif ack.error.err_code != WRONG_LAST_SEQUENCE:
                # A fact without a waiting caller is never given up: nobody would hear of the loss.
                if item.done is None or ack.error.code >= 500:
                    # The stream cannot store just now. `_watch` sends it again, with everything behind it.
                    self._held = True
                    return
                self._settle(number, BusError(f"{item.subject}: {ack.error.description}"))
            else:
                self._settle(number, LogMoved(ack.error.description))
            return
        if not ack.stream:
            return
        del self._pending[number]
        if item.done is not None and not item.done.done():
            item.done.set_result(ack.seq)
        if not self._pending:
            self._empty.set()

    def _again(self, number: int, item: _Outgoing) -> None:
        if number in self._pending:
            self._send(item)

    def _settle(self, number: int, problem: BusError) -> None:
        item = self._pending.pop(number)
        if item.done is not None and not item.done.done():
            item.done.set_exception(problem)
        if not self._pending:
            self._empty.set()
