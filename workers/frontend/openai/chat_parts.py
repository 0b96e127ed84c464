"""The parts of a chat's answer (`answer_parts`) as OpenAI's messages and deltas have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfmoon.schemas.keys import unpack_tokens
from halfmoon.workers.frontend.open_request import OpenRequest
from halfmoon.workers.frontend.openai.answer_parts import THINK, AnswerPart, AnswerParts, CallStyle
from halfmoon.workers.model.text.tokenizer import Tokenizer

#: Tokens at the end of a prompt in which a template may have begun the thoughts.
_TAIL_TOKENS = 8


def parts_of(request: OpenRequest, tokenizer: Tokenizer) -> AnswerParts | None:
    """A reader of the answer's text; None: all of it is content."""
    ask = request.ask
    if not ask.chat:
        return None
    style: CallStyle = ""
    if ask.tool_use is not None:
        match ask.tool_use.choice:
            case "auto":
                style = tokenizer.call_style
            case "required":
                style = "list"
            case "named":
                style = "arguments"
            case "none":
                pass
    # A text that a grammar makes has no thoughts before it.
    thinks = tokenizer.thinks and ask.structure is None
    if not style and not thinks:
        return None
    tail = tokenizer.decode(unpack_tokens(request.packed_prompt[-4 * _TAIL_TOKENS :])) if thinks else ""
    parallel = ask.tool_use is None or ask.tool_use.parallel
    named = ask.tool_use.named if ask.tool_use is not None else ""
    thinking = tail.rstrip().endswith(THINK)
    return AnswerParts(
        style, thinks=thinks, thinking=thinking, tells=ask.tells_thoughts, parallel=parallel, named=named
    )


def message_of(parts: Sequence[AnswerPart], before: str) -> dict[str, Any]:
    """An assistant's message; `before`: content that stands before it."""
    content = before + "".join(part.content for part in parts)
    reasoning = "".join(part.reasoning for part in parts)
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.call < 0:
            continue
        if part.call == len(calls):
            called = {"name": part.name, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": called})
        calls[part.call]["function"]["arguments"] += part.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        # vLLM's name for it, and the one that it and others had before.
        message["reasoning"] = message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def delta_of(part: AnswerPart) -> dict[str, Any]:
    """One part in a stream."""
    if part.content:
        return {"content": part.content}
    if part.reasoning:
        return {"reasoning": part.reasoning, "reasoning_content": part.reasoning}
    call: dict[str, Any] = {"index": part.call, "function": {"arguments": part.arguments}}
    if part.call_id:
        call |= {"id": part.call_id, "type": "function"}
        call["function"] = {"name": part.name, "arguments": part.arguments}
    return {"tool_calls": [call]}
