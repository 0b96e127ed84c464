"""`docs/invariants.md` and the code name the same invariants: each check has a number, and each row what it names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/invariants.md"
PACKAGES = ("bus", "cli", "conductor", "schemas", "store", "workers")
#: Functions whose assertions are invariants; and where one of that name looks at its arguments.
CHECKS = re.compile(r"_?check\w*|validate")
ARGUMENTS = ("workers/model/engine.py",)
ROW = re.compile(r"\| (I[0-9]+) \| (\S.*?) \| (.*?) \|(.*)\|")
NAMED = re.compile(r"`([^`]+)`")
#: Of chaos: what plays a world. The rest is live processes, and tests.
NO_WORLD = ("test_", "live", "exhaustion", "run")


class Row(NamedTuple):
    """`places`: functions of the section's file, or files. `faults`: `path::name`."""

    number: str
    says: str
    places: list[str]
    faults: list[str]


def rows(page: str) -> Iterator[Row]:
    faults_file = ""
    for line in page.splitlines():
        if line.startswith("## "):
            faults_file = ""
        if line.startswith("Faults: "):
            faults_file = NAMED.findall(line)[0]
        found = ROW.fullmatch(line)
        if found is not None:
            number, says, places, faults = found.groups()
            named = [one if "::" in one else f"{faults_file}::{one}" for one in NAMED.findall(faults)]
            yield Row(number, says, NAMED.findall(places), named)


class Check(NamedTuple):
    """An assertion that has to have a number; "" has it none."""

    place: str
    function: str
    number: str


def checks(place: str, source: str, *, world: bool = False) -> Iterator[Check]:
    """Of a module of ours; of chaos (`world`) those in any function that have words."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and (world or CHECKS.fullmatch(function.name)):
            for one in ast.walk(function):
                if isinstance(one, ast.Assert) and not (world and narrows(one)):
                    words = ast.unparse(one.msg) if one.msg is not None else ""
                    number = re.match(r"\W*f?\W*(I[0-9]+) ", words)
                    yield Check(
                        f"{place}:{one.lineno}", function.name, number.group(1) if number is not None else ""
                    )


def narrows(one: ast.Assert) -> bool:
    """It tells a type, or says nothing: a reader's help."""
    words = one.msg.elts[0] if isinstance(one.msg, ast.Tuple) else one.msg
    told = isinstance(words, ast.JoinedStr) or (isinstance(words, ast.Constant) and words.value)
    return not told or re.match(r"isinstance\(|.* is not None$", ast.unparse(one.test)) is not None


def all_checks() -> Iterator[Check]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            if place not in ARGUMENTS:
                yield from checks(place, path.read_text())
    for path in sorted((ROOT / "tests/chaos").glob("*.py")):
        if not path.name.startswith(NO_WORLD):
            yield from checks(str(path.relative_to(ROOT)), path.read_text(), world=True)


def held_by_tests() -> dict[str, list[str]]:
    """By number, the files of tests that say in their heads which invariant they hold."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number in re.findall(r"Invariant (I[0-9]+) of", path.read_text()[:1_000]):
            found.setdefault(number, []).append(str(path.relative_to(ROOT)))
    return found


@pytest.fixture(scope="module")
def page() -> list[Row]:
    return list(rows(PAGE.read_text()))


@pytest.fixture(scope="module")
def checked() -> list[Check]:
    return list(all_checks())


def test_every_check_has_a_number(checked: list[Check]) -> None:
    assert len(checked) > 100
    assert [one.place for one in checked if not one.number] == []


def test_page_and_code_have_the_same_numbers_once(page: list[Row], checked: list[Check]) -> None:
    listed = Counter(row.number for row in page)
    assert [number for number, count in listed.items() if count > 1] == []
    assert set(listed) == {one.number for one in checked} | set(held_by_tests())


def test_a_row_names_where_it_is_checked(page: list[Row], checked: list[Check]) -> None:
    wrong = []
    for row in page:
        found = {one.function for one in checked if one.number == row.number}
        found |= {one.place.split(":")[0] for one in checked if one.number == row.number}
        found |= set(held_by_tests().get(row.number, []))
        whole = {one for one in found if "/" in one} if "/" in row.places[0] else found - files(found)
        if set(row.places) != whole:
            wrong.append((row.number, row.places, sorted(found)))
    assert wrong == []


def files(names: set[str]) -> set[str]:
    return {one for one in names if "/" in one}


def defined(path: str) -> set[str]:
    """Functions of a file."""
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text())
    return {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


def gone(page: list[Row]) -> list[str]:
    """Faults that are nowhere."""
    return [
        one for row in page for one in row.faults if one.split("::")[1] not in defined(one.split("::")[0])
    ]


def test_the_faults_that_a_row_names_exist(page: list[Row]) -> None:
    assert gone(page) == []
    assert [row.number for row in page if not row.faults] == ["I110"]


@pytest.mark.parametrize(
    "file",
    [
        "tests/conductor/test_invariants.py",
        "tests/store/test_pool_invariants.py",
        "tests/store/test_ssd_invariants.py",
        "tests/workers/test_machine_invariants.py",
    ],
)
def test_the_changes_of_a_table_stand_in_the_rows_of_their_numbers(page: list[Row], file: str) -> None:
    planted = set(re.findall(r'\("(I[0-9]+)", (?:\w+, )?(\w+)\),', (ROOT / file).read_text()))
    named = {
        (row.number, one.split("::")[1]) for row in page for one in row.faults if one.startswith(f"{file}::")
    }
    assert planted == named


def test_what_is_missing_is_found() -> None:
    (row,) = rows("Faults: `tests/sources.py`.\n| I1 | All is well. | `check` | `no_fault` |")
    assert row == Row("I1", "All is well.", ["check"], ["tests/sources.py::no_fault"])
    assert gone([row]) == ["tests/sources.py::no_fault"]
    source = "def check():\n    assert a, ('I7 a', 1)\n    assert b, f'I8 {a}'\n    assert c, ('c', 1)\n    assert d"
    assert [one.number for one in checks("x.py", source)] == ["I7", "I8", "", ""]
    assert [one.number for one in checks("x.py", source, world=True)] == ["I7", "I8", ""]
