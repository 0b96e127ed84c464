"""Spans of the frontend: a request as its client sees it.

No text and no tokens: lengths, times, names. The names `gen_ai.*` are OpenTelemetry's for generative AI, ours
begin with `halfmoon.`. Nothing in here is called, or it returns at once, where a request is not traced.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from halfmoon.bus.telemetry.tracing import OpenSpan, Tracing, Value, wall_ns
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest
from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.frontend.config import FrontendConfig

if TYPE_CHECKING:
    from halfmoon.workers.frontend.open_request import OpenRequest


def begin_request(
    tracing: Tracing, ask: ApiRequest, arrived: RequestArrived, model: str, traceparent: str, now_ns: int
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
    return tracing.begin(
        f"{operation} {ask.model or model}", traceparent, wall_ns(now_ns), about, server=True
    )


def refused_request(
    tracing: Tracing,
    config: FrontendConfig,
    operation: str,
    traceparent: str,
    began_ns: int,
    error: ApiError,
) -> None:
    """One that never became a request of the cluster: nothing is known of it but what was wrong."""
    about: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "halfmoon",
        "halfmoon.frontend": config.frontend_id,
    }
    span = tracing.begin(f"{operation} {config.model}", traceparent, wall_ns(began_ns), about, server=True)
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
