"""Requests with tools: choices, calls, and earlier calls; whole and streamed."""

from __future__ import annotations

from typing import Any

from tests.vllm.request import CHAT, HI, Asked, chat

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY},
}
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
}
TOOLS = [WEATHER, CLOCK]
ASK = [{"role": "user", "content": "How is the weather in Rome?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
#: A model of this size calls nothing by itself: an expression has it write the call.
CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Rome"\}\}\n</tool_call>'
TWO_CALLS = CALL + r'\n<tool_call>\n\{"name": "get_time", "arguments": \{\}\}\n</tool_call>'
NO_JSON = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": Rome\}\}\n</tool_call>'
BEFORE = r"I ask\. " + CALL

#: What they have a model write.
CALL_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
LIST_TEXT = '[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
TEXTS = {
    "required": LIST_TEXT,
    "required and cut": LIST_TEXT,
    "required, strict": LIST_TEXT,
    "named, strict": '{"city": "Rome"}',
    "named": '{"city": "Rome"}',
    "named and cut": '{"city": "Rome"}',
    "one call": CALL_TEXT,
    "two calls": CALL_TEXT + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "two calls, not parallel": CALL_TEXT
    + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "one call that is cut": CALL_TEXT,
    "one call that is cut in its arguments": CALL_TEXT,
    "one call that is no JSON": CALL_TEXT.replace('"Rome"', "Rome"),
    "content before a call": f"I ask. {CALL_TEXT}",
    "none, and a call": CALL_TEXT,
}

#: Fields beside `tools`; each is asked whole and streamed.
CHOICES: dict[str, dict[str, Any]] = {
    "auto": {},
    "said auto": {"tool_choice": "auto"},
    "none": {"tool_choice": "none"},
    "required": {"tool_choice": "required", "tools": [WEATHER], "max_tokens": 60},
    "named": {"tool_choice": NAMED, "max_tokens": 40},
    "required and cut": {"tool_choice": "required", "tools": [WEATHER], "max_tokens": 12},
    "named and cut": {"tool_choice": NAMED, "max_tokens": 4},
    "required, strict": {"tool_choice": "required", "tools": [STRICT], "max_tokens": 60},
    "named, strict": {"tool_choice": NAMED, "tools": [STRICT], "max_tokens": 60},
    "one call": {"structured_outputs": {"regex": CALL}, "max_tokens": 60},
    "two calls": {"structured_outputs": {"regex": TWO_CALLS}, "max_tokens": 90},
    "two calls, not parallel": {
        "structured_outputs": {"regex": TWO_CALLS},
        "max_tokens": 90,
        "parallel_tool_calls": False,
    },
    "one call that is cut": {"structured_outputs": {"regex": CALL}, "max_tokens": 10},
    "one call that is cut in its arguments": {"structured_outputs": {"regex": CALL}, "max_tokens": 30},
    "one call that is no JSON": {"structured_outputs": {"regex": NO_JSON}, "max_tokens": 60},
    "content before a call": {"structured_outputs": {"regex": BEFORE}, "max_tokens": 60},
    "none, and a call": {"tool_choice": "none", "structured_outputs": {"regex": CALL}, "max_tokens": 60},
}

#: What is refused, or not.
ODD: dict[str, dict[str, Any]] = {
    "no tools": {"tools": []},
    "required of no tools": {"tools": [], "tool_choice": "required"},
    "another choice": {"tool_choice": "perhaps"},
    "a function that is not there": {
        "tool_choice": {"type": "function", "function": {"name": "get_rain"}},
    },
    "a choice without a name": {"tool_choice": {"type": "function"}},
    "another type": {"tools": [{**WEATHER, "type": "program"}]},
    "no function": {"tools": [{"type": "function"}]},
    "no name": {"tools": [{"type": "function", "function": {"parameters": CITY}}]},
    "no parameters": {"tools": [{"type": "function", "function": {"name": "get_time"}}]},
    "parameters that are a list": {"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]},
    "tools that are no list": {"tools": "x"},
    "parameters that nothing satisfies": {
        "tools": [{"type": "function", "function": {"name": "x", "parameters": {"$ref": "#"}}}],
        "tool_choice": {"type": "function", "function": {"name": "x"}},
    },
}  # fmt: skip


def _called(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    """A chat whose assistant called."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


#: Messages, with tools.
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "a call": _called('{"city": "Rome"}'),
    "a call beside content": _called('{"city": "Rome"}', content="I ask."),
    "a call without content": [
        {name: each for name, each in message.items() if name != "content" or message["role"] != "assistant"}
        for message in _called("{}")
    ],
    "a call without arguments": _called(""),
    "a call whose arguments are no JSON": _called('{"city": "Ro'),
    "a call whose arguments are a list": _called("[1]"),
    "a call whose arguments are an object": _called({"city": "Rome"}),
    "no calls": [*ASK, {"role": "assistant", "content": "Sunny.", "tool_calls": []}, *HI],
    "a result without an id": [*_called("{}")[:2], {"role": "tool", "content": "sunny"}],
    "a result of parts": [
        *_called("{}")[:2],
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ],
    "neither content nor calls": [*ASK, {"role": "assistant"}, *HI],
}


def of_tools() -> list[Asked]:
    found = []
    for name, fields in CHOICES.items():
        body = chat(**{"messages": ASK, "tools": TOOLS, **fields})
        text = TEXTS.get(name, "")
        found += [
            Asked(f"tools {name}", CHAT, body, text),
            Asked(f"streamed tools {name}", CHAT, {**body, "stream": True}, text),
        ]
    for name, fields in ODD.items():
        found.append(Asked(f"tools of {name}", CHAT, chat(**{"messages": ASK, "tools": TOOLS, **fields})))
    for name, messages in HISTORIES.items():
        found.append(Asked(f"earlier {name}", CHAT, chat(messages=messages, tools=TOOLS)))
    return found
