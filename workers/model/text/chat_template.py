"""Renders a model's chat template: Jinja in a sandbox, with the functions that templates expect."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.meta

from halfmoon.workers.model.loading.errors import ModelBroken
from halfmoon.workers.model.text.template_meter import (
    Meter,
    TemplateLimit,
    TemplateRefusal,
    TemplateSlow,
    metered,
    size_of,
)
from halfmoon.workers.model.text.template_sandbox import MeteredEnvironment

logger = logging.getLogger(__name__)

SECONDS_MAX = 2.0
"""CPU time that one rendering may take, beside `_SECONDS_A_CHARACTER`; usual templates need below 1 ms."""

_SECONDS_A_CHARACTER = 2e-6
_GIVEN_MAX = 1 << 30
#: All errors that Jinja, and Python under it, raise for the text of a template.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TemplateRefusal, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError,
    NameError, NotImplementedError, RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


class ChatTemplateError(Exception):
    """The messages do not fit the template, or the model has none. The words are the template's, where it has
    some.
    """


class ChatTemplateSlow(ChatTemplateError):
    """The template took longer than the caller's limit."""


class ChatTemplate:
    """One compiled template. `specials` are the values of `bos_token` and `eos_token` in templates.

    Raises `ModelBroken` for one that cannot be compiled, or does not end for the shortest of chats.
    """

    def __init__(self, source: str, specials: dict[str, str]) -> None:
        self._specials = specials
        self.source = source
        self.knows_tools = False
        try:
            with metered(Meter(0, SECONDS_MAX)), warnings.catch_warnings():
                # Python's, about the code that Jinja makes of odd expressions.
                warnings.simplefilter("ignore")
                environment = MeteredEnvironment()
                self._template = environment.from_string(source)
                self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (*_TEMPLATE_ERRORS, TemplateLimit) as error:
            raise ModelBroken("chat_template", f"is no template: {_words(error)}") from None
        try:
            self._rendered(
                [{"role": "user", "content": "a"}],
                add_generation_prompt=True,
                seconds_max=SECONDS_MAX,
                switches={},
            )
        except TemplateLimit as error:
            raise ModelBroken("chat_template", f"is refused: {error}") from None
        except _TEMPLATE_ERRORS as error:
            # It may refuse such a chat: that is for a request to hear.
            logger.debug("the chat template refuses the shortest chat: %s", _words(error))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        switches: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        seconds_max: float = SECONDS_MAX,
    ) -> str:
        """`switches`: names that this template reads.

        Raises `ChatTemplateError`; `ChatTemplateSlow` when it takes more than `seconds_max` of CPU, and a little for
        each character.
        """
        try:
            return self._rendered(
                messages,
                add_generation_prompt=add_generation_prompt,
                seconds_max=seconds_max,
                switches=switches or {},
                tools=tools,
            )
        except TemplateSlow as error:
            raise ChatTemplateSlow(str(error)) from None
        except (TemplateRefusal, TemplateLimit) as error:
            raise ChatTemplateError(_words(error)) from None
        except _TEMPLATE_ERRORS as error:
            raise ChatTemplateError(
                f"the chat template cannot render these messages: {_words(error)}"
            ) from None

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        seconds_max: float,
        switches: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        given = size_of([*messages, *(tools or ())], _GIVEN_MAX)
        with metered(Meter(given, seconds_max + given * _SECONDS_A_CHARACTER)):
            known = {
                "messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools, **self._specials,
            }  # fmt: skip
            return self._template.render({**switches, **known})


def _words(error: BaseException) -> str:
    """One line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]


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
