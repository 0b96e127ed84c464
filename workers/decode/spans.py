"""Spans of a decode: waiting for KV, the queue, the first step, all others.

No text and no tokens: lengths, times, names. The names `gen_ai.*` are OpenTelemetry's for generative AI, ours
begin with `halfmoon.`. Nothing in here is called, or it returns at once, where a request is not traced.
"""

from __future__ import annotations

import time

from halfmoon.bus.telemetry.tracing import Tracing, Value, wall_ns
from halfmoon.workers.decode.actions import EndSpan


def end_decode(tracing: Tracing | None, ended: EndSpan, worker_id: str) -> None:
    """One span from the end of prefill to the last token; inside: waiting for KV, in the queue, first step, others."""
    if tracing is None:
        return
    sequence = ended.sequence
    result, order = sequence.result, sequence.order
    about: dict[str, Value] = {
        "halfmoon.request_id": order.request_id,
        "halfmoon.order_id": order.order_id,
        "halfmoon.worker": worker_id,
        "halfmoon.placement": order.placement,
        "halfmoon.preemptions": sequence.preemptions,
        "gen_ai.usage.output_tokens": len(sequence.output),
        "halfmoon.cancelled": ended.cancelled,
    }
    began_ns = result.finished_at_ns if result is not None else wall_ns(sequence.arrived_ns)
    span = tracing.begin("decode", sequence.traceparent, began_ns, about)
    if span is None:
        return
    if sequence.started_ns:
        ready_ns, joined_ns = sequence.ready_wall_ns, wall_ns(sequence.started_ns)
        span.child(tracing, "decode.kv", began_ns, ready_ns)
        span.child(tracing, "decode.queue", ready_ns, joined_ns)
        last_ns = wall_ns(sequence.last_token_ns) if sequence.last_token_ns else joined_ns
        first_ns = last_ns - sum(sequence.intervals_ns[1:])
        span.child(tracing, "decode.first_step", joined_ns, first_ns)
        if last_ns > first_ns:
            span.child(tracing, "decode.steps", first_ns, last_ns)
    span.end(max(began_ns, time.time_ns()), error=ended.error)
