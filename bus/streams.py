"""The four streams: made by the process that connects first, and made anew where one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client

from halfmoon.bus.errors import BusError, PeerUnreachable, StreamRefused
from halfmoon.bus.jetstream import NO_PEERS, NO_STREAM, STREAM_NAME_IN_USE, JetStream
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import MessageInvalid, decode
from halfmoon.schemas.decisions import Ordered
from halfmoon.schemas.numbers import SECOND_NS

log = logging.getLogger(__name__)

#: Between two looks at whether the streams are there.
KEEP_S = 1.0
#: More events than a log may have had since it was last looked at.
LOG_GAP = 1_000_000_000
#: Servers that find each other, and elect a leader, take a while.
CLUSTER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Bounds of the streams; a stream drops its oldest messages first."""

    #: 0: another process makes them; this one, which may not be allowed to, waits until they are there.
    replicas: int = 1
    #: How long a cluster of servers, or the process that makes the streams, is waited for.
    wait_s: float = CLUSTER_S
    #: The event log and the decisions: replay needs both.
    log_bytes_max: int = 8 << 30
    log_age_ns_max: int = 7 * 24 * 3600 * SECOND_NS
    #: KV progress is of use only while the transfer runs.
    kv_bytes_max: int = 64 << 20
    kv_age_ns_max: int = 120 * SECOND_NS
    #: Some snapshots of the conductors' state; a new one replaces the oldest.
    snapshot_bytes_max: int = 1 << 30
    #: Within this time a message id is stored once.
    duplicate_window_ns: int = 120 * SECOND_NS


class StreamKeeper:
    """Makes the streams EVENTS, DECISIONS, KV and SNAPSHOTS where they are missing, now (`ensure`) and until it is
    cancelled (`keep`); existing ones stay as the operator set them.

    An event log that is made anew goes on counting far beyond the old one: a decision's identity begins with the
    sequence of its cause, and a process that remembers those of the old log would take new ones for repeats.
    """

    def __init__(self, nc: Client, limits: StreamLimits) -> None:
        self._nc = nc
        self._limits = limits
        self._jetstream = JetStream(nc)
        #: Last sequence of the event log when it was last looked at; -1: there was none.
        self._events_seq = -1

    async def ensure(self) -> None:
        """Raises StreamRefused when JetStream refuses (not enabled, no permission, too few servers for the replicas). A
        cluster of servers that is not ready yet is waited for.
        """
        limits = self._limits
        until = time.monotonic() + (0 if limits.replicas == 1 else limits.wait_s)
        for name in subjects.STREAMS:
            while (refused := await self._ensure(name, until)) is not None:
                if time.monotonic() > until or not _may_pass(refused):
                    raise StreamRefused(f"stream {refused}", code=refused.code, status=refused.status)
                await asyncio.sleep(0.1)

    async def keep(self) -> None:
        """Endless: looks every `KEEP_S` at half of the streams, and makes a deleted one anew."""
        for half in itertools.cycle((subjects.STREAMS[::2], subjects.STREAMS[1::2])):
            await asyncio.sleep(KEEP_S)
            if self._nc.is_connected:
                with contextlib.suppress(BusError):  # not to be asked now: at the next look
                    await self._look(half)

    async def _look(self, names: Sequence[str]) -> None:
        missing = []
        for name in names:
            try:
                last_seq = (await self._jetstream.info(name)).last_seq
            except StreamRefused as refused:
                if refused.code != NO_STREAM:
                    raise
                missing.append(name)
            else:
                if name == subjects.EVENTS_STREAM:
                    self._events_seq = last_seq
        if missing:
            log.error("gone, and made anew: the stream %s", ", ".join(missing))
            await self.ensure()

    async def _ensure(self, name: str, until: float) -> StreamRefused | None:
        """JetStream's refusal, None when the stream is there. Raises PeerUnreachable after `until`."""
        replicas = self._limits.replicas
        timeout_s = 10.0 if replicas == 1 else 2.0
        try:
            if not replicas:
                await self._jetstream.ask(f"STREAM.INFO.{name}", timeout_s=timeout_s)
                return None
            config = stream_config(name, self._limits)
            if name == subjects.EVENTS_STREAM and (first_seq := await self._first_seq()):
                config["first_seq"] = first_seq
            await self._jetstream.ask(f"STREAM.CREATE.{name}", config, timeout_s=timeout_s)
            if name == subjects.EVENTS_STREAM:
                self._events_seq = max(self._events_seq, 0)
        except PeerUnreachable:
            if time.monotonic() > until:
                raise
            return StreamRefused(f"{name}: no answer", status=503)
        except StreamRefused as refused:
            return None if refused.code == STREAM_NAME_IN_USE else refused
        return None

    async def _first_seq(self) -> int:
        """Where an event log that is missing is to begin; 0: where it likes, there was none before or it is there."""
        known = self._events_seq
        try:
            self._events_seq = (await self._jetstream.info(subjects.EVENTS_STREAM)).last_seq
            return 0
        except StreamRefused as refused:
            if refused.code != NO_STREAM:
                raise
        with contextlib.suppress(StreamRefused, MessageInvalid):
            last = await self._jetstream.message(
                subjects.DECISIONS_STREAM, last_by_subj=subjects.DECISIONS_ALL
            )
            if last is not None:
                ordered: Ordered = decode(last.payload, Ordered)
                known = max(known, ordered.cause_seq)
        return known + LOG_GAP if known >= 0 else 0


def stream_config(name: str, limits: StreamLimits) -> dict[str, Any]:
    """As JetStream wants it."""
    subject, storage, bytes_max, age_ns_max = {
        subjects.EVENTS_STREAM: (subjects.EVENTS_ALL, "file", limits.log_bytes_max, limits.log_age_ns_max),
        subjects.DECISIONS_STREAM: (
            subjects.DECISIONS_ALL,
            "file",
            limits.log_bytes_max,
            limits.log_age_ns_max,
        ),
        subjects.KV_STREAM: (subjects.KV_ALL, "memory", limits.kv_bytes_max, limits.kv_age_ns_max),
        subjects.SNAPSHOTS_STREAM: (
            subjects.SNAPSHOTS_ALL,
            "file",
            limits.snapshot_bytes_max,
            limits.log_age_ns_max,
        ),
    }[name]
    snapshots = name == subjects.SNAPSHOTS_STREAM
    return {
        "name": name,
        "subjects": [subject],
        "storage": storage,
        "retention": "limits",
        "discard": "old",
        "num_replicas": limits.replicas,
        "max_bytes": bytes_max,
        "max_age": age_ns_max,
        "max_msgs": -1,
        # Conductors that write the same snapshot write the same parts: one of each stays.
        "max_msgs_per_subject": 1 if snapshots else -1,
        "max_consumers": -1,
        "duplicate_window": min(limits.duplicate_window_ns, age_ns_max),
        # A stored fact is never deleted; only age and size end it. Old snapshots are purged by the conductors.
        "deny_delete": True,
        "deny_purge": not snapshots,
    }


def _may_pass(refused: StreamRefused) -> bool:
    """True where waiting may help: the cluster is not whole yet, or somebody else is about to make the stream."""
    return refused.status == 503 or refused.code in (NO_STREAM, NO_PEERS)
