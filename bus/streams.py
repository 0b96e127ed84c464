"""The four streams, made or brought up to date by the process that connects first."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client

from halfmoon.bus.errors import BusError, PeerUnreachable, StreamRefused
from halfmoon.bus.jetstream import NO_PEERS, NO_STREAM, STREAM_NAME_IN_USE, JetStream
from halfmoon.schemas import subjects
from halfmoon.schemas.numbers import SECOND_NS

#: Servers that find each other, and elect who leads, take a while.
CLUSTER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Bounds of the streams; a stream drops its oldest messages first."""

    #: 0: another process makes them; this one, which may not be allowed to, waits until they are there.
    replicas: int = 1
    #: How long a cluster of servers, or the process that makes the streams, is waited for.
    wait_s: float = CLUSTER_S
    #: The event log and the decisions: what replay needs.
    log_bytes_max: int = 8 << 30
    log_age_ns_max: int = 7 * 24 * 3600 * SECOND_NS
    #: KV progress is of use only while the transfer runs.
    kv_bytes_max: int = 64 << 20
    kv_age_ns_max: int = 120 * SECOND_NS
    #: Some snapshots of the conductors' state; a new one replaces the oldest.
    snapshot_bytes_max: int = 1 << 30
    #: Within this time a message id is stored once.
    duplicate_window_ns: int = 120 * SECOND_NS


async def ensure_streams(nc: Client, limits: StreamLimits) -> None:
    """Create EVENTS, DECISIONS, KV and SNAPSHOTS where they are missing; leave existing ones as the operator
    set them.

    Raises BusError when JetStream refuses (not enabled, no permission, too few servers for the replicas). A
    cluster of servers that is not ready yet is waited for.
    """
    jetstream = JetStream(nc)
    until = time.monotonic() + (0 if limits.replicas == 1 else limits.wait_s)
    for name, subject, storage, bytes_max, age_ns_max in (
        (subjects.EVENTS_STREAM, subjects.EVENTS_ALL, "file", limits.log_bytes_max, limits.log_age_ns_max),
        (
            subjects.DECISIONS_STREAM,
            subjects.DECISIONS_ALL,
            "file",
            limits.log_bytes_max,
            limits.log_age_ns_max,
        ),
        (subjects.KV_STREAM, subjects.KV_ALL, "memory", limits.kv_bytes_max, limits.kv_age_ns_max),
        (
            subjects.SNAPSHOTS_STREAM,
            subjects.SNAPSHOTS_ALL,
            "file",
            limits.snapshot_bytes_max,
            limits.log_age_ns_max,
        ),
    ):
        config = {
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
            "max_msgs_per_subject": 1 if name == subjects.SNAPSHOTS_STREAM else -1,
            "max_consumers": -1,
            "duplicate_window": min(limits.duplicate_window_ns, age_ns_max),
        }
        while (refused := await _ensure(jetstream, name, config, until)) is not None:
            if time.monotonic() > until or not _may_pass(refused):
                raise BusError(f"stream {refused}")
            await asyncio.sleep(0.1)


async def _ensure(
    jetstream: JetStream, name: str, config: dict[str, Any], until: float
) -> StreamRefused | None:
    """JetStream's refusal, None when the stream is there. Raises PeerUnreachable after `until`."""
    waiting = not config["num_replicas"]
    timeout_s = 10.0 if config["num_replicas"] == 1 else 2.0
    try:
        if waiting:
            await jetstream.ask(f"STREAM.INFO.{name}", timeout_s=timeout_s)
        else:
            await jetstream.ask(f"STREAM.CREATE.{name}", config, timeout_s=timeout_s)
    except PeerUnreachable:
        if time.monotonic() > until:
            raise
        return StreamRefused(f"{name}: no answer", status=503)
    except StreamRefused as refused:
        return None if refused.code == STREAM_NAME_IN_USE else refused
    return None


def _may_pass(refused: StreamRefused) -> bool:
    """True where waiting may help: the cluster is not whole yet, or somebody else is about to make the stream."""
    return refused.status == 503 or refused.code in (NO_STREAM, NO_PEERS)
