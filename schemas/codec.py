"""The one codec: orjson writes, a typed decoder reads.

The decoder refuses wrong types, missing fields, numbers out of range and NaN, and says where (`$.field`).
Unknown fields are ignored, so that a newer sender may add some.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, TypeVar

import msgspec
import orjson

from halfmoon.schemas.types import Message

M = TypeVar("M")


class MessageInvalid(ValueError):
    """Bytes that are no message of the expected type; the text names the field."""


def encode(message: Message) -> bytes:
    """`message` as JSON. Equal messages give equal bytes (fields in the order of the class)."""
    return orjson.dumps(msgspec.to_builtins(message))


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=True)


def decode(payload: bytes, kind: type[M] | Any) -> M:
    """The message in `payload`, which must be of `kind` (a class, or a union of message classes).

    Raises MessageInvalid, naming the field.
    """
    try:
        return _decoder(kind).decode(payload)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise MessageInvalid(f"{_name(kind)}: {problem}") from None


def digest(payload: bytes) -> str:
    """A short name for bytes, stable between processes and versions."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", "message")
