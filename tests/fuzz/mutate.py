"""How valid inputs are made wrong: bytes, and JSON by its structure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

#: Values that parsers have stumbled over.
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400,
    0.0, -0.0, 0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"),
    "", "0", "a", "a" * 300, "\x00", "\n", "\r\nset-cookie: a=b", "../../etc/passwd", "%s%n{0}", "\ud800",
    "\udfff\ud800", "\U0001f313", "\u202e", "<|im_start|>", "{{ 7*7 }}", "$JS.API.>", "halfmoon.*", ">", "NaN", "1e999",
    [], {}, [[]], {"": ""}, [None], [0] * 300, {"a": {"b": {"c": {}}}},
]  # fmt: skip
_TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\u", b"\\", b"null", b"NaN", b"1e999", b"-", b"\xff",
           b"\xc0\xaf", b"\xed\xa0\x80", b"\x00", b"\r\n", b"/*", b"\xef\xbb\xbf", b"9" * 40]  # fmt: skip


def mutated_bytes(draw: random.Random, content: bytes, times: int = 0) -> bytes:
    """`content` with `times` (0: one to four) changes anywhere."""
    changed = bytearray(content)
    for _ in range(times or draw.randint(1, 4)):
        place = draw.randint(0, len(changed))
        length = min(draw.choice((1, 1, 2, 4, 16, 64)), len(changed) - place)
        match draw.randrange(7):
            case 0:
                del changed[place : place + length]
            case 1:
                changed[place:place] = draw.randbytes(length)
            case 2:
                changed[place : place + length] = draw.randbytes(length)
            case 3:
                changed[place:place] = draw.choice(_TOKENS)
            case 4:
                changed[place:place] = changed[place : place + length] * draw.randint(1, 8)
            case 5:
                if place < len(changed):
                    changed[place] ^= 1 << draw.randrange(8)
            case _:
                del changed[place:]
    return bytes(changed)


def mutated_json(draw: random.Random, value: Any, times: int = 0) -> Any:
    """A copy of `value` with `times` (0: one to three) of its places replaced, dropped, doubled or wrapped."""
    for _ in range(times or draw.choice((1, 1, 2, 3))):
        value = _changed(draw, value, draw.randint(0, 3))
    return value


def _changed(draw: random.Random, value: Any, deeper: int) -> Any:
    if deeper and isinstance(value, dict) and value:
        key = draw.choice(list(value))
        return _changed_entry(draw, value, key, deeper)
    if deeper and isinstance(value, list) and value:
        place = draw.randrange(len(value))
        rest = value[:place] + value[place + 1 :]
        if not draw.randrange(4):
            return rest
        return [*value[:place], _changed(draw, value[place], deeper - 1), *value[place + 1 :]]
    return _odd(draw, value)


def _changed_entry(draw: random.Random, value: dict[Any, Any], key: Any, deeper: int) -> dict[Any, Any]:
    match draw.randrange(6):
        case 0:
            return {name: each for name, each in value.items() if name != key}
        case 1:
            return {
                **value,
                draw.choice([f"{key}_", "", "__proto__", "a" * 300, str(key).upper()]): value[key],
            }
        case _:
            return {**value, key: _changed(draw, value[key], deeper - 1)}


def _odd(draw: random.Random, value: Any) -> Any:
    odd: list[Callable[[], Any]] = [
        lambda: draw.choice(VALUES),
        lambda: [value],
        lambda: {"a": value},
        lambda: nested(draw),
    ]
    if isinstance(value, str):
        odd += [lambda: value * draw.randint(2, 50), lambda: value[: draw.randint(0, len(value))]]
        odd += [lambda: value + chr(draw.choice((0, 10, 0x7F, 0xD800, 0xFFFF, 0x10FFFF)))]
    if isinstance(value, int | float):
        odd += [
            lambda: -value,
            lambda: value + draw.choice((-1, 1)),
            lambda: str(value),
            lambda: f"{value}.0",
        ]
    return draw.choice(odd)()


def nested(draw: random.Random) -> Any:
    """Lists in lists, or objects in objects."""
    value: Any = 0
    inside_object = draw.random() < 0.5
    for _ in range(draw.choice((5, 30, 90))):
        value = {"a": value} if inside_object else [value]
    return value


def json_bytes(draw: random.Random, value: Any) -> bytes:
    """As JSON: sometimes with white space, escapes, a name twice, deep nesting, or broken. What JSON does not have, as
    the bytes of a line that is broken already, is in it as its text.
    """
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5, default=str)
    content = text.encode(errors="surrogatepass")
    match draw.randrange(12):
        case 0:
            return mutated_bytes(draw, content)
        case 1:
            return b" \t\r\n" * draw.randint(1, 20) + content + b"\n"
        case 2:
            return content.replace(b"{", b'{"model": 5, ', 1)
        case 3:
            return content[: draw.randint(0, len(content))]
        case 4:
            depth = draw.choice((100, 1500, 100_000))
            return content.replace(b"{", b'{"deep": ' + b"[" * depth + b"]" * depth + b", ", 1)
        case _:
            return content
