"""On what a figure was measured: day, commit, processor, load, and the modules that ran, each folder with a digest of
its code. A kept result whose modules changed since then is older than the code; `figures.py` says so wherever it is
shown.

Comments and docstrings are no code here. Folders are named from the root of the repository ("store/pool"); a program
of `benchmarks/` or `tests/` that took part stands there as a file.
"""

from __future__ import annotations

import datetime
import io
import os
import platform
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PACKAGES = ("bus", "cli", "conductor", "schemas", "store", "workers")
#: What the processes of a cluster are made of. Which of it a request went through is not told apart.
SERVING = (
    "bus",
    "cli/processes",
    "conductor/core",
    "conductor/live",
    "conductor/view",
    "schemas",
    "store",
    "workers",
)
#: They print and write. A change of them changes no figure.
PRINTING = ("benchmarks/clusters.py", "benchmarks/measured.py", "benchmarks/figures.py")


def beside(*also: str) -> dict[str, Any]:
    """The day, the commit, the machine, what else ran on it, and each module that this process has loaded, with its
    digest. `also`: folders that ran elsewhere, with all below them.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "modules": digests({*loaded(), *below(also)}),
    }


def loaded() -> set[str]:
    """Folders of halfmoon of which this process has loaded a module, and the programs beside them."""
    found: set[str] = set()
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/").resolve()
        if not path.is_relative_to(ROOT):
            continue
        name = path.relative_to(ROOT)
        if name.parts[0] in PACKAGES:
            found.add(name.parent.as_posix())
        elif name.parts[0] in ("benchmarks", "tests") and name.as_posix() not in PRINTING:
            found.add(name.as_posix())
    return found


def below(folders: Iterable[str]) -> set[str]:
    """`folders`, and the folders in them that hold code."""
    return {
        path.parent.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }


def digests(modules: Iterable[str]) -> dict[str, str]:
    return {module: digest_of(module) for module in sorted(modules)}


@cache
def digest_of(module: str) -> str:
    """Of the code of a file, or of the files in a folder, those below it left out. "" where there is none."""
    place = ROOT / module
    if not place.exists():
        return ""
    digest = blake2b(digest_size=6)
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        if path.is_file() and path.suffix not in (".pyc", ".md"):
            content = path.read_bytes()
            digest.update(path.name.encode() + b"\0")
            digest.update(code_of(content.decode()).encode() if path.suffix == ".py" else content)
    return digest.hexdigest()


def code_of(source: str) -> str:
    """The lines of a module without comments, docstrings (any string that is a statement) and what is blank. Of any
    Python the same.
    """
    lines = source.splitlines()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
        elif token.type == tokenize.NEWLINE:
            if statement and all(each.type == tokenize.STRING for each in statement):
                begin, end = statement[0].start[0], statement[-1].end[0]
                lines[begin - 1 : end] = [""] * (end - begin + 1)
            statement = []
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            statement.append(token)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def digest_of_all(modules: Mapping[str, str]) -> str:
    """One digest of those of `modules`."""
    return blake2b(orjson.dumps(modules, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


def changed(modules: Mapping[str, str]) -> list[str]:
    """Those of `modules` that are no longer as they were."""
    return [module for module, digest in modules.items() if digest_of(module) != digest]


def keep(path: Path, body: Any) -> None:
    """Write `body` as JSON in place of what is at `path`; never half of it."""
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    unfinished.replace(path)


def _commit() -> str:
    """Short; "-dirty" behind it where code is not committed: such a figure is of no commit."""
    code = (*PACKAGES, "benchmarks", "tests")
    return _git("rev-parse", "--short", "HEAD") + (
        "-dirty" if _git("status", "--porcelain", "--", *code) else ""
    )


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
