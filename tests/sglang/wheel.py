"""Modules of SGLang's wheel, without SGLang: those that are named come out of the wheel, all others are stand-ins."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

WHEEL = os.environ.get("HALFMOON_SGLANG_WHEEL", "")
#: Packages that have stand-ins where a named module lacks them.
_STANDS_IN = ("sglang", "psutil")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, place: Path, named: Sequence[str]) -> None:
        self._place, self._named = place, frozenset(named)

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _STANDS_IN:
            return None
        if name in self._named:
            return importlib.util.spec_from_file_location(name, self._place / f"{name.replace('.', '/')}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        found: ModuleType = module
        return found

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def modules_of_wheel(place: Path, named: Sequence[str]) -> Iterator[None]:
    """While it is entered these can be imported; nothing of them is left afterwards. `place`: an empty folder."""
    with zipfile.ZipFile(WHEEL) as wheel:
        for name in named:
            wheel.extract(f"{name.replace('.', '/')}.py", place)
    finder = _Finder(place, named)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in _STANDS_IN]:
            del sys.modules[name]


def text_of_wheel(path: str) -> str:
    """A file of `sglang/srt`."""
    with zipfile.ZipFile(WHEEL) as wheel:
        return wheel.read(f"sglang/srt/{path}").decode()
