"""The use of a chat's tools: shown to the model, and called by its own choice or by a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.structures import Structure
from halfmoon.schemas.api.tool_bodies import NamedChoice, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a chat, as templates take them; `named` is the one that `choice` named names."""

    tools: list[dict[str, Any]]
    choice: Literal["none", "auto", "required", "named"]
    named: str = ""
    #: Several calls in one answer.
    parallel: bool = True


def tool_use_of(
    tools: list[Tool] | None, choice: str | NamedChoice | None, *, parallel: bool | None
) -> ToolUse | None:
    """None: there are no tools. Raises ApiError 400."""
    if not tools:
        if choice not in (None, "none"):
            raise ApiError(400, "tool_choice: there are no tools", param="tool_choice", code="contradiction")
        return None
    plain = [msgspec.to_builtins(tool) for tool in tools]
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two functions have one name", param="tools", code="invalid")
    if not isinstance(choice, NamedChoice):
        word: Any = choice or "auto"
        return ToolUse(tools=plain, choice=word, parallel=parallel is not False)
    if choice.function.name not in names:
        message = f"tool_choice: no tool is named {choice.function.name}"
        raise ApiError(400, message, param="tool_choice", code="invalid")
    return ToolUse(tools=plain, choice="named", named=choice.function.name, parallel=False)


def structure_of_calls(use: ToolUse) -> Structure | None:
    """As in vLLM: for `required` a list of calls, for a named function its arguments; None: the model's free text."""
    match use.choice:
        case "none" | "auto":
            return None
        case "named":
            chosen = next(tool for tool in use.tools if tool["function"]["name"] == use.named)
            schema = _parameters(chosen)
        case "required":
            schema = _list_of_calls(use)
    # As models write JSON.
    return Structure(kind="json", asked=schema, param="tools", any_whitespace=False, separators=(", ", ": "))


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    return found


def _list_of_calls(use: ToolUse) -> dict[str, Any]:
    """Raises ApiError where two functions define one name differently: their definitions come to stand together."""
    calls, definitions = [], dict[str, Any]()
    for tool in use.tools:
        parameters = dict(_parameters(tool))
        for name, schema in parameters.pop("$defs", {}).items():
            if definitions.setdefault(name, schema) != schema:
                message = f"tools: $defs of two functions have different {name[:80]}"
                raise ApiError(400, message, param="tools", code="invalid")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    calls_of_one = {} if use.parallel else {"maxItems": 1}
    defined = {"$defs": definitions} if definitions else {}
    return {"type": "array", "minItems": 1, **calls_of_one, "items": {"anyOf": calls}, **defined}
