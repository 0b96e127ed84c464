"""The conductor's refusals, in the words of the API."""

from __future__ import annotations

from halfmoon.schemas.api import ApiError
from halfmoon.schemas.decisions import Prediction, RejectRequest
from halfmoon.schemas.numbers import MS_NS

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
        "ttft": decision.ttft_slo_ns / MS_NS,
        "tbt": decision.tbt_slo_ns / MS_NS,
    }
    return error


def _milliseconds(predicted: Prediction) -> dict[str, float]:
    return {
        "queue": predicted.queue_ns / MS_NS,
        "transfer": predicted.transfer_ns / MS_NS,
        "prefill": predicted.prefill_ns / MS_NS,
        "ttft": predicted.ttft_ns / MS_NS,
        "tbt": predicted.tbt_ns / MS_NS,
    }
