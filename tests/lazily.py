"""Libraries that take a second to import, and that few tests need.

Each process of a run imports every test file, whichever it will run. So a client's library or a plotting one is
imported by the first test that asks it for something.
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazily:
    """Stands for the module `name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # what a collector of tests asks of any object
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
