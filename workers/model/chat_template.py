"""Renders a model's chat template: Jinja in a sandbox, with the functions that templates expect."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(Exception):
    """The messages do not fit the template, or the model has none. The words are the template's, where it has
    some.
    """


class ChatTemplate:
    """One compiled template. `specials` are what templates call `bos_token` and `eos_token`."""

    def __init__(self, source: str, specials: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._specials = specials
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._specials
            )
        except ChatTemplateError:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            OverflowError,
        ) as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is one string: parts of type text are joined, null becomes empty.

    Raises `ChatTemplateError` for anything else.
    """
    if not messages:
        raise ChatTemplateError("messages is empty")
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"messages[{i}].role is missing")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
            texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
            if len(texts) != len(content):
                raise ChatTemplateError(f"messages[{i}].content: every part must be of type text")
            content = "".join(texts)
        elif content is None:
            content = ""
        elif not isinstance(content, str):
            raise ChatTemplateError(f"messages[{i}].content is neither text nor a list of parts")
        plain.append({**message, "content": content})
    return plain


def _raise(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
