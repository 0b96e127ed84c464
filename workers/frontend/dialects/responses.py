"""An answer as OpenAI's `/v1/responses` has it, whole or as events. It is not kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, assert_never

import msgspec
import orjson

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import decode_body
from halfmoon.schemas.api.responses import ResponsesBody
from halfmoon.workers.frontend.dialects.blocks import AnswerBlock, AnswerBlocks, BlockChange
from halfmoon.workers.frontend.open_request import OpenRequest, Piece
from halfmoon.workers.frontend.openai.answers import similar_usage
from halfmoon.workers.model.text.tokenizer import Tokenizer

#: By the kind of a block: its events' name, and the field of what is added, and of all of it.
_EVENTS = {
    "text": ("output_text", "delta", "text"),
    "thinking": ("reasoning_text", "delta", "text"),
    "call": ("function_call_arguments", "delta", "arguments"),
}
_PREFIXES = {"text": "msg", "thinking": "rs", "call": "fc"}


class ResponsesForm:
    """One request's answer. `model`: its name."""

    def __init__(self, request: OpenRequest, tokenizer: Tokenizer, model: str, payload: bytes) -> None:
        self._request, self._tokenizer, self._model = request, tokenizer, model
        self._blocks = AnswerBlocks(request, tokenizer)
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
        return orjson.dumps(self._ended(AnswerBlocks.whole(self._request, self._tokenizer).blocks))

    def first_event(self) -> bytes:
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def event(self, piece: Piece) -> bytes:
        final = bool(piece.finish_reason)
        events = b"".join(map(self._change, self._blocks.push(piece.text, final=final)))
        if final:
            response = self._ended(self._blocks.blocks)
            events += self._event(f"response.{response['status']}", response=response)
        return events

    def _change(self, change: BlockChange) -> bytes:
        block, place = change.block, {"output_index": change.place}
        of_item = {"item_id": self._item_id(block, change.place), **place}
        name, grown, ended = _EVENTS[block.kind]
        match change.change:
            case "begins":
                item = self._item(block, change.place, "in_progress")
                if block.kind != "call":
                    item = {**item, "content": []}
                events = self._event("response.output_item.added", **place, item=item)
                if block.kind == "text":
                    part = _text_part("")
                    events += self._event(
                        "response.content_part.added", **of_item, content_index=0, part=part
                    )
                return events
            case "grows":
                more: dict[str, Any] = {"content_index": 0} if block.kind != "call" else {}
                more |= {"logprobs": []} if block.kind == "text" else {}
                return self._event(f"response.{name}.delta", **of_item, **more, **{grown: change.text})
            case "ends":
                told: dict[str, Any] = {"content_index": 0} if block.kind != "call" else {"name": block.name}
                told |= {"logprobs": []} if block.kind == "text" else {}
                events = self._event(f"response.{name}.done", **of_item, **told, **{ended: block.text})
                if block.kind == "text":
                    part = _text_part(block.text)
                    events += self._event("response.content_part.done", **of_item, content_index=0, part=part)
                item = self._item(block, change.place, self._status())
                return events + self._event("response.output_item.done", **place, item=item)
            case _:
                assert_never(change.change)

    def _event(self, kind: str, **fields: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._numbers, **fields}
        self._numbers += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(told))

    def _status(self) -> str:
        return "incomplete" if self._request.finish_reason == "length" else "completed"

    def _item_id(self, block: AnswerBlock, place: int) -> str:
        return f"{_PREFIXES[block.kind]}_{self._request.request_id}" + (f"_{place}" if place else "")

    def _item(self, block: AnswerBlock, place: int, status: str) -> dict[str, Any]:
        item = {"id": self._item_id(block, place), "status": status}
        match block.kind:
            case "text":
                content = [_text_part(block.text)]
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "thinking":
                thought = {"type": "reasoning_text", "text": block.text}
                return {**item, "type": "reasoning", "summary": [], "content": [thought]}
            case "call":
                called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return {**item, "type": "function_call", **called}
            case _:
                assert_never(block.kind)

    def _ended(self, blocks: Sequence[AnswerBlock]) -> dict[str, Any]:
        status = self._status()
        items = [self._item(block, place, status) for place, block in enumerate(blocks)]
        thoughts = "".join(block.text for block in blocks if block.kind == "thinking")
        return self._response(status, items, usage=self._usage(thoughts))

    def _usage(self, thoughts: str) -> dict[str, Any]:
        request = self._request
        prompt, answer = request.arrived.prompt_tokens, len(request.output_ids)
        cached = request.timing.cached_tokens if request.timing else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, **similar_usage([request])},
            "output_tokens": answer,
            "output_tokens_details": {
                "reasoning_tokens": len(self._tokenizer.encode(thoughts)) if thoughts else 0
            },
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
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": None,
            "service_tier": "auto",
            "store": False,
            "temperature": sampling.temperature,
            "text": text or {"format": {"type": "text"}},
            "tool_choice": msgspec.to_builtins(asked.tool_choice) or "auto",
            "tools": [msgspec.to_builtins(tool) for tool in asked.tools or []],
            "top_p": sampling.top_p,
            "truncation": asked.truncation or "disabled",
            "user": asked.user,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
