"""Spans of a prefill: its queue and its computation.

No text and no tokens: lengths, times, names. The names `gen_ai.*` are OpenTelemetry's for generative AI, ours
begin with `halfmoon.`.
"""

from __future__ import annotations

import time

from halfmoon.bus.telemetry.tracing import OpenSpan, Tracing, Value, wall_ns
from halfmoon.workers.prefill.actions import BeginSpan, EndOrder


def begin_prefill(tracing: Tracing, begun: BeginSpan, worker_id: str) -> OpenSpan | None:
    """The span of an order, from its arrival on; None: the request is not sampled."""
    about: dict[str, Value] = {
        "halfmoon.request_id": begun.request_id,
        "halfmoon.order_id": begun.order_id,
        "halfmoon.worker": worker_id,
        "halfmoon.prompt_tokens": begun.prompt_tokens,
    }
    return tracing.begin("prefill", begun.traceparent, wall_ns(begun.arrived_ns), about)


def end_prefill(tracing: Tracing, span: OpenSpan, ended: EndOrder) -> None:
    """The order's KV is at the decode node, or the order failed."""
    about: dict[str, Value] = {"halfmoon.cancelled": ended.cancelled}
    if (result := ended.result) is not None:
        started_ns = result.finished_at_ns - result.compute_ns
        span.child(tracing, "prefill.queue", wall_ns(ended.arrived_ns), started_ns)
        span.child(tracing, "prefill.compute", started_ns, result.finished_at_ns)
        about["halfmoon.cached_local_tokens"] = ended.cached_local_tokens
        about["halfmoon.cached_fetched_tokens"] = ended.cached_fetched_tokens
    span.end(time.time_ns(), about, error="" if ended.cancelled else ended.error)
