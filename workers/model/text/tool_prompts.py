"""Tools for models whose chat template knows none: told in the system message, in the tags that Hermes' models learned.

Calls of earlier messages stand in their content, and results of tools are the user's. Templates that know tools get
them as they are.
"""

from __future__ import annotations

import json
from typing import Any

_PREFACE = """You may call functions to help with the user's request. Their signatures are within <tools></tools> tags:
<tools>
{tools}
</tools>

For each function call, write a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""


def told_in_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of roles and texts alone."""
    told = [_plain(message) for message in messages]
    if tools:
        preface = _PREFACE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if told and told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{preface}"}
        else:
            told.insert(0, {"role": "system", "content": preface})
    return told


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
    ]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(([content] if content else []) + written)}
