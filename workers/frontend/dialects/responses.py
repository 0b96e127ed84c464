"""An answer as OpenAI's `/v1/responses` has it, whole or as events. It is not kept."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import orjson

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import decode_body
from halfmoon.schemas.api.responses import ResponsesBody
from halfmoon.workers.frontend.open_request import OpenRequest, Piece


class ResponsesForm:
    """One request's answer. `model`: its name."""

    def __init__(self, request: OpenRequest, model: str, payload: bytes) -> None:
        self._request, self._model = request, model
        self._asked = decode_body(payload, ResponsesBody)
        self._created_s = int(time.time())
        self._numbers = 0

    @staticmethod
    def error(error: ApiError) -> bytes:
        return error.body()

    def error_event(self, error: ApiError) -> bytes:
        failed = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed", [], error=failed))

    def body(self) -> bytes:
        status = self._status()
        return orjson.dumps(self._response(status, [self._item(status)], usage=self._usage()))

    def first_event(self) -> bytes:
        begun = self._response("in_progress", [])
        item = {**self._item("in_progress"), "content": []}
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place(), part=_text_part(""))
        )

    def event(self, piece: Piece) -> bytes:
        events = b""
        if piece.text:
            events = self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[])
        if piece.finish_reason:
            text, status = self._request.text, self._status()
            item = self._item(status)
            response = self._response(status, [item], usage=self._usage())
            events += self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            events += self._event("response.content_part.done", **self._place(), part=_text_part(text))
            events += self._event("response.output_item.done", output_index=0, item=item)
            events += self._event(f"response.{status}", response=response)
        return events

    def _event(self, kind: str, **fields: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._numbers, **fields}
        self._numbers += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(told))

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._request.request_id}", "output_index": 0, "content_index": 0}

    def _status(self) -> str:
        return "incomplete" if self._request.finish_reason == "length" else "completed"

    def _item(self, status: str) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request.request_id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_text_part(self._request.text)],
        }

    def _usage(self) -> dict[str, Any]:
        request = self._request
        prompt, answer = request.arrived.prompt_tokens, len(request.output_ids)
        cached = request.timing.cached_tokens if request.timing else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + answer,
        }

    def _response(
        self,
        status: str,
        output: list[dict[str, Any]],
        *,
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        asked, sampling = self._asked, self._request.ask.sampling
        text = msgspec.to_builtins(asked.text) if asked.text and asked.text.format else None
        return {
            "id": f"resp_{self._request.request_id}",
            "object": "response",
            "background": False,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "created_at": self._created_s,
            "status": status,
            "model": self._model,
            "output": output,
            "usage": usage,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": self._request.arrived.max_tokens,
            "metadata": asked.metadata,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": None,
            "service_tier": "auto",
            "store": False,
            "temperature": sampling.temperature,
            "text": text or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": asked.truncation or "disabled",
            "user": asked.user,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
