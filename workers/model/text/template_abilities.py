"""Abilities of a chat template with tools: found once, when it is loaded, by rendering chats made for it.

Templates differ: they take earlier calls or none, arguments as an object or as the JSON text of one, no content as an
empty text or as null, a system message or none. A request fails by none of that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from halfmoon.workers.model.text.chat_template import ChatTemplate, ChatTemplateError

_NAME, _ARGUMENT, _VALUE, _RESULT, _SYSTEM = (
    "halfmoon_f",
    "halfmoon_a",
    "halfmoon_v",
    "halfmoon_r",
    "halfmoon_s",
)
#: Of CPU, for each of at most five chats; usual templates need below 1 ms.
_SECONDS_MAX = 0.25
_USER = {"role": "user", "content": "a"}
_TOOL = {
    "type": "function",
    "function": {"name": "g", "description": "b", "parameters": {"type": "object", "properties": {}}},
}
#: Mistral's templates refuse all other lengths.
_CALL_ID = "halfmoon1"


@dataclass(frozen=True, slots=True)
class Abilities:
    """`tools`: it writes their descriptions. `history`: it writes earlier calls and their results."""

    tools: bool = False
    history: bool = False
    arguments_text: bool = False
    """Arguments of a call: the JSON text of the object, which it joins to other texts."""
    content_null: bool = False
    """It knows a call by its message's content, which is to be null."""
    system: bool = True


def abilities_of(template: ChatTemplate) -> Abilities:
    system = _rendered(template, [{"role": "system", "content": _SYSTEM}, _USER])
    takes_system = _SYSTEM in system
    # Most templates want an object. Those that print any value would print it in Python's words.
    fallback: Abilities | None = None
    if "tool_calls" in template.source:
        for content_null in (False, True):
            for arguments_text in (False, True):
                form = Abilities(template.knows_tools, True, arguments_text, content_null, takes_system)
                text = _rendered(template, _calling(form))
                if not all(word in text for word in (_NAME, _VALUE, _RESULT)):
                    continue
                if f"'{_ARGUMENT}':" not in text:
                    return form
                fallback = fallback or form
    # One that knows tools is given the history as it is, whatever it makes of it.
    return fallback or Abilities(template.knows_tools, history=template.knows_tools, system=takes_system)


def _calling(form: Abilities) -> list[dict[str, Any]]:
    arguments: Any = {_ARGUMENT: _VALUE}
    function = {"name": _NAME, "arguments": json.dumps(arguments) if form.arguments_text else arguments}
    return [
        _USER,
        {
            "role": "assistant",
            "content": None if form.content_null else "",
            "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": _RESULT},
    ]


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """ "" where the template refuses them."""
    try:
        tools = [_TOOL] if template.knows_tools else None
        return template.render(messages, add_generation_prompt=True, tools=tools, seconds_max=_SECONDS_MAX)
    except ChatTemplateError:
        return ""
