"""Snapshots of the conductors' state in the SNAPSHOTS stream: saved, listed, read, pruned.

Not the object store: there each writer of an object stores chunks of its own, and those of a writer that lost
the race for the name stay behind. Here the parts of equal snapshots have equal names and equal bytes, and a
subject keeps its last message only, so any number of conductors may save the same one at the same time.
"""

from __future__ import annotations

import orjson
from nats.errors import Error as NatsError

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError, PeerUnreachable, SnapshotBroken, StreamRefused
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import MessageInvalid, decode, digest, encode
from halfmoon.schemas.snapshots import SnapshotHead

PART_BYTES = 512 << 10
TIMEOUT_S = 5.0


async def save(bus: Bus, seq: int, snapshot: bytes, *, version: int, code_version: str) -> SnapshotHead:
    """Store `snapshot`, the state after event `seq`, unless it is there already. Raises BusError."""
    name = digest(snapshot)
    parts = [snapshot[start : start + PART_BYTES] for start in range(0, len(snapshot), PART_BYTES)]
    head = SnapshotHead(
        seq=seq,
        digest=name,
        version=version,
        code_version=code_version,
        size_bytes=len(snapshot),
        parts=len(parts),
    )
    if any((known.seq, known.digest) == (seq, name) for known in await heads(bus)):
        return head
    for number, part in enumerate(parts):
        await _store(bus, subjects.snapshot(seq, name, number), part)
    await _store(bus, subjects.snapshot(seq, name, "head"), encode(head))
    return head


async def heads(bus: Bus) -> list[SnapshotHead]:
    """Every snapshot that is whole, newest first."""
    found: list[SnapshotHead] = []
    for subject in await _subjects(bus, subjects.snapshot("*", "*", "head")):
        try:
            found.append(decode(await _load(bus, subject), SnapshotHead))
        except (MessageInvalid, SnapshotBroken):  # no head, or just pruned: no snapshot
            continue
    return sorted(found, key=lambda head: (-head.seq, head.digest))


async def read(bus: Bus, head: SnapshotHead) -> bytes:
    """The bytes of a snapshot. Raises SnapshotBroken."""
    parts = [
        await _load(bus, subjects.snapshot(head.seq, head.digest, number)) for number in range(head.parts)
    ]
    snapshot = b"".join(parts)
    if digest(snapshot) != head.digest:
        raise SnapshotBroken(f"the snapshot of event {head.seq} has other bytes than were saved")
    return snapshot


async def prune(bus: Bus, keep: int) -> None:
    """Remove snapshots older than the `keep` newest, and parts of older ones whose writers died."""
    kept = sorted(dict.fromkeys(head.seq for head in await heads(bus)))[-keep:]
    if not kept:
        return
    saved = {int(subject.split(".")[2]) for subject in await _subjects(bus, subjects.SNAPSHOTS_ALL)}
    for seq in sorted(saved):
        if seq < kept[0]:
            await remove(bus, seq)


async def remove(bus: Bus, seq: int) -> None:
    """All that was saved after this event."""
    await bus.jetstream.ask(
        f"STREAM.PURGE.{subjects.SNAPSHOTS_STREAM}", {"filter": subjects.snapshot_of(seq)}
    )


async def _subjects(bus: Bus, pattern: str) -> list[str]:
    try:
        answer = await bus.jetstream.ask(
            f"STREAM.INFO.{subjects.SNAPSHOTS_STREAM}", {"subjects_filter": pattern}
        )
    except StreamRefused:  # no stream, or none yet: no snapshots
        return []
    return sorted(answer["state"].get("subjects") or {})


async def _store(bus: Bus, subject: str, payload: bytes) -> None:
    try:
        reply = await bus.nc.request(subject, payload, timeout=TIMEOUT_S)
    except (NatsError, TimeoutError) as problem:
        raise PeerUnreachable(f"{subject}: {str(problem) or type(problem).__name__}") from None
    error = orjson.loads(reply.data).get("error")
    if error:
        raise BusError(f"{subject}: {error.get('description', 'refused')}")


async def _load(bus: Bus, subject: str) -> bytes:
    try:
        message = await bus.jetstream.message(subjects.SNAPSHOTS_STREAM, last_by_subj=subject)
    except StreamRefused as problem:
        raise SnapshotBroken(f"{subject}: {problem}") from None
    if message is None:
        raise SnapshotBroken(f"{subject} is missing")
    return message.payload
