"""How a model cannot be used. Each error is one line; those of a file's content name the file and the field."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator
from pathlib import Path

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80
_SHOWN.maxlong = 40


class ModelError(Exception):
    """The model cannot be used: ours to say at start, before anything else runs."""


class ModelNotFound(ModelError):
    """No model of this name, no such file, or a file that the model needs is missing."""


class ModelFieldError(ModelError):
    """A field of a file is at fault; `file` is added by :func:`in_file` where the raiser does not know it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field, self.problem, self.file = field, problem, ""

    def __str__(self) -> str:
        text = f"{self.file}: {self.field} {self.problem}" if self.file else f"{self.field} {self.problem}"
        return " ".join(text.split())


class ModelUnsupported(ModelFieldError):
    """The model exists, but one of its fields has a value that the engine does not compute."""

    def __init__(self, field: str, found: object, supported: str) -> None:
        super().__init__(field, f"is {shown(found)}; supported: {supported}")


class ModelNotComputed(ModelFieldError):
    """The model has a part that the engine would leave out."""


class ModelBroken(ModelFieldError):
    """A file is damaged, or contradicts itself or another file of the model."""


def shown(value: object) -> str:
    """A value that somebody else wrote, on one line and short."""
    return _SHOWN.repr(value)


@contextlib.contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Adds the file's path to errors about its fields; a refusal by the operating system becomes ModelNotFound."""
    try:
        yield
    except ModelFieldError as error:
        error.file = error.file or str(path)
        raise
    except OSError as error:
        raise ModelNotFound(f"{shown(str(path))}: {error.strerror or error}") from error
