"""The one codec: orjson writes, a typed decoder reads.

The decoder refuses wrong types, missing fields, numbers out of range and NaN, and names the place (`$.field`). Unknown
fields are ignored, so that a newer sender may add some. The encoder refuses values that JSON lacks (NaN, infinities,
integers over 64 bits): orjson alone would write null for the first two, and the receiver would be blamed.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, TypeVar

import msgspec
import orjson

from halfmoon.schemas.types import Message, Part

M = TypeVar("M")


class MessageInvalid(ValueError):
    """Bytes that are no message of the expected type, or a value that no JSON can carry; the text names the field."""


def encode(message: Message | Part) -> bytes:
    """`message` as JSON: fields in the order of the class, mappings sorted, so that equal messages give equal bytes.

    Raises MessageInvalid, naming the field, for NaN and infinities, and for an integer or a text that is no JSON.
    """
    plain = msgspec.to_builtins(message, str_keys=True, order="deterministic")
    try:
        payload = orjson.dumps(plain)
    except orjson.JSONEncodeError as problem:
        raise MessageInvalid(f"{type(message).__name__}: {problem}") from None
    if b"null" in payload:
        # Cheap to look for; seldom there, because a field that is None by default is left out.
        path = _not_finite(plain, "$")
        if path:
            raise MessageInvalid(f"{type(message).__name__}: no finite number - at `{path}`")
    return payload


def _not_finite(value: Any, path: str) -> str:
    """The path of the first NaN or infinity in plain values, "" when there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else path
    if isinstance(value, dict):
        found = (_not_finite(inner, f"{path}.{key}") for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        found = (_not_finite(inner, f"{path}[{index}]") for index, inner in enumerate(value))
    else:
        return ""
    return next(filter(None, found), "")


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=True)


def decode(payload: bytes, kind: type[M] | Any) -> M:
    """The message in `payload`, which must be of `kind` (a class, or a union of message classes).

    Raises MessageInvalid, naming the field.
    """
    try:
        return _decoder(kind).decode(payload)  # type: ignore[no-any-return, arg-type]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise MessageInvalid(f"{_name(kind)}: {one_line(problem)}") from None


def one_line(problem: Exception | str) -> str:
    """The text of an error, short and on one line: it may repeat bytes of any kind."""
    text = str(problem).encode("unicode_escape").decode()
    # The end is kept because decoders name the field there, after the value.
    return text if len(text) <= 300 else f"{text[:180]} ... {text[-115:]}"


def digest(payload: bytes) -> str:
    """A short name for bytes, stable between processes and versions."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", "message")
