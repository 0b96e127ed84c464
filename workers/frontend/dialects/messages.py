"""An answer as Anthropic's `/v1/messages` has it, whole or as events."""

from __future__ import annotations

from typing import Any

import orjson

from halfmoon.schemas.api.errors import ApiError
from halfmoon.workers.frontend.open_request import OpenRequest, Piece

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def event_of(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


class MessagesForm:
    """One request's answer. `model`: its name."""

    def __init__(self, request: OpenRequest, model: str, payload: bytes) -> None:
        self._request, self._model = request, model

    @staticmethod
    def error(error: ApiError) -> bytes:
        kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        told = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
        return orjson.dumps({"type": "error", "error": told})

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + self.error(error) + b"\n\n"

    def body(self) -> bytes:
        return orjson.dumps(
            self._message(
                content=[{"type": "text", "text": self._request.text}],
                **self._stop(),
                usage=self._usage(),
            )
        )

    def first_event(self) -> bytes:
        usage = {**self._usage(), "output_tokens": 0}
        message = self._message(content=[], stop_reason=None, stop_sequence=None, usage=usage)
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return event_of("message_start", {"message": message}) + event_of("content_block_start", block)

    def event(self, piece: Piece) -> bytes:
        events = b""
        if piece.text:
            delta = {"type": "text_delta", "text": piece.text}
            events = event_of("content_block_delta", {"index": 0, "delta": delta})
        if piece.finish_reason:
            events += event_of("content_block_stop", {"index": 0})
            events += event_of("message_delta", {"delta": self._stop(), "usage": self._usage()})
            events += event_of("message_stop", {})
        return events

    def _message(self, **fields: Any) -> dict[str, Any]:
        about = {"id": f"msg_{self._request.request_id}", "type": "message", "role": "assistant"}
        return {**about, "model": self._model, **fields}

    def _stop(self) -> dict[str, Any]:
        request = self._request
        if request.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if request.stop_text:
            return {"stop_reason": "stop_sequence", "stop_sequence": request.stop_text}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """The input that was not cached is counted apart from what was, as Anthropic does."""
        request = self._request
        cached = request.timing.cached_tokens if request.timing else 0
        return {
            "input_tokens": request.arrived.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": len(request.output_ids),
        }
