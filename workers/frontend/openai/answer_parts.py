"""Reads a chat's text while it comes: thoughts, content, calls of tools.

Calls are read as the model writes them: in `<tool_call>` tags (Hermes, Qwen), as JSON alone (Llama 3), as the list that
the grammar of `tool_choice: required` makes, or, of a named function, the arguments and nothing else. A call is passed
on in parts: its name first, then its arguments, a piece of their JSON at a time. What looks like a call and is none is
content. The parts do not depend on how the text was cut.

A call may be cut by the length of the answer, or its arguments be no JSON. In a stream its parts are out by then, and
the finish reason tells. In a whole answer all of the text is content then, as in vLLM: a client can carry out every
call that it finds there.
"""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Iterator
from typing import Literal, NamedTuple

import orjson

from halfmoon.workers.model.text.detokenizer import overlap

CallStyle = Literal["", "hermes", "llama3", "list", "arguments"]

THINK, THOUGHT = "<think>", "</think>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_BETWEEN = " \t\r\n[],;"


class AnswerPart(NamedTuple):
    """`call`: the index of the call that it belongs to; -1: none. Its first part has `name`."""

    content: str = ""
    reasoning: str = ""
    call: int = -1
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class _Stage(enum.Enum):
    START = enum.auto()  # nothing but space yet
    THINKING = enum.auto()
    CONTENT = enum.auto()
    CALLS = enum.auto()  # before a call's JSON
    HEADER = enum.auto()
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()  # behind a call's arguments
    OVER = enum.auto()  # what follows is not passed on


class AnswerParts:
    """`push` the text as it comes, `final` with the last of it."""

    def __init__(
        self,
        style: CallStyle,
        *,
        thinks: bool = False,
        thinking: bool = False,
        parallel: bool = True,
        named: str = "",
    ) -> None:
        """`thinks`: the model may begin with thoughts; `thinking`: its prompt has begun them. `parallel`: more than the
        first call counts. `named`: the function whose arguments the text is.
        """
        self._parallel, self._named = parallel, named
        self._style = style
        self._thinks = thinks
        self._began = thinks, thinking
        self._stage = _Stage.THINKING if thinking else _Stage.START
        self._held = ""
        #: Behind a call's mark and before its JSON: what is content too, where no call follows.
        self._lead = ""
        #: Of the arguments that are passed on: how deep in them, and in a string of theirs, behind a backslash.
        self._depth, self._quoted, self._escaped = 0, False, False
        self.calls = 0
        #: The arguments of the last call, and the number of the first call that is none to carry out (-1: each is one).
        self._written: list[str] = []
        self._broken = -1

    @property
    def broken(self) -> bool:
        """Whether, of the calls that count, one was cut or has arguments that are no JSON. To ask at the end."""
        return self._broken == 0 or (self._broken > 0 and self._parallel)

    def finish_reason(self, reason: str) -> str:
        """`reason`, or `tool_calls`; of a named function's call it stays, as vLLM and OpenAI have it."""
        called = self.calls and not self.broken and self._style != "arguments"
        return "tool_calls" if called and (self._style != "list" or reason == "stop") else reason

    def whole(self, text: str) -> list[AnswerPart]:
        """The parts of a whole answer. The arguments of a named function stay what they are, as in vLLM."""
        parts = self.push(text, final=True)
        if not self.broken or self._style == "arguments":
            return parts
        thinks, thinking = self._began
        return AnswerParts("", thinks=thinks, thinking=thinking).push(text, final=True)

    def push(self, text: str, *, final: bool = False) -> list[AnswerPart]:
        self._held += text
        parts: list[AnswerPart] = []
        while True:
            before = self._stage, self._held
            parts += self._step(final)
            if (self._stage, self._held) == before:
                if final and self._stage is _Stage.ARGUMENTS:
                    self._check_call()
                return parts if self._parallel else [part for part in parts if part.call <= 0]

    def _step(self, final: bool) -> Iterator[AnswerPart]:
        match self._stage:
            case _Stage.START:
                self._start(final)
            case _Stage.THINKING:
                thought, ended = self._until(THOUGHT, final)
                if thought:
                    yield AnswerPart(reasoning=thought)
                if ended:
                    self._stage = _Stage.START
                    self._thinks = False
            case _Stage.CONTENT:
                yield from self._content(final)
            case _Stage.CALLS:
                yield from self._between(final)
            case _Stage.HEADER:
                yield from self._header(final)
            case _Stage.ARGUMENTS:
                yield from self._arguments()
            case _Stage.TAIL:
                self._tail()
            case _Stage.OVER:
                self._held = ""

    def _start(self, final: bool) -> None:
        """Decide by what the text begins with."""
        text = self._held.lstrip()
        marks = ([THINK] if self._thinks else []) + ([_PYTHON_TAG] if self._style == "llama3" else [])
        for mark in marks:
            if text.startswith(mark):
                self._held = text.removeprefix(mark)
                self._stage = _Stage.THINKING if mark == THINK else _Stage.CALLS
                return
        if not final and any(mark.startswith(text) for mark in marks):
            return
        match self._style:
            case "arguments":
                if text or final:
                    self._stage = _Stage.ARGUMENTS
            case "list":
                self._stage = _Stage.CALLS
            case "llama3":
                if text or final:
                    self._stage = _Stage.CALLS if text.startswith("{") else _Stage.CONTENT
            case _:
                if text or final or not self._thinks:
                    self._stage = _Stage.CONTENT

    def _content(self, final: bool) -> Iterator[AnswerPart]:
        if self._style != "hermes":
            text, self._held = self._held, ""
        else:
            text, ended = self._until(_OPEN, final)
            if ended:
                self._stage, self._lead = _Stage.CALLS, _OPEN
        # Between calls and behind them there is nothing that vLLM would show.
        if text and not self.calls:
            yield AnswerPart(content=text)

    def _between(self, final: bool) -> Iterator[AnswerPart]:
        """Between calls of lists, and of Llama's, there may be brackets, commas and semicolons."""
        text = self._held.lstrip(_BETWEEN if self._style != "hermes" else None)
        self._lead += self._held[: len(self._held) - len(text)]
        self._held = text
        if text:
            self._stage = _Stage.HEADER
        elif final:
            self._stage = _Stage.OVER
            if self._broken < 0 and (self._style == "hermes" or not self.calls):
                self._broken = self.calls
            if self._style == "hermes" and not self.calls:
                yield AnswerPart(content=self._lead)

    def _header(self, final: bool) -> Iterator[AnswerPart]:
        found = _HEADER.match(self._held)
        if found is not None:
            self._held = self._held[found.end() :]
            self._stage, self._depth = _Stage.ARGUMENTS, 0
            self._written.clear()
            yield AnswerPart(call=self.calls, call_id=_call_id(), name=found[1])
            self.calls += 1
            return
        ended = self._held.find(_CLOSE) if self._style == "hermes" else -1
        if ended < 0 and not final and (self._style != "llama3" or _may_be_header(self._held)):
            return
        body = self._held if ended < 0 else self._held[:ended]
        self._held = "" if ended < 0 else self._held[ended + len(_CLOSE) :]
        self._stage = _Stage.CONTENT
        whole = _whole_call(body)
        cut = ended < 0 and (self._style != "llama3" or _may_be_header(body))
        if whole is None and cut and self._broken < 0:
            self._broken = self.calls
        if whole is not None:
            name, arguments = whole
            yield AnswerPart(call=self.calls, call_id=_call_id(), name=name, arguments=arguments)
            self.calls += 1
        elif not self.calls and self._style != "list":
            yield AnswerPart(content=self._lead + body + (_CLOSE if ended >= 0 else ""))

    def _arguments(self) -> Iterator[AnswerPart]:
        text, end = self._held, len(self._held)
        for place, character in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
                continue
            if character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    end = place + 1
                    self._stage = _Stage.TAIL
                    break
            elif not self._depth and character in "},]":  # of a value that is neither object nor list
                end = place
                self._stage = _Stage.TAIL
                break
        fragment, self._held = text[:end], text[end:]
        self._written.append(fragment)
        if self._style == "arguments":
            if not self.calls:
                self.calls = 1
                yield AnswerPart(call=0, call_id=_call_id(), name=self._named)
            if self._stage is _Stage.TAIL:
                self._stage = _Stage.OVER
        if self._stage is not _Stage.ARGUMENTS:
            self._check_call()
        if fragment:
            yield AnswerPart(call=self.calls - 1, arguments=fragment)

    def _check_call(self) -> None:
        """Note where the arguments of the last call are none."""
        try:
            orjson.loads("".join(self._written))
        except orjson.JSONDecodeError:
            if self._broken < 0:
                self._broken = self.calls - 1

    def _tail(self) -> None:
        """The end of the call's own object, and of its tag."""
        at = self._held.find("}")
        if self._style == "hermes":
            at = self._held.find(_CLOSE)
            if at < 0:
                return
            self._held = self._held[at + len(_CLOSE) :]
            self._stage = _Stage.CONTENT
        elif at >= 0:
            self._held = self._held[at + 1 :]
            self._stage = _Stage.CALLS

    def _until(self, mark: str, final: bool) -> tuple[str, bool]:
        """The held text before `mark`, and whether it is there; of what may be its beginning nothing is passed on."""
        before, found, behind = self._held.partition(mark)
        if found:
            self._held = behind
            return before, True
        hold = 0 if final else overlap(before, mark)
        self._held = before[len(before) - hold :]
        return before[: len(before) - hold], False


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _may_be_header(text: str) -> bool:
    """Whether an object that begins so may yet turn out to be a call."""
    key = text.lstrip("{ \t\r\n")[:6]
    return text.count("{") > text.count("}") and any(each.startswith(key) for each in ('"name"', '"type"'))


def _whole_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose fields come in another order; None: it is no call."""
    try:
        call = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], orjson.dumps(arguments).decode()
