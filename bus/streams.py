"""The four streams, made or brought up to date by whoever connects first."""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from nats.aio.client import Client

from halfmoon.bus.errors import BusError
from halfmoon.schemas import subjects

SECOND_NS = 1_000_000_000
STREAM_NAME_IN_USE = 10058


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Bounds of the streams; a stream drops its oldest messages first."""

    replicas: int = 1
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
    """Create EVENTS, DECISIONS, KV and SNAPSHOTS where they are missing; leave existing ones as the operator set them.

    Raises BusError when JetStream refuses (not enabled, no permission, too few servers for the replicas).
    """
    for name, subject, storage, bytes_max, age_ns_max in (
        (subjects.EVENTS_STREAM, subjects.EVENTS_ALL, "file", limits.log_bytes_max, limits.log_age_ns_max),
        (subjects.DECISIONS_STREAM, subjects.DECISIONS_ALL, "file", limits.log_bytes_max, limits.log_age_ns_max),
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
        reply = await nc.request(f"$JS.API.STREAM.CREATE.{name}", orjson.dumps(config), timeout=10)
        error = orjson.loads(reply.data).get("error")
        if error and error.get("err_code") != STREAM_NAME_IN_USE:
            raise BusError(f"stream {name}: {error.get('description', 'refused')}")
