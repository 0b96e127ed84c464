"""Checked reading of values that a model's files hold: each has a type and bounds, or is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfmoon.workers.model.loading.errors import ModelBroken, ModelNotFound, in_file, shown

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
JSON_BYTES_MAX = 64 << 20
"""Far above any config or index; a tokenizer's own file is read by its library."""


class Fields:
    """Values by name. `prefix` stands before each name in errors; a value of None counts as absent."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values, self._prefix = values, prefix

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def count(self, name: str, most: int, *, default: int | None = None) -> int:
        """A whole number from 1 to `most`; without a default the field must be there."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self._broken(name, value, f"a whole number from 1 to {most}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._broken(name, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            raise self._broken(name, value, "a finite number above 0")
        return number

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._broken(name, value, "true or false")
        return bool(value)

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self._broken(name, value, "a text")
        return value

    def token_ids(self, name: str, vocab: int) -> tuple[int, ...]:
        """One id or a list of them, each below `vocab`; empty when the field is absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab for i in ids):
            raise self._broken(name, value, f"token ids below {vocab}")
        return tuple(ids)

    def strings(self, name: str) -> list[str]:
        value = self._present(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._broken(name, value, "a list of texts")
        return value

    def inner(self, name: str) -> Fields:
        """The object inside of this field; empty when it is absent."""
        value = self._values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self._broken(name, value, "an object")
        return Fields(value, f"{self._prefix}{name}.")

    def __bool__(self) -> bool:
        return bool(self._values)

    def _present(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise ModelBroken(f"{self._prefix}{name}", "is missing")
            return default
        return value

    def _broken(self, name: str, found: object, wanted: str) -> ModelBroken:
        return ModelBroken(f"{self._prefix}{name}", f"is {shown(found)}; it must be {wanted}")


def read_text(path: Path, bytes_max: int = JSON_BYTES_MAX) -> str:
    """The file as UTF-8. Raises ModelBroken, ModelNotFound."""
    with in_file(path):
        if not path.is_file():
            raise ModelNotFound(f"{path} is {'no regular file' if path.exists() else 'missing'}")
        size = path.stat().st_size
        if size > bytes_max:
            raise ModelBroken("size", f"is {size} bytes; at most {bytes_max}")
        try:
            return path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ModelBroken("content", f"is no UTF-8 at byte {error.start}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The file's one JSON object. Raises ModelBroken, ModelNotFound."""
    text = read_text(path)
    with in_file(path):
        try:
            value = json.loads(text)
        except RecursionError:
            raise ModelBroken("content", "is JSON that is nested too deep") from None
        except ValueError as error:
            raise ModelBroken("content", f"is no JSON: {str(error)[:200]}") from None
        if not isinstance(value, dict):
            raise ModelBroken("content", f"is {shown(value)}; it must be a JSON object")
        if _SURROGATE.search(text):
            _check_characters(value)
        return value


def _check_characters(value: dict[str, Any]) -> None:
    """JSON's escapes can write half a character, which no tokenizer takes. Raises ModelBroken."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ModelBroken("content", f"has {half}, half a character (a lone surrogate)") from None
    except RecursionError:  # written with a few more frames than it was read
        raise ModelBroken("content", "is JSON that is nested too deep") from None


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`; empty when there is no such file. A link to nothing is one that is missing."""
    with in_file(path):
        return read_json(path) if path.is_symlink() or path.exists() else {}
