"""The conductor's refusals and failures, in the words of the API."""

from __future__ import annotations

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.decisions import FailRequest, Prediction, RejectReason, RejectRequest
from halfmoon.schemas.numbers import MS_NS

#: 429 says that nothing was computed. A decode worker's own refusal comes after prefill.
_STATUS: dict[RejectReason, int] = {"no_worker": 503, "too_long": 400, "decode_refused": 503}


def rejection(decision: RejectRequest, *, chat: bool) -> ApiError:
    """429; 503 when a pool is empty or a decode worker refused what was prefilled, 400 when no worker could ever
    hold it. With what was predicted, and the SLO.
    """
    param = ("messages" if chat else "prompt") if decision.reason == "too_long" else None
    message = decision.message or decision.reason
    error = ApiError(
        _STATUS.get(decision.reason, 429),
        f"{param}: {message}" if param else message,
        param=param,
        code=decision.reason,
        retry_after_ns=decision.retry_after_ns,
    )
    error.extra["predicted_ms"] = _milliseconds(decision.predicted)
    error.extra["slo_ms"] = {
        "ttft": decision.ttft_slo_ns / MS_NS,
        "tbt": decision.tbt_slo_ns / MS_NS,
    }
    return error


def failure(decision: FailRequest, *, chat: bool) -> ApiError:
    """500; where an engine refused the request, that engine's status, with the field and the time that it names."""
    refusal = decision.refusal
    if refusal is None:
        return ApiError(500, decision.message, code="failed")
    param = "messages" if chat and refusal.param == "prompt" else refusal.param
    return ApiError(
        refusal.status,
        decision.message,
        param=param or None,
        code="engine_refused",
        retry_after_ns=refusal.retry_after_ns,
    )


def _milliseconds(predicted: Prediction) -> dict[str, float]:
    return {
        "queue": predicted.queue_ns / MS_NS,
        "transfer": predicted.transfer_ns / MS_NS,
        "prefill": predicted.prefill_ns / MS_NS,
        "ttft": predicted.ttft_ns / MS_NS,
        "tbt": predicted.tbt_ns / MS_NS,
    }
