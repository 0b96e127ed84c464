"""Spans of the frontend and of the workers: what is told of a request, a prefill and a decode when it is over.

No text and no tokens: lengths, times, names. The names `gen_ai.*` are OpenTelemetry's for generative AI, ours begin
with `halfmoon.`. Nothing in here is called, or it returns at once, where a request is not traced.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from halfmoon.bus.tracing import OpenSpan, Tracing, Value, wall_ns
from halfmoon.schemas.api import ApiError, Ask
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.kv import PrefillResult
from halfmoon.workers.prefill_job import Job
from halfmoon.workers.sequence import Sequence

if TYPE_CHECKING:
    from halfmoon.workers.open_request import OpenRequest


# --- the frontend -------------------------------------------------------------------------------------------------


def begin_request(
    tracing: Tracing, ask: Ask, arrived: RequestArrived, model: str, traceparent: str, now_ns: int
) -> OpenSpan | None:
    """The request as its client sees it, a child of the client's span when there is one. None: not sampled."""
    operation, sampling = "chat" if ask.chat else "text_completion", ask.sampling
    about: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "halfmoon",
        "gen_ai.request.model": ask.model or model,
        "gen_ai.request.max_tokens": arrived.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": arrived.prompt_tokens,
        "halfmoon.request_id": arrived.request_id,
        "halfmoon.frontend": arrived.frontend_id,
        "halfmoon.priority": arrived.priority,
    }
    if sampling.top_k:
        about["gen_ai.request.top_k"] = sampling.top_k
    if sampling.presence_penalty or sampling.frequency_penalty:
        about["gen_ai.request.presence_penalty"] = sampling.presence_penalty
        about["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    return tracing.begin(f"{operation} {ask.model or model}", traceparent, wall_ns(now_ns), about, server=True)


def refused_request(
    tracing: Tracing, operation: str, frontend_id: str, model: str, traceparent: str, began_ns: int, error: ApiError
) -> None:
    """One that never became a request of the cluster: nothing is known of it but what was wrong."""
    about: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "halfmoon",
        "halfmoon.frontend": frontend_id,
    }
    span = tracing.begin(f"{operation} {model}", traceparent, wall_ns(began_ns), about, server=True)
    if span is not None:
        span.end(time.time_ns(), _error(error), error=error.message)


def _error(error: ApiError) -> dict[str, Value]:
    return {"error.type": error.code or str(error.status), "http.response.status_code": error.status}


def end_request(request: OpenRequest, model: str, error: ApiError | None = None) -> None:
    """Its last token went out, or it ended with an error."""
    span = request.span
    if span is None:
        return
    about: dict[str, Value] = {
        "gen_ai.response.id": request.request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.output_tokens": len(request.output_ids),
    }
    if request.finish_reason:
        about["gen_ai.response.finish_reasons"] = [request.finish_reason]
    if (timing := request.timing) is not None:
        about["gen_ai.usage.cache_read.input_tokens"] = timing.cached_tokens
        about["halfmoon.prefill_worker"] = timing.prefill_worker
        about["halfmoon.decode_worker"] = request.decode_worker or timing.decode_worker
    if request.first_at_ns:
        about["gen_ai.server.time_to_first_token"] = (request.first_at_ns - request.arrived_at_ns) / 1e9
        span.event("first token", wall_ns(request.first_at_ns))
    if error is not None:
        about |= _error(error)
    span.end(time.time_ns(), about, error="" if error is None else error.message)


# --- prefill ------------------------------------------------------------------------------------------------------


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
    tracing: Tracing | None, job: Job, result: PrefillResult | None = None, *, block_tokens: int = 0, error: str = ""
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


# --- decode -------------------------------------------------------------------------------------------------------


def decoded(
    tracing: Tracing | None, sequence: Sequence, worker_id: str, *, error: str = "", cancelled: bool = False
) -> None:
    """From the end of its prefill to its last token: waiting for KV, in the queue, the first step, all others."""
    if tracing is None or not sequence.traceparent:
        return
    result, order = sequence.result, sequence.order
    about: dict[str, Value] = {
        "halfmoon.request_id": order.request_id,
        "halfmoon.order_id": order.order_id,
        "halfmoon.worker": worker_id,
        "halfmoon.placement": order.placement,
        "halfmoon.preemptions": sequence.preemptions,
        "gen_ai.usage.output_tokens": len(sequence.output),
        "halfmoon.cancelled": cancelled,
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
    span.end(max(began_ns, time.time_ns()), error=error)
