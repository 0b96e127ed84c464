"""The conductor's refusals, in the words of the API."""

from __future__ import annotations

from halfmoon.schemas.api import MILLISECOND_NS, ApiError
from halfmoon.schemas.decisions import Prediction, RejectRequest

_STATUS = {"no_worker": 503, "too_long": 413}


def rejection(decision: RejectRequest) -> ApiError:
    """429; 503 when a pool is empty, 413 when no worker could ever hold it. With what was predicted, and the
    SLO.
    """
    error = ApiError(
        _STATUS.get(decision.reason, 429),
        decision.message or decision.reason,
        code=decision.reason,
        retry_after_ns=decision.retry_after_ns,
    )
    error.extra["predicted_ms"] = _milliseconds(decision.predicted)
    error.extra["slo_ms"] = {
        "ttft": decision.ttft_slo_ns / MILLISECOND_NS,
        "tbt": decision.tbt_slo_ns / MILLISECOND_NS,
    }
    return error


def _milliseconds(predicted: Prediction) -> dict[str, float]:
    return {
        "queue": predicted.queue_ns / MILLISECOND_NS,
        "transfer": predicted.transfer_ns / MILLISECOND_NS,
        "prefill": predicted.prefill_ns / MILLISECOND_NS,
        "ttft": predicted.ttft_ns / MILLISECOND_NS,
        "tbt": predicted.tbt_ns / MILLISECOND_NS,
    }
