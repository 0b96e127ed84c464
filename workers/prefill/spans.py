"""Spans of a prefill: its queue and its computation.

No text and no tokens: lengths, times, names. The names `gen_ai.*` are OpenTelemetry's for generative AI, ours
begin with `halfmoon.`. Nothing in here is called, or it returns at once, where a request is not traced.
"""

from __future__ import annotations

import time

from halfmoon.bus.telemetry.tracing import Tracing, Value, wall_ns
from halfmoon.schemas.kv import PrefillResult
from halfmoon.workers.prefill.job import Job


def begin_prefill(tracing: Tracing | None, job: Job, worker_id: str) -> None:
    """Its tokens have come, and with them the trace; it began with the order."""
    if tracing is None or not job.reply.traceparent:
        return
    about: dict[str, Value] = {
        "halfmoon.request_id": job.order.request_id,
        "halfmoon.order_id": job.order_id,
        "halfmoon.worker": worker_id,
        "halfmoon.prompt_tokens": job.order.prompt_tokens,
    }
    job.span = tracing.begin("prefill", job.reply.traceparent, wall_ns(job.arrived_ns), about)


def end_prefill(
    tracing: Tracing | None,
    job: Job,
    result: PrefillResult | None = None,
    *,
    block_tokens: int = 0,
    error: str = "",
) -> None:
    """All of its KV is at the decode node, or it failed."""
    if tracing is None or job.span is None:
        return
    about: dict[str, Value] = {"halfmoon.cancelled": job.cancelled}
    if result is not None:
        started_ns = result.finished_at_ns - result.compute_ns
        job.span.child(tracing, "prefill.queue", wall_ns(job.arrived_ns), started_ns)
        job.span.child(tracing, "prefill.compute", started_ns, result.finished_at_ns)
        about["halfmoon.cached_local_tokens"] = job.cached_blocks * block_tokens
        about["halfmoon.cached_fetched_tokens"] = job.fetched_blocks * block_tokens
    job.span.end(time.time_ns(), about, error="" if job.cancelled else error)
