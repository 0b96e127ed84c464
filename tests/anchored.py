"""Diffs whose hunks are found by what they say, not by where it stood: `python tests/anchored.py "A policy"` applies
that section of docs/adding.md to this checkout.

A hunk begins with `@@ BLOCK`: the beginning of the one line of the file that opens a function, a class or a list, in
which the hunk belongs; `@@` alone is the whole file. Its lines without `+` must stand there once, one after the other;
one without a sign that ends in `…` is the beginning of a line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding.md"
REST = "…"


class AnchorLost(Exception):
    """A hunk has no place in its file, or more than one."""


@dataclass(frozen=True)
class Hunk:
    """`lines` with their signs."""

    path: str
    block: str
    lines: tuple[str, ...]

    @property
    def anchor(self) -> list[str]:
        return [line for line in self.lines if not line.startswith("+")]


@dataclass(frozen=True)
class Diff:
    """`made`: the texts of new files."""

    hunks: tuple[Hunk, ...]
    made: dict[str, str]

    @property
    def changed(self) -> set[str]:
        return {hunk.path for hunk in self.hunks}


def diff_of(text: str) -> Diff:
    """As a page has it. Raises ValueError for a line that is none of a diff's."""
    hunks: list[Hunk] = []
    made: dict[str, str] = {}
    for part in re.split(r"^--- ", text, flags=re.MULTILINE)[1:]:
        old, new, body = part.split("\n", 2)
        path = new.removeprefix("+++ ")
        if strange := [line for line in body.splitlines() if line[:1] not in "+- @"]:
            raise ValueError(f"{path}: not a diff's line: {strange[0]!r}")
        if old == "/dev/null":
            made[path] = "".join(f"{line[1:]}\n" for line in body.splitlines()[1:])
            continue
        for each in re.split(r"^@@", body, flags=re.MULTILINE)[1:]:
            block, *lines = each.rstrip("\n").split("\n")
            hunks.append(Hunk(path, block.strip(), tuple(lines)))
    return Diff(tuple(hunks), made)


def block_of(lines: Sequence[str], hunk: Hunk) -> range:
    """Line numbers of the block that the hunk names, from 0: deeper lines, and those that only close a bracket."""
    if not hunk.block:
        return range(len(lines))
    heads = [number for number, line in enumerate(lines) if line.strip().startswith(hunk.block)]
    if len(heads) != 1:
        raise AnchorLost(f"{hunk.path}: {len(heads)} lines begin with {hunk.block!r}, and one should")
    depth = _depth(lines[heads[0]])
    for number in range(heads[0] + 1, len(lines)):
        line = lines[number]
        if line.strip() and _depth(line) <= depth and line.lstrip()[0] not in ")]}":
            return range(heads[0], number)
    return range(heads[0], len(lines))


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def place_of(lines: Sequence[str], hunk: Hunk) -> int:
    """The number of the first line of its anchor."""
    block, anchor = block_of(lines, hunk), hunk.anchor
    ends = block.stop - len(anchor) + 1
    found = [
        at
        for at in range(block.start, ends)
        if all(_is(lines[at + n], line) for n, line in enumerate(anchor))
    ]
    if len(found) != 1:
        where = f"in {hunk.block!r}" if hunk.block else "in the file"
        wanted = "\n".join(line[1:] for line in anchor)
        raise AnchorLost(
            f"{hunk.path}: {len(found)} places {where}, and one should, have the lines\n{wanted}"
        )
    return found[0]


def _is(line: str, wanted: str) -> bool:
    if wanted.startswith(" ") and wanted.endswith(REST):
        return line.startswith(wanted[1 : -len(REST)])
    return line == wanted[1:]


def applied(hunk: Hunk, text: str) -> str:
    """The file's text with the hunk."""
    lines = text.splitlines()
    at = place_of(lines, hunk)
    new: list[str] = []
    for line in hunk.lines:
        if line.startswith("+"):
            new.append(line[1:])
            continue
        if line.startswith(" "):
            new.append(lines[at])
        at += 1
    first = at - len(hunk.anchor)
    return "".join(f"{line}\n" for line in [*lines[:first], *new, *lines[at:]])


def apply(diff: Diff, folder: Path) -> None:
    """Changes the files below `folder`; none is changed where AnchorLost is raised."""
    texts = {path: (folder / path).read_text(encoding="utf-8") for path in sorted(diff.changed)}
    for hunk in diff.hunks:
        texts[hunk.path] = applied(hunk, texts[hunk.path])
    for path, text in {**texts, **diff.made}.items():
        (folder / path).write_text(text, encoding="utf-8")


def parts(page: str) -> dict[str, tuple[str, str]]:
    """By the titles of its sections: the text of each, and the diff in it."""
    found: dict[str, tuple[str, str]] = {}
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, text = part.split("\n", 1)
        (diff,) = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        found[title] = text, diff
    return found


def main() -> int:
    known = parts(PAGE.read_text(encoding="utf-8"))
    if len(sys.argv) != 2 or sys.argv[1] not in known:
        print(f"usage: {sys.argv[0]} SECTION, one of: {', '.join(known)}", file=sys.stderr)
        return 2
    try:
        apply(diff_of(known[sys.argv[1]][1]), ROOT)
    except AnchorLost as lost:
        print(lost, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
