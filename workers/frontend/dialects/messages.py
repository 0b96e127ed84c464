"""An answer as Anthropic's `/v1/messages` has it, whole or as events."""

from __future__ import annotations

from typing import Any, assert_never

import orjson

from halfmoon.schemas.api.errors import ApiError
from halfmoon.workers.frontend.dialects.blocks import AnswerBlock, AnswerBlocks, BlockChange
from halfmoon.workers.frontend.open_request import OpenRequest, Piece
from halfmoon.workers.frontend.openai.answers import similar_usage
from halfmoon.workers.model.text.tokenizer import Tokenizer

#: By the kind of a block: the type of its deltas, and the field of what is added.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}

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

    def __init__(self, request: OpenRequest, tokenizer: Tokenizer, model: str, payload: bytes) -> None:
        self._request, self._model = request, model
        self._blocks = AnswerBlocks(request, tokenizer)

    @staticmethod
    def error(error: ApiError) -> bytes:
        kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        told = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
        return orjson.dumps({"type": "error", "error": told | error.extra})

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + self.error(error) + b"\n\n"

    def body(self) -> bytes:
        self._blocks.push(self._request.text, final=True)
        content = [_content(block) for block in self._blocks.blocks]
        return orjson.dumps(self._message(content=content, **self._stop(), usage=self._usage()))

    def first_event(self) -> bytes:
        usage = {**self._usage(), "output_tokens": 0}
        message = self._message(content=[], stop_reason=None, stop_sequence=None, usage=usage)
        return event_of("message_start", {"message": message})

    def event(self, piece: Piece) -> bytes:
        final = bool(piece.finish_reason)
        events = b"".join(map(_event, self._blocks.push(piece.text, final=final)))
        if final:
            told = {"delta": self._stop(), "usage": self._usage()}
            events += event_of("message_delta", told) + event_of("message_stop", {})
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
        return {"stop_reason": "tool_use" if self._blocks.calls else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """The input that was not cached is counted apart from what was, as Anthropic does."""
        request = self._request
        cached = request.timing.cached_tokens if request.timing else 0
        return {
            "input_tokens": request.arrived.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": len(request.output_ids),
            **similar_usage([request]),
        }


def _content(block: AnswerBlock) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "thinking":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.name,
                "input": _arguments(block.text or "{}"),
            }
        case _:
            assert_never(block.kind)


def _arguments(text: str) -> dict[str, Any]:
    """Arguments that are no JSON object, as when they were cut, stand under an empty name as the model wrote them."""
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"": text}


def _event(change: BlockChange) -> bytes:
    block, fields = change.block, {"index": change.place}
    match change.change:
        case "begins":
            begun = _content(block.emptied())
            return event_of("content_block_start", {**fields, "content_block": begun})
        case "grows":
            kind, name = _DELTAS[block.kind]
            return event_of("content_block_delta", {**fields, "delta": {"type": kind, name: change.text}})
        case "ends":
            return event_of("content_block_stop", fields)
        case _:
            assert_never(change.change)
