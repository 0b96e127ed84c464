"""docs/adding.md is true: each of its diffs applies to this tree, touches what it says, and does what it says. It goes
on applying while lines beside its own come and go.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.anchored import PAGE, ROOT, AnchorLost, Hunk, applied, apply, block_of, diff_of, parts, place_of
from tests.tree_copies import copy_tree

#: What a change may touch, new files aside.
FILES_MAX = {"A policy": 2, "A transport": 3, "A tier": 2, "A role": 5, "An event": 4, "An option": 2}


class Section(NamedTuple):
    """One way to add something."""

    title: str
    text: str
    diff: str
    proof: str

    @property
    def files(self) -> tuple[int, int]:
        """Files that the diff changes, and those that it makes."""
        diff = diff_of(self.diff)
        return len(diff.changed), len(diff.made)


def sections() -> Iterator[Section]:
    for title, (text, diff) in parts(PAGE.read_text(encoding="utf-8")).items():
        (proof,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        yield Section(title, text, diff, proof)


SECTIONS = list(sections())


def tree_with(section: Section, folder: Path) -> Path:
    """A copy of the packages, changed; its `.links` is a path for imports."""
    apply(diff_of(section.diff), copy_tree(folder, "*.py", "*.toml", ".links"))
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
    said = re.search(r"^Touches (\d+) files?(?: and (\d+) new ones?)?\.$", section.text, re.MULTILINE)
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


# --- a diff holds while its neighbours change ---------------------------------------------------------------

UNRELATED = "# nothing of this change"
HUNKS = [(section.title, hunk) for section in SECTIONS for hunk in diff_of(section.diff).hunks]


def text_before(title: str, hunk: Hunk) -> str:
    """The file as the section's hunks before this one leave it."""
    text = (ROOT / hunk.path).read_text(encoding="utf-8")
    for other, earlier in HUNKS:
        if other == title and earlier.path == hunk.path:
            if earlier is hunk:
                return text
            text = applied(earlier, text)
    raise AssertionError(hunk)


def with_unrelated(text: str, hunk: Hunk) -> str:
    """Lines are added at the head of the file, and right before and after those that the hunk goes by."""
    lines = text.splitlines()
    at = place_of(lines, hunk)
    depth = " " * (len(lines[at]) - len(lines[at].lstrip()))
    end = at + len(hunk.anchor)
    beside = [f"{depth}{UNRELATED}"] * 2
    more = [UNRELATED] * 30
    return "\n".join([*more, *lines[:at], *beside, *lines[at:end], *beside, *lines[end:], ""])


def without_unrelated(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() != UNRELATED]


@pytest.mark.parametrize(("title", "hunk"), HUNKS, ids=lambda part: getattr(part, "path", part))
def test_a_hunk_still_applies_where_lines_beside_it_have_come(title: str, hunk: Hunk) -> None:
    text = text_before(title, hunk)
    changed = with_unrelated(text, hunk)
    assert changed.count(UNRELATED) == 34
    assert without_unrelated(applied(hunk, changed)) == applied(hunk, text).splitlines()


@pytest.mark.parametrize(("title", "hunk"), HUNKS, ids=lambda part: getattr(part, "path", part))
def test_a_hunk_whose_lines_are_gone_says_which(title: str, hunk: Hunk) -> None:
    lines = text_before(title, hunk).splitlines()
    at = place_of(lines, hunk)
    gone = "\n".join([*lines[:at], *lines[at + len(hunk.anchor) :]])
    with pytest.raises(AnchorLost, match=re.escape(hunk.path)) as lost:
        applied(hunk, gone)
    named = [hunk.block, *(line[1:] for line in hunk.anchor)]
    assert any(repr(one) in str(lost.value) or f"\n{one}" in str(lost.value) for one in named if one)


TWO_CASES = """def f(x):
    match x:
        case 1:
            pass
        case 2:
            pass


def g(x):
    pass
"""


@pytest.mark.parametrize(
    ("block", "anchor", "expected"),
    [
        ("def f(", " nothing", "x.py: 0 places in 'def f(', and one should, have the lines\nnothing"),
        ("def f(", "         case …", "x.py: 2 places in 'def f('"),
        ("", "             pass", "x.py: 2 places in the file"),
        ("def h(", " ", "x.py: 0 lines begin with 'def h(', and one should"),
        ("def ", " ", "x.py: 2 lines begin with 'def '"),
    ],
)
def test_a_wrong_anchor_is_named(block: str, anchor: str, expected: str) -> None:
    with pytest.raises(AnchorLost, match=re.escape(expected)):
        applied(Hunk("x.py", block, (anchor, "+more")), TWO_CASES)


def test_a_block_ends_before_the_next_one_and_after_its_brackets() -> None:
    lines = ["x = [", "    1,", "]", "y = 2", "def f(", "    a,", ") -> None:", "", "    pass", "z = 3"]
    assert block_of(lines, Hunk("", "x =", ())) == range(0, 3)
    assert block_of(lines, Hunk("", "def f(", ())) == range(4, 9)


def test_no_file_is_changed_where_one_part_has_no_place(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("one\n", encoding="utf-8")
    wrong = "--- a\n+++ a\n@@\n one\n+two\n--- b\n+++ b\n@@\n three\n+two\n"
    with pytest.raises(AnchorLost):
        apply(diff_of(wrong), tmp_path)
    assert (tmp_path / "a").read_text(encoding="utf-8") == "one\n"
    apply(diff_of(wrong.replace("three", "one")), tmp_path)
    assert (tmp_path / "b").read_text(encoding="utf-8") == "one\ntwo\n"


def test_a_line_that_is_none_of_a_diff_is_refused() -> None:
    with pytest.raises(ValueError, match="b: not a diff's line: 'one'"):
        diff_of("--- b\n+++ b\n@@\none\n+two\n")


@pytest.fixture(scope="module")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all trees: mypy goes by the contents of a file, and most are the same in each."""
    return tmp_path_factory.mktemp("mypy")


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
