"""Spans of a conductor's decisions about traced requests. The core knows nothing of them: the shell looks on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from halfmoon.bus.telemetry.tracing import Tracing, Value
from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import Decision, RejectRequest, StartPrefill
from halfmoon.schemas.events import RequestArrived, Stamped


def decided(
    tracing: Tracing,
    core: Core,
    stamped: Stamped,
    decisions: Sequence[Decision],
    began_ns: int,
    conductor_id: str,
) -> None:
    """A span for each placement or refusal of a traced request; each running conductor makes its own."""
    for decision in decisions:
        if not isinstance(decision, StartPrefill | RejectRequest):
            continue
        event, request = stamped.event, core.state.requests.get(decision.request_id)
        arrived = (
            event if isinstance(event, RequestArrived) else request.event if request is not None else None
        )
        if arrived is None or not arrived.traceparent:
            continue
        about: dict[str, Value] = {
            "halfmoon.request_id": decision.request_id,
            "halfmoon.conductor": conductor_id,
            "halfmoon.seq": stamped.seq,
            "halfmoon.cause": type(event).__name__,
            "halfmoon.predicted_ttft_ms": decision.predicted.ttft_ns / 1e6,
            "halfmoon.predicted_tbt_ms": decision.predicted.tbt_ns / 1e6,
        }
        if isinstance(decision, StartPrefill):
            name = "conductor.place"
            about["halfmoon.order_id"] = decision.order_id
            about["halfmoon.prefill_worker"] = decision.worker_id
            about["halfmoon.decode_worker"] = decision.decode_worker_id
            if decision.fetches:
                about["halfmoon.fetch_node"] = decision.fetches[0].node_id
        else:
            name = "conductor.reject"
            about["halfmoon.reason"] = decision.reason
        tracing.span(name, arrived.traceparent, began_ns, time.time_ns(), about)
