"""Tools as a template takes them, and where it does not know them, in the tags that Hermes' models learned.

For a template that knows no tools they stand in the system message (in the user's first, where it takes none). For one
that writes no calls, earlier calls stand in their message's content, and results of tools are the user's.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from halfmoon.workers.model.text.template_abilities import Abilities

_PREFACE = """You may call functions to help with the user's request. Their signatures are within <tools></tools> tags:
<tools>
{tools}
</tools>

For each function call, write a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""


def fitted(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, abilities: Abilities
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as a template of these abilities is given them."""
    fit = [_with_arguments(message, abilities) for message in messages]
    if not abilities.history:
        fit = _told_history(fit)
    if abilities.tools or not tools:
        return fit, tools
    return _told_tools(fit, tools, abilities), None


def _with_arguments(message: dict[str, Any], abilities: Abilities) -> dict[str, Any]:
    """Arguments of calls as the template takes them; those that are no JSON are the text that they are."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    as_text = abilities.arguments_text and abilities.history
    made = []
    for call in calls:
        arguments = call["function"].get("arguments")
        arguments = _text(arguments) if as_text else _decoded(arguments)
        made.append({**call, "function": {**call["function"], "arguments": arguments}})
    empty = abilities.content_null and abilities.history and not message["content"]
    return {**message, "content": None if empty else message["content"], "tool_calls": made}


def _decoded(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments


def _text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps(arguments or {}, ensure_ascii=False)


def _told_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], abilities: Abilities
) -> list[dict[str, Any]]:
    preface = _PREFACE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = messages[0] if messages else None
    if first is not None and first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{preface}"}, *messages[1:]]
    if abilities.system or first is None or first["role"] != "user":
        return [{"role": "system", "content": preface}, *messages]
    return [{**first, "content": f"{preface}\n\n{first['content']}"}, *messages[1:]]


def _told_history(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of roles and texts alone. Results that follow each other are one message, as templates ask for turns."""
    told: list[dict[str, Any]] = []
    before = ""
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if before == "tool":
                told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{result}"}
            else:
                told.append({"role": "user", "content": result})
        else:
            told.append(_told_calls(message))
        before = message["role"]
    return told


def _told_calls(message: dict[str, Any]) -> dict[str, Any]:
    content, calls = message["content"], message.get("tool_calls")
    if not calls:
        return message
    written = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
    ]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(([content] if content else []) + written)}
