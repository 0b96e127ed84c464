"""Requests of `/v1/messages`, `/v1/responses`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from tests.vllm.asked_tools import ASK, CITY, LIST_TEXT, TOOLS
from tests.vllm.request import HI, MESSAGES, MODEL, PROMPT, RESPONSES, Asked, message, response

ANTHROPIC_TOOL = {"name": "get_weather", "description": "The weather of a city.", "input_schema": CITY}
OPENAI_TOOL = {
    "type": "function", "name": "get_weather", "description": "The weather of a city.", "parameters": CITY,
}  # fmt: skip
USED = [
    *ASK,
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]},
]
BILLING = "x-anthropic-billing-header: cc_version=1; cch=00000;"


def _user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


#: Fields of `/v1/messages`; those of STREAMED also streamed.
OF_MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "to its end": {"max_tokens": 60},
    "system": {"system": "Be short."},
    "system blocks": {"system": [{"type": "text", "text": "Be short."}, {"type": "text", "text": "Be kind."}]},
    "cached system block": {
        "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
    },
    "billing header": {"system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be short."}]},
    "text blocks": _user({"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}),
    "begun answer": {"messages": [*HI, {"role": "assistant", "content": "Hel"}]},
    "stop sequences": {"stop_sequences": [" there"]},
    "samplers": {"top_k": 1, "top_p": 0.5},
    "metadata": {"metadata": {"user_id": "me"}},
    "tools": {"messages": ASK, "tools": [ANTHROPIC_TOOL]},
    "tools none": {"messages": ASK, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "none"}},
    "tools any": {
        "messages": ASK, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60,
    },
    "tools named": {
        "messages": ASK, "tools": [ANTHROPIC_TOOL], "max_tokens": 60,
        "tool_choice": {"type": "tool", "name": "get_weather"},
    },
    "tools used": {"messages": USED, "tools": [ANTHROPIC_TOOL]},
    "earlier thoughts": {
        "messages": [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "They greet.", "signature": "x"},
                    {"type": "text", "text": "Hello"},
                ],
            },
            *HI,
        ],
    },
    "no messages": {"messages": []},
    "no text": {"messages": [{"role": "user", "content": ""}]},
    "another role": {"messages": [{"role": "wizard", "content": "x"}]},
    "another block": _user({"type": "song", "text": "x"}),
    "max_tokens of 0": {"max_tokens": 0},
    "another model": {"model": "none"},
    "a tool without a schema": {"tools": [{"name": "x"}]},
    "a choice without tools": {"tool_choice": {"type": "any"}},
    "hot": {"temperature": "hot"},
    "too long": {"max_tokens": 2000},
}  # fmt: skip
#: What the double of a model answers, in both.
TEXTS = {
    "tools any": LIST_TEXT, "tools required": LIST_TEXT, "tools named": '{"city": "Rome"}',
    "text format": '{"city": "Rome"}',
}  # fmt: skip
STREAMED_MESSAGES = ("plain", "to its end", "tools any", "tools named", "max_tokens of 0")

REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "They greet."}]}
THOUGHT = {**REASONING, "content": [{"type": "reasoning_text", "text": "They greet."}]}
SAID = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
}  # fmt: skip
CALLED = {
    "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather",
    "arguments": '{"city": "Rome"}', "status": "completed",
}  # fmt: skip
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
SCHEMA = {"type": "json_schema", "name": "x", "schema": CITY}
NAMED = {"type": "function", "name": "get_weather"}

#: Fields of `/v1/responses`; those of STREAMED also streamed.
OF_RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "to its end": {"max_output_tokens": 60},
    "instructions": {"instructions": "Be short."},
    "messages": {"input": HI},
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Say hello."}]}]},
    "an earlier answer": {"input": [*HI, SAID, *HI]},
    "earlier reasoning": {"input": [*HI, REASONING, SAID, *HI]},
    "earlier thoughts": {"input": [*HI, THOUGHT, SAID, *HI]},
    "begun answer": {"input": [*HI, {**SAID, "status": "in_progress"}]},
    "include": {"include": ["reasoning.encrypted_content"]},
    "include of logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "tools": {"input": ASK, "tools": [OPENAI_TOOL]},
    "tools none": {"input": ASK, "tools": [OPENAI_TOOL], "tool_choice": "none"},
    "tools required": {
        "input": ASK, "tools": [OPENAI_TOOL], "tool_choice": "required", "max_output_tokens": 60,
    },
    "tools named": {
        "input": ASK, "tools": [OPENAI_TOOL], "tool_choice": NAMED, "max_output_tokens": 60,
    },
    "tools used": {"input": [*ASK, CALLED, RESULT], "tools": [OPENAI_TOOL]},
    "tools used with broken arguments": {
        "input": [*ASK, {**CALLED, "arguments": '{"city": "Ro'}, RESULT], "tools": [OPENAI_TOOL],
    },
    "text format": {"text": {"format": SCHEMA}, "max_output_tokens": 60},
    "text format that nothing satisfies": {"text": {"format": {**SCHEMA, "schema": {"$ref": "#"}}}},
    "metadata": {"metadata": {"a": "b"}, "user": "me"},
    "not stored": {"store": False},
    "no input": {"input": []},
    "empty input": {"input": ""},
    "an earlier response": {"previous_response_id": "resp_none"},
    "background": {"background": True},
    "another item": {"input": [{"type": "song"}]},
    "max_output_tokens of 0": {"max_output_tokens": 0},
    "another model": {"model": "none"},
    "hot": {"temperature": "hot"},
    "too long": {"max_output_tokens": 2000},
}  # fmt: skip
STREAMED_RESPONSES = ("plain", "to its end", "tools required", "tools named", "max_output_tokens of 0")

#: Fields of `/tokenize` and `/detokenize`.
TOKENIZE: dict[str, dict[str, Any]] = {
    "without special tokens": {"prompt": PROMPT, "add_special_tokens": False},
    "empty text": {"prompt": ""},
    "a moon": {"prompt": "🌓", "return_token_strs": True},
    "chat with tools": {"messages": ASK, "tools": TOOLS},
    "chat without a begun answer": {"messages": HI, "add_generation_prompt": False},
    "chat gone on with": {
        "messages": [*HI, {"role": "assistant", "content": "Hel"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "chat both begun and gone on with": {"messages": HI, "continue_final_message": True},
    "chat's names": {"messages": HI, "return_token_strs": True},
    "a number": {"prompt": 5},
}
DETOKENIZE: dict[str, list[Any]] = {
    "control tokens": [1, 4093, 198, 2],
    "a part of a character": [28, 187],
    "no such token": [49152],
    "a token below 0": [-1],
}


def of_dialects() -> list[Asked]:
    found = []
    for name, fields in OF_MESSAGES.items():
        text = TEXTS.get(name, "")
        found.append(Asked(f"message of {name}", MESSAGES, message(**fields), text))
        if name in STREAMED_MESSAGES:
            found.append(Asked(f"streamed message of {name}", MESSAGES, message(**fields, stream=True), text))
    for name in ("system blocks", "tools", "tools used", "no messages", "another model"):
        body = {"model": MODEL, "messages": HI, **OF_MESSAGES[name]}
        found.append(Asked(f"message's tokens of {name}", f"{MESSAGES}/count_tokens", body))
    for name, fields in OF_RESPONSES.items():
        text = TEXTS.get(name, "")
        found.append(Asked(f"response of {name}", RESPONSES, response(**fields), text))
        if name in STREAMED_RESPONSES:
            found.append(
                Asked(f"streamed response of {name}", RESPONSES, response(**fields, stream=True), text)
            )
    for name, fields in TOKENIZE.items():
        found.append(Asked(f"tokenize {name}", "/tokenize", {"model": MODEL, **fields}))
    for name, tokens in DETOKENIZE.items():
        found.append(Asked(f"detokenize {name}", "/detokenize", {"model": MODEL, "tokens": tokens}))
    return found
