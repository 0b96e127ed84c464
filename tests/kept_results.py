"""Results of runs that go on where an earlier one ended: what was played, and the file that is never half written."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from halfmoon.conductor.code_version import code_version

ROOT = Path(__file__).parents[1]


def versions_of(folders: Iterable[str]) -> dict[str, str]:
    """The code that is played: the core's version, a digest of all of `folders`, the interpreter."""
    sources = blake2b(digest_size=8)
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        sources.update(path.read_bytes())
    return {"core": code_version(), "played": sources.hexdigest(), "python": platform.python_version()}


def keep(path: Path, body: Any) -> None:
    """Write `body` as JSON in place of what is at `path`."""
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    unfinished.replace(path)
