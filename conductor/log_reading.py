"""Reads of a log that is still bounded and alive: its beginning, its gaps, the snapshots that lead on to it.

The log is bounded, so its head may be gone. A snapshot is of use as long as the log still has the event after it.
`ClusterConfigured` begins a log: the core forgets everything from before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from halfmoon.bus import snapshots
from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError, SnapshotBroken
from halfmoon.conductor.code_version import LOG_VERSIONS_READ, code_version
from halfmoon.conductor.core.machine import SNAPSHOT_VERSION, Core, SnapshotInvalid
from halfmoon.schemas import subjects
from halfmoon.schemas.events import ClusterConfigured

log = logging.getLogger(__name__)

#: While the log is read, other tasks get a turn after this many events.
TURN_EVENTS = 256


class LogUnreadable(Exception):
    """The log was begun under another meaning of its events, or its first event is gone."""


def check_version(event: ClusterConfigured) -> None:
    """Raises LogUnreadable, naming the version that can."""
    if event.log_version not in LOG_VERSIONS_READ:
        raise LogUnreadable(
            f"the log is of version {event.log_version}, begun by halfmoon {event.code_version}, which can read it; "
            f"this is halfmoon {code_version()}, which reads versions {LOG_VERSIONS_READ[0]} to {LOG_VERSIONS_READ[-1]}"
        )


async def check_gap(bus: Bus, read_seq: int) -> None:
    """The event after `read_seq` was passed over. Raises LogUnreadable when it had expired (else it was no
    event).
    """
    first, _ = await bus.held(subjects.EVENTS_STREAM)
    if first > read_seq + 1:
        raise LogUnreadable(f"events {read_seq + 1} to {first - 1} expired before they were read")


async def usable_snapshot(bus: Bus, *, before: int | None = None, checked: bool = False) -> Core | None:
    """The newest snapshot from which the log leads on; with `before`, of earlier than that event.

    A snapshot of another version, or a broken one, is passed over with a line in the log; one of a deleted log is
    removed.
    """
    heads = await snapshots.heads(bus)
    # Asked after the snapshots: none is newer than this answer.
    first, last = await bus.held(subjects.EVENTS_STREAM)
    for head in heads:
        if head.seq > last:
            log.warning("the snapshot of event %d is of a log that is gone: removed", head.seq)
            await snapshots.remove(bus, head.seq)
            continue
        if head.seq < first - 1 or (before is not None and head.seq >= before):
            continue
        if head.version != SNAPSHOT_VERSION:
            log.warning(
                "the snapshot of event %d is of version %d, by halfmoon %s; this core restores %d: not used",
                head.seq,
                head.version,
                head.code_version,
                SNAPSHOT_VERSION,
            )
            continue
        try:
            return Core.restore(await snapshots.read(bus, head), checked=checked)
        except (SnapshotInvalid, BusError) as problem:
            log.warning("the snapshot of event %d is not used: %s", head.seq, problem)
    return None


async def digest_at(bus: Bus, seq: int) -> str | None:
    """The digest of the state after event `seq`, as a fresh core finds it; None when the log does not reach
    back.
    """
    core = await usable_snapshot(bus, before=seq)
    after = core.seq if core is not None else await log_start_seq(bus) - 1
    if not 0 <= after < seq:
        return None
    core = core or Core()
    async for stamped in bus.events(after=after, last=seq):
        core.step(stamped)
        if stamped.seq % TURN_EVENTS == 0:
            await asyncio.sleep(0)
    return core.digest()


async def leading_snapshot(bus: Bus) -> tuple[int, bytes] | None:
    """Sequence and bytes of the oldest snapshot from which the rest of the log leads on: most can be replayed.

    None when there is none that can be read.
    """
    first, last = await bus.held(subjects.EVENTS_STREAM)
    for head in reversed(await snapshots.heads(bus)):
        if head.version == SNAPSHOT_VERSION and first - 1 <= head.seq <= last:
            with contextlib.suppress(SnapshotBroken):
                return head.seq, await snapshots.read(bus, head)
    return None


async def log_start_seq(bus: Bus) -> int:
    """Sequence of the newest ClusterConfigured; 0 when the log has none (any more)."""
    message = await bus.jetstream.message(
        subjects.EVENTS_STREAM, last_by_subj=subjects.events_of_kind(ClusterConfigured.__name__)
    )
    return 0 if message is None else message.seq
