"""Bodies of tools: functions that a chat's model may call, the choice of one, and calls in earlier messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """`parameters`: a JSON schema of an object. `strict`: given to the template, without other effect."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """One function."""

    type: Literal["function"]
    function: FunctionDefinition

    @classmethod
    def of(
        cls,
        name: str,
        description: str | None,
        parameters: dict[str, Any] | None,
        *,
        strict: bool | None = None,
    ) -> Tool:
        return cls("function", FunctionDefinition(name, description, parameters, strict))


class ChosenFunction(msgspec.Struct, frozen=True):
    """By its name."""

    name: FunctionName


class NamedChoice(msgspec.Struct, frozen=True):
    """This function is to be called."""

    type: Literal["function"]
    function: ChosenFunction

    @classmethod
    def of(cls, name: str) -> NamedChoice:
        return cls("function", ChosenFunction(name))


class CalledFunction(msgspec.Struct, frozen=True):
    """`arguments`: JSON as text."""

    name: FunctionName
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an assistant made in an earlier message."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] = ""
    type: Literal["function"] = "function"

    @classmethod
    def of(cls, name: str, arguments: str, call_id: str) -> ToolCall:
        return cls(CalledFunction(name, arguments), call_id)
