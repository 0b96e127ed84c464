"""docs/adding.md is true: each of its diffs applies to this tree, touches what it says, and does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding.md"
#: What a change may touch, new files aside.
FILES_MAX = {"A policy": 2, "A transport": 3, "A tier": 2, "A role": 10, "An event": 4}


class Section(NamedTuple):
    """One way to add something."""

    title: str
    text: str
    diff: str
    proof: str

    @property
    def files(self) -> tuple[int, int]:
        """Files that the diff changes, and those that it makes."""
        made = self.diff.count("\n--- /dev/null\n")
        return self.diff.count("\n+++ ") - made, made


def sections(page: str) -> Iterator[Section]:
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, text = part.split("\n", 1)
        (diff,) = re.findall(r"^```diff\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
        (proof,) = re.findall(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
        yield Section(title, text, diff, proof)


SECTIONS = list(sections(PAGE.read_text(encoding="utf-8")))


def tree_with(section: Section, folder: Path) -> Path:
    """A copy of the packages, changed; its `.links` is a path for imports."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.toml", ".links"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split():
        source, target = ROOT / name, folder / name
        if not source.exists() and not source.is_symlink():
            continue  # removed, and not yet committed
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
    applied = subprocess.run(
        ["git", "apply", "--verbose", "-C1", "-"],
        cwd=folder,
        input=section.diff,
        capture_output=True,
        text=True,
    )
    assert applied.returncode == 0, applied.stderr
    return folder


def prove(section: Section, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the lines that are said to hold, in a tree."""
    paths = f"{folder / '.links'}"
    return subprocess.run(
        [sys.executable, "-c", section.proof],
        cwd=folder,
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_there_is_a_section_for_each_thing_that_can_be_added() -> None:
    assert [section.title for section in SECTIONS] == list(FILES_MAX)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_a_change_touches_what_its_section_says_and_no_more_than_is_allowed(section: Section) -> None:
    changed, made = section.files
    said = re.search(r"^Touches (\d+) files?(?: and (\d+) new one)?\.$", section.text, re.MULTILINE)
    assert said is not None
    assert (int(said[1]), int(said[2] or 0)) == (changed, made)
    assert changed <= FILES_MAX[section.title]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_a_change_applies_and_does_what_its_section_says(section: Section, tmp_path: Path) -> None:
    proved = prove(section, tree_with(section, tmp_path))
    assert proved.returncode == 0, proved.stderr


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_without_the_change_the_lines_do_not_hold(section: Section) -> None:
    assert prove(section, ROOT).returncode != 0


@pytest.fixture(scope="module")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all trees: mypy goes by the contents of a file, and most are the same in each."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_a_change_is_well_typed(section: Section, tmp_path: Path, mypy_cache: Path) -> None:
    folder = tree_with(section, tmp_path)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(mypy_cache), "-p", "halfmoon"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout
