"""An answer as OpenAI's `/v1/responses` has it, whole or as events. It is not kept."""

from __future__ import annotations

import time
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

#: By the kind of a block: the name of its events.
_EVENTS = {"text": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}
#: Of an item's id.
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
        self._blocks.push(self._request.text, final=True)
        return orjson.dumps(self._ended())

    def first_event(self) -> bytes:
        begun = self._response("in_progress", [])
        created = self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def event(self, piece: Piece) -> bytes:
        final = bool(piece.finish_reason)
        events = b"".join(map(self._change, self._blocks.push(piece.text, final=final)))
        if final:
            response = self._ended()
            events += self._event(f"response.{response['status']}", response=response)
        return events

    def _change(self, change: BlockChange) -> bytes:
        block = change.block
        item = {"output_index": change.place}
        # Calls have no parts.
        part = {"item_id": self._item_id(block, change.place), **item}
        part |= {"content_index": 0} if block.kind != "call" else {}
        name = _EVENTS[block.kind]
        match change.change:
            case "begins":
                begun = self._item(block.emptied(), change.place, "in_progress")
                if block.kind == "call":
                    return self._event("response.output_item.added", **item, item=begun)
                added = self._event("response.output_item.added", **item, item={**begun, "content": []})
                return added + self._event("response.content_part.added", **part, part=_part(block.emptied()))
            case "grows":
                logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
                return self._event(f"response.{name}.delta", **part, delta=change.text, **logprobs)
            case "ends":
                done = self._item(block, change.place, self._status_of(change.place))
                return self._whole(block, part) + self._event("response.output_item.done", **item, item=done)
            case _:
                assert_never(change.change)

    def _whole(self, block: AnswerBlock, part: dict[str, Any]) -> bytes:
        """The events with all that a block's deltas had."""
        name = f"response.{_EVENTS[block.kind]}.done"
        match block.kind:
            case "text":
                events = self._event(name, **part, text=block.text, logprobs=[])
            case "thinking":
                events = self._event(name, **part, text=block.text)
            case "call":
                return self._event(name, **part, name=block.name, arguments=block.text)
            case _:
                assert_never(block.kind)
        return events + self._event("response.content_part.done", **part, part=_part(block))

    def _event(self, kind: str, **fields: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._numbers, **fields}
        self._numbers += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(told))

    def _status(self) -> str:
        return "incomplete" if self._request.finish_reason == "length" else "completed"

    def _status_of(self, place: int) -> str:
        """An answer is cut in its last item."""
        return self._status() if place == len(self._blocks.blocks) - 1 else "completed"

    def _item_id(self, block: AnswerBlock, place: int) -> str:
        return f"{_PREFIXES[block.kind]}_{self._request.request_id}" + (f"_{place}" if place else "")

    def _item(self, block: AnswerBlock, place: int, status: str) -> dict[str, Any]:
        item = {"id": self._item_id(block, place), "status": status}
        match block.kind:
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": [_part(block)]}
            case "thinking":
                return {**item, "type": "reasoning", "summary": [], "content": [_part(block)]}
            case "call":
                called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return {**item, "type": "function_call", **called}
            case _:
                assert_never(block.kind)

    def _ended(self) -> dict[str, Any]:
        blocks = self._blocks.blocks
        items = [self._item(block, place, self._status_of(place)) for place, block in enumerate(blocks)]
        thoughts = "".join(block.text for block in blocks if block.kind == "thinking")
        return self._response(self._status(), items, usage=self._usage(thoughts))

    def _usage(self, thoughts: str) -> dict[str, Any]:
        request = self._request
        prompt, answer = request.arrived.prompt_tokens, len(request.output_ids)
        cached = request.timing.cached_tokens if request.timing else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, **similar_usage([request])},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": self._tokens_of(thoughts)},
            "total_tokens": prompt + answer,
        }

    def _tokens_of(self, thoughts: str) -> int:
        """Tokens that begin within them, by their bytes: a long text is not tokenized again on the event loop."""
        at = self._request.text.find(thoughts)
        if not thoughts or at < 0:
            return 0
        begin = len(self._request.text[:at].encode())
        end = begin + len(thoughts.encode())
        place = count = 0
        for token_id in self._request.output_ids:
            count += begin <= place < end
            place += len(self._tokenizer.token_bytes(token_id))
        return count

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
            "reasoning": asked.reasoning and {"effort": asked.reasoning.effort, "summary": None},
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


def _part(block: AnswerBlock) -> dict[str, Any]:
    """The one part of an item's content."""
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
