"""Saves the log of a cluster: from its streams to a file.

The end is fixed first: events up to the last one stored at the start, then decisions up to the last one stored after
that. So the file holds every decision on its events that had been published by then, and none on a later event. Where
the head of the log has expired, the file begins with the oldest snapshot from which the rest leads on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from importlib.metadata import version
from pathlib import Path

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError
from halfmoon.bus.reader import StreamMessage
from halfmoon.bus.tasks import end_tasks
from halfmoon.conductor.log_reading import leading_snapshot
from halfmoon.conductor.replay.logfile import (
    DecisionLine,
    EventLine,
    Header,
    InvalidLine,
    LogWriter,
    Progress,
    ProgressLine,
    SnapshotLine,
)
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import MessageInvalid, decode
from halfmoon.schemas.contract.authors import kv_author, said_by
from halfmoon.schemas.decisions import Ordered
from halfmoon.schemas.events import ClusterConfigured, Event
from halfmoon.schemas.kv import KvLoaded, KvReady, TransferFailed

#: Between two messages of a stream that still has some.
READ_S_MAX = 30.0
_PROGRESS = tuple(kind.__name__ for kind in (KvReady, KvLoaded, TransferFailed))


class LogEmpty(ValueError):
    """There is nothing to save."""


async def save(
    bus: Bus, path: Path, *, cluster: str = "", told: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Write the log that `bus` leads to; the numbers of events and decisions. `told` is called with (event, last) at
    times.

    Raises LogEmpty, BusError and OSError.
    """
    first_seq, last_seq = await bus.held(subjects.EVENTS_STREAM)
    first_decision, last_decision = await bus.held(subjects.DECISIONS_STREAM)
    _, last_progress = await bus.held(subjects.KV_STREAM)
    snapshot = await leading_snapshot(bus) if first_seq > 1 else None
    after = snapshot[0] if snapshot else 0
    async with (
        contextlib.aclosing(
            _read(bus, subjects.EVENTS_STREAM, subjects.EVENTS_ALL, last_seq, after)
        ) as events,
        contextlib.aclosing(
            _read(bus, subjects.DECISIONS_STREAM, subjects.DECISIONS_ALL, last_decision)
        ) as decisions,
        contextlib.aclosing(_read(bus, subjects.KV_STREAM, subjects.KV_ALL, last_progress)) as progress,
    ):
        event = await anext(events, None)
        if event is None:
            raise LogEmpty("the event log is empty")
        decision = await _next_decision(decisions)
        header = _header(event, last_seq, cluster, decision if first_decision > 1 else None)
        with LogWriter(path, header) as out:
            if snapshot is not None:
                out.write(SnapshotLine(seq=after, snapshot=snapshot[1]))
            moved = await _next_progress(progress)
            while event is not None:
                while moved is not None and moved.at_ns < event.at_ns:
                    out.write(moved)
                    moved = await _next_progress(progress)
                out.write(_event_line(event))
                # Decisions on events that have expired are of no use to anybody.
                while decision is not None and decision.cause_seq <= event.seq:
                    if decision.cause_seq >= header.first_seq:
                        out.write(decision)
                    decision = await _next_decision(decisions)
                if told is not None and event.seq % 10_000 == 0:
                    told(event.seq, last_seq)
                event = await anext(events, None)
            return out.events, out.decisions


def _header(first: StreamMessage, last_seq: int, cluster: str, oldest: DecisionLine | None) -> Header:
    line = _event_line(first)
    began = line.event if isinstance(line, EventLine) else None
    configured = began if isinstance(began, ClusterConfigured) else None
    return Header(
        format=1,
        saved_by=version("halfmoon"),
        cluster=cluster,
        code_version=configured.code_version if configured else "",
        log_version=configured.log_version if configured else 0,
        first_seq=first.seq,
        last_seq=last_seq,
        first_decision=(oldest.cause_seq, oldest.position) if oldest else None,
    )


def _event_line(message: StreamMessage) -> EventLine | InvalidLine:
    try:
        event: Event = decode(message.payload, Event)
    except MessageInvalid:
        return InvalidLine(seq=message.seq, at_ns=message.at_ns)
    if not said_by(message.subject, event):
        return InvalidLine(seq=message.seq, at_ns=message.at_ns)
    return EventLine(seq=message.seq, at_ns=message.at_ns, event=event)


async def _read(
    bus: Bus, stream: str, subject: str, last: int, after: int = 0
) -> AsyncGenerator[StreamMessage, None]:
    """Messages of the stream from `after` on up to sequence `last`."""
    first, _ = await bus.held(stream)
    if max(first, after + 1) > last:
        return
    async with contextlib.aclosing(bus.read(stream, subject, after=after)) as messages:
        while True:
            try:
                async with asyncio.timeout(READ_S_MAX):
                    message = await anext(messages)
            except TimeoutError:
                raise BusError(f"stream {stream}: nothing came for {READ_S_MAX:.0f} s") from None
            if message.seq <= last:
                yield message
            if message.seq >= last or message.pending == 0:
                return


async def _next_decision(messages: AsyncIterator[StreamMessage]) -> DecisionLine | None:
    """The next that can be read. One that cannot is left out, and replay will miss it."""
    async for message in messages:
        with contextlib.suppress(MessageInvalid):
            ordered: Ordered = decode(message.payload, Ordered)
            return DecisionLine(
                cause_seq=ordered.cause_seq,
                position=ordered.position,
                at_ns=message.at_ns,
                decision=ordered.decision,
            )
    return None


async def _next_progress(messages: AsyncIterator[StreamMessage]) -> ProgressLine | None:
    async for message in messages:
        if any(f".{kind}." in message.subject for kind in _PROGRESS):
            with contextlib.suppress(MessageInvalid):
                progress: Progress = decode(message.payload, Progress)
                if kv_author(message.subject, progress):
                    return ProgressLine(at_ns=message.at_ns, progress=progress)
    return None


async def follow(bus: Bus) -> AsyncIterator[EventLine | InvalidLine | DecisionLine]:
    """New events, and decisions, as they are stored. Endless."""
    _, last_seq = await bus.held(subjects.EVENTS_STREAM)
    _, last_decision = await bus.held(subjects.DECISIONS_STREAM)
    lines: asyncio.Queue[EventLine | InvalidLine | DecisionLine] = asyncio.Queue(1_000)

    async def events() -> None:
        async for message in bus.read(subjects.EVENTS_STREAM, subjects.EVENTS_ALL, after=last_seq):
            await lines.put(_event_line(message))

    async def decisions() -> None:
        stored = bus.read(subjects.DECISIONS_STREAM, subjects.DECISIONS_ALL, after=last_decision)
        while (decision := await _next_decision(stored)) is not None:
            await lines.put(decision)

    tasks = [asyncio.create_task(events()), asyncio.create_task(decisions())]
    try:
        while True:
            yield await lines.get()
    finally:
        await end_tasks(tasks)
