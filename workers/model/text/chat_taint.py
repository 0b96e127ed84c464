"""Keeps users' text from being read as control tokens of a chat template.

A control token (`<|im_end|>`) in a message would end the message, and let its author speak as the system.
So user text is rendered with the *first characters* of all control tokens replaced by characters of a
private-use plane, one for one. Whatever the template then cuts, trims or joins, no control token can begin
inside user text. Those found in the rendered text are the template's own; everything between them is turned
back and encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from halfmoon.workers.model.text.chat_template import ChatTemplateError

_PRIVATE_FIRST, _PRIVATE_LAST = 0xF0000, 0xFFFFD

Message = Mapping[str, Any]


def split_control(text: str, control: Iterable[str]) -> list[tuple[str, bool]]:
    """Pieces of `text` with whether each is a control token; of two at one place the longer wins."""
    names = sorted(control, key=lambda name: (-len(name), name))
    if not names:
        return [(text, False)]
    pieces = re.split("(" + "|".join(re.escape(name) for name in names) + ")", text)
    return [(piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece]


def render_pieces(
    messages: list[dict[str, Any]], control: list[str], render: Callable[[list[dict[str, Any]]], str]
) -> list[tuple[str, bool]]:
    """The rendered chat as pieces: (text, False), or (control token of the template, True)."""
    first = {name[0] for name in control}
    text = "".join(_strings(messages))
    if not any(character in text for character in first):
        return split_control(render(messages), control)
    plain = render(messages)
    stand_ins = _stand_ins(text + plain, sorted(first))
    back = {ord(stand_in): character for character, stand_in in stand_ins.items()}
    everywhere = str.maketrans(stand_ins)
    tainted = render(_mapped(messages, lambda value: value.translate(everywhere)))
    if tainted.translate(back) != plain:
        # The template looks into the messages (for `</think>`, say): then only possible parts of a control token are
        # replaced, which is every first character of a whole one, or of one cut off at the end of a string.
        whole = re.compile("(?=" + "|".join(map(re.escape, control)) + ")")
        tainted = render(_mapped(messages, lambda value: _narrow(value, control, whole, stand_ins)))
    return [(piece.translate(back), special) for piece, special in split_control(tainted, control)]


def _stand_ins(present: str, characters: list[str]) -> dict[str, str]:
    """A private-use character for each, none of which occurs in `present`. Raises `ChatTemplateError`."""
    used = set(present)
    free = (chr(code) for code in range(_PRIVATE_FIRST, _PRIVATE_LAST + 1) if chr(code) not in used)
    found = dict(zip(characters, free, strict=False))
    if len(found) < len(characters):
        raise ChatTemplateError("the messages use every character of a private plane of Unicode")
    return found


def _narrow(value: str, control: Iterable[str], whole: re.Pattern[str], stand_ins: Mapping[str, str]) -> str:
    """`whole` matches, without taking any of it, where a control token begins."""
    names = list(control)
    places = {match.start() for match in whole.finditer(value)}
    longest = max(map(len, names))
    for end in {len(value), len(value.rstrip())}:
        for at in range(max(0, end - longest + 1), end):
            if value[at] in stand_ins and any(name.startswith(value[at:end]) for name in names):
                places.add(at)
    characters = list(value)
    for at in places:
        characters[at] = stand_ins[characters[at]]
    return "".join(characters)


def _strings(messages: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []

    def note(value: str) -> str:
        found.append(value)
        return value

    _mapped(messages, note)
    return found


def _mapped(messages: list[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """Copies of the messages with every string but the role changed, at any depth."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list | tuple):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            return {(change(key) if isinstance(key, str) else key): walk(item) for key, item in value.items()}
        return value

    return [
        {key: value if key == "role" else walk(value) for key, value in message.items()}
        for message in messages
    ]
