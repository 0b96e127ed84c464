"""One process's connection to NATS, in halfmoon's own terms: append facts, read the log, give orders, ask and
answer.

All payloads are messages of `halfmoon.schemas`. Anything that does not decode is dropped and counted
(`invalid`), or answered with a ProcessError when it asked for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import ssl
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nkeys import NkeysError

from halfmoon.bus.client import DirectClient
from halfmoon.bus.config import PAYLOAD_BYTES_MIN, BusConfig
from halfmoon.bus.errors import BusError, BusUnreachable, NotStored, PeerError, PeerUnreachable
from halfmoon.bus.jetstream import JetStream
from halfmoon.bus.publisher import Publisher
from halfmoon.bus.reader import StreamMessage, StreamReader
from halfmoon.bus.requests import Requests
from halfmoon.bus.serving import Answerer, Responder
from halfmoon.bus.streams import StreamKeeper, StreamLimits
from halfmoon.bus.tail import StreamTail
from halfmoon.bus.tasks import end_tasks, within
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.contract.authors import kv_author, names_itself, said_by
from halfmoon.schemas.decisions import Decision, Ordered, StartDecode, StartMixed, StartPrefill
from halfmoon.schemas.events import EVENT_TYPES, Event, Stamped
from halfmoon.schemas.kv import KvMessage
from halfmoon.schemas.tokens import ProcessError
from halfmoon.schemas.types import Message

log = logging.getLogger(__name__)

M = TypeVar("M")
Handler = Callable[[Any], "Awaitable[None] | object"]

#: Decisions remembered for deduplication; anything older is treated as a duplicate.
SEEN_MAX = 1024
#: For closing a connection that was refused.
CLOSE_S = 0.2
#: A certificate that is not trusted; a file of ours that cannot be read.
_FINAL = (ssl.SSLCertVerificationError, FileNotFoundError, PermissionError)


class _Refused(Exception):
    """One end does not accept the other's identity: trying again changes nothing."""


class Bus:
    """See the module. Made by `Bus.connect`; not to be shared between event loops."""

    def __init__(self, nc: DirectClient, name: str, limits: StreamLimits) -> None:
        self.nc = nc
        self.jetstream = JetStream(nc)
        self.name = name
        self._limits = limits
        self._keeper = StreamKeeper(nc, limits)
        self.invalid = 0
        self._publisher = Publisher(nc)
        self._requests = Requests(nc)
        self._readers: set[StreamReader | StreamTail] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stamp = uuid.uuid4().hex[:12]
        self._count = 0
        #: Called when the connection is lost, before another is tried.
        self.on_loss: list[Callable[[], None]] = []
        #: Called a round trip or more after the next one has begun to carry messages.
        self.on_reconnect: list[Callable[[], None]] = []

    @property
    def unacknowledged(self) -> int:
        return self._publisher.unacked

    @property
    def unstored_s(self) -> float:
        """How long the oldest of our facts and orders waits to be stored: the server is away, or its disk is full."""
        return self._publisher.oldest_s

    # --- connection -----------------------------------------------------------------------------------------

    @classmethod
    async def connect(cls, config: BusConfig, *, name: str, limits: StreamLimits | None = None) -> Bus:
        """Connect and make sure of the streams. Raises BusUnreachable."""
        box: list[Bus] = []
        problems: list[Exception] = []

        async def reconnected() -> None:
            if box:
                box[0]._after_reconnect()

        async def lost() -> None:
            for callback in box[0].on_loss if box else []:
                callback()

        async def failed(problem: Exception) -> None:
            """nats-py would log it. Raised here while we connect, it ends the connecting."""
            if not box:
                problems[:] = [problem]
                if isinstance(problem, _FINAL) or "authorization" in str(problem).lower():
                    raise _Refused
            elif "permissions violation" in str(problem).lower():
                log.warning("%s: %s", name, problem)

        callbacks = {"disconnected_cb": lost, "reconnected_cb": reconnected, "error_cb": failed}
        options = {
            **config.options(),
            **callbacks,
            "name": name,
            "inbox_prefix": subjects.inbox(name).encode(),
        }
        nc = DirectClient()
        try:
            await within(config.connect_timeout_s, nc.connect(**options))
        except (NatsError, NkeysError, OSError, TimeoutError, ValueError, _Refused) as problem:
            cause = problems[-1] if problems else problem
            if problems:  # else it got nowhere, and has nothing to close
                with contextlib.suppress(TimeoutError, OSError, NatsError):
                    await within(CLOSE_S, nc.close())  # after a TLS handshake that failed it never returns
            reason = str(cause) or type(cause).__name__
            raise BusUnreachable(f"no NATS server takes us at {config.url}: {reason}") from None
        if nc.max_payload < PAYLOAD_BYTES_MIN:
            await nc.close()
            carries = f"max_payload is {nc.max_payload} bytes; it must be at least {PAYLOAD_BYTES_MIN}"
            raise BusUnreachable(f"the NATS server at {config.url}: {carries}")
        bus = cls(nc, name, limits or StreamLimits())
        box.append(bus)
        try:
            await bus._keeper.ensure()
        except PeerUnreachable as problem:
            await nc.close()
            reason = str(problem.__cause__) or type(problem.__cause__).__name__
            raise BusUnreachable(f"JetStream does not answer at {config.url}: {reason}") from None
        except BusError:
            await nc.close()
            raise
        await bus._publisher.start()
        await bus._requests.start()
        return bus

    def keep_streams(self) -> None:
        """Make deleted streams anew until it is closed, where it may make any. For a few processes of a cluster: each
        look is a request to the server.
        """
        if self._limits.replicas:
            self._spawn(self._keeper.keep())

    async def close(self, *, flush_s: float = 2.0) -> None:
        """Send pending messages, within `flush_s`, and close."""
        if self.nc.is_closed:
            return
        if self.nc.is_connected:
            await self._publisher.flush(flush_s)
        await self._publisher.stop()
        await self._requests.stop()
        for reader in list(self._readers):
            await reader.close()
        await end_tasks(self._tasks)
        if self.nc.is_connected:
            # Messages that matter were acknowledged above.
            with contextlib.suppress(NatsError, TimeoutError):
                await asyncio.wait_for(self.nc.flush(), flush_s)
        await self.nc.close()

    def _after_reconnect(self) -> None:
        self._spawn(self._streams_again())
        self._publisher.resend_all()
        self._requests.ask_again()
        for reader in self._readers:
            reader.lost_connection()
        for callback in self.on_reconnect:
            callback()

    async def _streams_again(self) -> None:
        """A server that was started again has lost the stream that it kept in memory."""
        while self.nc.is_connected:
            with contextlib.suppress(BusError):
                await self._keeper.ensure()
                return
            await asyncio.sleep(0.1)

    # --- the log --------------------------------------------------------------------------------------------

    def _message_id(self) -> str:
        self._count += 1
        return f"{self._stamp}-{self._count}"

    async def append(
        self,
        event: Event,
        *,
        source_id: str,
        message_id: str = "",
        expected_last_seq: int | None = None,
        within_s: float | None = None,
    ) -> int:
        """Store `event`; its sequence in the log. Raises LogMoved when `expected_last_seq` is not the log's
        last, NotStored after `within_s`.
        """
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._publisher.submit(
            subjects.event(source_id, type(event).__name__),
            encode(event),
            message_id=message_id or self._message_id(),
            expected_last_seq=expected_last_seq,
            done=done,
        )
        try:
            async with asyncio.timeout(within_s):
                return await done
        except TimeoutError:
            problem = f"the event log did not take {type(event).__name__} within {within_s:g} s"
            raise NotStored(problem) from None

    def append_soon(self, event: Event, *, source_id: str) -> None:
        """Store `event` in its turn; sent again until it is stored."""
        self._publisher.submit(
            subjects.event(source_id, type(event).__name__),
            encode(event),
            message_id=self._message_id(),
        )

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything appended and ordered so far is stored; False when time ran out."""
        return await self._publisher.flush(timeout_s)

    async def settle(self, timeout_s: float) -> bool:
        """Wait until events and decisions from before this call are stored; False when time ran out."""
        return await self._publisher.settle(timeout_s)

    async def events(
        self, *, after: int = 0, last: int | None = None, kinds: Sequence[type[Message]] = ()
    ) -> AsyncIterator[Stamped]:
        """The log from sequence `after + 1` on, each event once and in order. `kinds`: only these.

        Endless, or, with `last`, until the message of that sequence was read. It may be no event: then nothing is
        yielded for it.
        """
        if last is not None and after >= last:
            return
        wanted = [subjects.events_of_kind(kind.__name__) for kind in kinds] or [subjects.EVENTS_ALL]
        async with contextlib.aclosing(self.read(subjects.EVENTS_STREAM, *wanted, after=after)) as messages:
            async for message in messages:
                event = self._event(message)
                if event is not None:
                    yield Stamped(seq=message.seq, at_ns=message.at_ns, event=event)
                if last is not None and message.seq >= last:
                    return

    def _event(self, message: StreamMessage) -> Event | None:
        """The message's event; None where it is malformed, or of another process than its subject's."""
        with contextlib.suppress(MessageInvalid):
            event: Event = decode(message.payload, Event)
            if said_by(message.subject, event):
                return event
        self.invalid += 1
        return None

    async def last_seq(self, stream: str = subjects.EVENTS_STREAM) -> int:
        """The last sequence of the stream; 0 when it is empty."""
        return (await self.jetstream.info(stream)).last_seq

    async def held(self, stream: str) -> tuple[int, int]:
        """First and last sequence that the stream holds; the first is the greater when it holds nothing."""
        info = await self.jetstream.info(stream)
        return (info.first_seq if info.messages else info.last_seq + 1), info.last_seq

    async def read(self, stream: str, *wanted: str, after: int = 0) -> AsyncGenerator[StreamMessage, None]:
        """Messages of `stream` that match any of these subjects, in order, endless."""
        reader = StreamReader(self.nc, stream, subjects=wanted, after=after)
        self._readers.add(reader)
        try:
            async for message in reader:
                yield message
        finally:
            self._readers.discard(reader)
            await reader.close()

    # --- decisions and KV progress --------------------------------------------------------------------------

    async def order(self, ordered: Ordered, *, target_id: str) -> int:
        """Publish a decision; returns its sequence in DECISIONS once stored (or dropped there as a
        duplicate).
        """
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._submit_order(ordered, target_id, done)
        return await done

    def order_soon(self, ordered: Ordered, *, target_id: str) -> None:
        """Publish a decision in its turn; sent again until it is stored."""
        self._submit_order(ordered, target_id, None)

    @staticmethod
    def _places(decision: Decision) -> bool:
        """It is the first that is heard of an order."""
        return isinstance(decision, StartPrefill | StartMixed) or (
            isinstance(decision, StartDecode) and decision.resumes != ""
        )

    def _submit_order(self, ordered: Ordered, target_id: str, done: asyncio.Future[int] | None) -> None:
        decision = ordered.decision
        frontend_id = getattr(decision, "frontend_id", "") if self._places(decision) else ""
        self._publisher.submit(
            subjects.decision(target_id, type(decision).__name__, frontend_id),
            encode(ordered),
            message_id=ordered.message_id,
            done=done,
        )

    async def open_decisions(self, target_id: str) -> StreamTail:
        """For `follow_decisions`: nothing published after this returns is missed."""
        return await self._open_tail(subjects.DECISIONS_STREAM, subjects.decisions_for(target_id))

    async def open_placements(self, frontend_id: str) -> StreamTail:
        """For `follow_decisions`: no placement of a request of this frontend is missed."""
        return await self._open_tail(subjects.DECISIONS_STREAM, subjects.placements_for(frontend_id))

    async def _open_tail(self, stream: str, subject: str) -> StreamTail:
        tail = StreamTail(self.nc, stream, subject)
        self._readers.add(tail)
        await tail.open()
        return tail

    async def follow_decisions(self, tail: StreamTail) -> AsyncIterator[Ordered]:
        """The decisions that `tail` was opened for, each once; in order, but for one that was lost on its way
        and found again.
        """
        seen: dict[tuple[int, int], None] = {}
        forgotten = (0, -1)
        try:
            async for _, payload in tail:
                try:
                    ordered: Ordered = decode(payload, Ordered)
                except MessageInvalid:
                    self.invalid += 1
                    continue
                mark = ordered.cause_seq, ordered.position
                if mark in seen or mark <= forgotten:
                    continue
                seen[mark] = None
                if len(seen) > SEEN_MAX:
                    oldest = next(iter(seen))
                    del seen[oldest]
                    forgotten = max(forgotten, oldest)
                yield ordered
        finally:
            self._readers.discard(tail)
            await tail.close()

    async def last_decision(self) -> Ordered | None:
        """The newest decision in the stream, for any process, or None; other messages are passed over."""
        first, last = await self.held(subjects.DECISIONS_STREAM)
        for seq in range(last, max(first, 1) - 1, -1):
            stored = await self.jetstream.message(subjects.DECISIONS_STREAM, seq=seq)
            with contextlib.suppress(MessageInvalid):
                if stored is not None:
                    ordered: Ordered = decode(stored.payload, Ordered)
                    return ordered
        return None

    async def open_kv(self, worker_id: str) -> StreamTail:
        """For `follow_kv`: no KV progress published after this returns is missed."""
        return await self._open_tail(subjects.KV_STREAM, subjects.kv_for(worker_id))

    async def follow_kv(self, tail: StreamTail) -> AsyncIterator[tuple[str, KvMessage]]:
        """The KV progress that `tail` was opened for, each with its author; after a reconnect some of it may come
        again."""
        try:
            async for subject, payload in tail:
                try:
                    message: KvMessage = decode(payload, KvMessage)
                except MessageInvalid:
                    self.invalid += 1
                    continue
                if author_id := kv_author(subject, message):
                    yield author_id, message
                else:
                    self.invalid += 1
        finally:
            self._readers.discard(tail)
            await tail.close()

    # --- core NATS ------------------------------------------------------------------------------------------

    async def publish(self, subject: str, message: Message) -> None:
        """At most once, not acknowledged."""
        await self.nc.publish(subject, encode(message))

    def publish_soon(self, subject: str, message: Message, *, message_id: str = "") -> None:
        """In its turn: at most once; or, with the `message_id` of a stream's message, until it is stored."""
        if message_id:
            self._publisher.submit(subject, encode(message), message_id=message_id)
        else:
            self.nc.send(subject, encode(message))

    async def subscribe(
        self, subject: str, kind: Any, handler: Handler, *, queue: str = "", author: str = ""
    ) -> Subscription:
        """`handler(message)` for each, in order; a message that is no `kind`, or of another author than its subject
        names, is dropped and counted.

        It is called within the reading of the socket; if it is a coroutine function, each runs as a task. `author`:
        the field with the author, where that is the last name of the subject (of an event it is known).
        """
        is_event = kind in EVENT_TYPES

        def receive(heard_on: bytes, _: bytes, payload: bytes, __: bytes | None) -> None:
            try:
                message = decode(payload, kind)
            except MessageInvalid:
                self.invalid += 1
                return
            if (is_event and not said_by(heard_on.decode(), message)) or (
                author and not names_itself(heard_on.decode(), message, author)
            ):
                self.invalid += 1
                return
            result = handler(message)
            if result is not None and inspect.isawaitable(result):
                self._spawn(result)

        return await self.nc.subscribe_raw(subject, receive, queue=queue)

    async def request(
        self,
        subject: str,
        message: Message,
        kind: type[M],
        *,
        timeout_s: float,
        await_responder: bool = False,
    ) -> M:
        """The answer to one question; with `await_responder` it also waits for somebody to serve the subject.

        Raises PeerUnreachable (nobody there, or too late), PeerError (the peer's own refusal).
        """
        try:
            reply = await self._requests.ask(
                subject, encode(message), timeout_s=timeout_s, await_responder=await_responder
            )
        except NatsError as problem:
            raise PeerUnreachable(f"{subject}: {str(problem) or type(problem).__name__}") from None
        if reply.startswith(b'{"type":"ProcessError"'):
            error: ProcessError = decode(reply, ProcessError)
            raise PeerError(error.code, error.message)
        try:
            return decode(reply, kind)
        except MessageInvalid as problem:
            raise PeerError("invalid_reply", str(problem)) from None

    async def serve(
        self,
        subject: str,
        kind: Any,
        handler: Answerer,
        *,
        queue: str = "",
        author: str = "",
        published: bool = False,
    ) -> Subscription:
        """Answer requests. `handler` answers at once, or is a coroutine function: then each runs as a task.
        It is called once for each request, however often that comes. `author`: as of `subscribe`. `published`: what
        is published there is heard too, and not answered; then `handler` is no coroutine function.
        """
        responder = Responder(
            self.nc,
            kind,
            handler,
            spawn=self._spawn,
            invalid=self._count_invalid,
            author=author,
            published=published,
        )
        return await self.nc.subscribe_raw(subject, responder.receive, queue=queue)

    def _count_invalid(self) -> None:
        self.invalid += 1

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
