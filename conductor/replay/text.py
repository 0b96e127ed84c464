"""A line of a log in words, for `halfmoon events show` and `tail`."""

from __future__ import annotations

import datetime
import functools
from typing import Any

import msgspec

from halfmoon.conductor.replay.logfile import (
    DecisionLine,
    EventLine,
    InvalidLine,
    Line,
    ProgressLine,
    SnapshotLine,
)
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.types import KEY_BYTES

_KEYS = "block_keys"


def clock(at_ns: int) -> str:
    """Time of day, UTC, to the microsecond."""
    at = datetime.datetime.fromtimestamp(at_ns // SECOND_NS, datetime.UTC)
    return f"{at:%H:%M:%S}.{at_ns % SECOND_NS // 1_000:06d}"


def described(line: Line) -> str:
    """One line of text."""
    match line:
        case EventLine():
            return f"{line.seq:>9}  {clock(line.at_ns)}  {message(line.event)}"
        case InvalidLine():
            return f"{line.seq:>9}  {clock(line.at_ns)}  (no event; passed over)"
        case DecisionLine():
            return f"{'':>9}  {clock(line.at_ns)}    -> {line.cause_seq}.{line.position} {message(line.decision)}"
        case ProgressLine():
            return f"{'':>9}  {clock(line.at_ns)}    kv {message(line.progress)}"
        case SnapshotLine():
            return f"{line.seq:>9}  (snapshot, {len(line.snapshot)} bytes)"


def message(value: msgspec.Struct) -> str:
    """Its class, then its fields; nested values as `name.field`, block keys as their number."""
    fields = " ".join(f"{name}={text}" for name, text in _fields(value))
    return f"{type(value).__name__} {fields}".rstrip()


def _fields(value: msgspec.Struct) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for field in _of_class(type(value)):
        inner: Any = getattr(value, field.name)
        if (field.default is not msgspec.NODEFAULT and inner == field.default) or inner == []:
            continue
        if isinstance(inner, msgspec.Struct):
            found += [(f"{field.name}.{name}", text) for name, text in _fields(inner)]
        elif field.name == _KEYS:
            found.append((field.name, f"<{len(inner) // KEY_BYTES}>"))
        elif isinstance(inner, list):
            found.append((field.name, "[" + ", ".join(map(_element, inner)) + "]"))
        elif isinstance(inner, str) and (" " in inner or not inner):
            found.append((field.name, f'"{inner}"'))
        else:
            found.append((field.name, duration(inner) if _is_span(field.name, inner) else str(inner)))
    return found


@functools.cache
def _of_class(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def _element(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        return "{" + " ".join(f"{name}={text}" for name, text in _fields(value)) + "}"
    return str(value)


def _is_span(name: str, value: Any) -> bool:
    return isinstance(value, int) and name.endswith("_ns") and not name.startswith(("at_", "finished_at"))


def duration(value_ns: int) -> str:
    """A duration in the unit that suits it."""
    if abs(value_ns) >= SECOND_NS:
        return f"{value_ns / 1e9:.3f} s"
    if abs(value_ns) >= 1_000_000:
        return f"{value_ns / 1e6:.1f} ms"
    return f"{value_ns / 1e3:.1f} us" if value_ns else "0"
