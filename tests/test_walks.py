"""Walks through the core, as `benchmarks/structure.py` counts them."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import structure
from tests.sources import parsed

ROOT = Path(__file__).parents[1]
FOLDER_FILES_MAX, IMPORTS_MAX, FIELDS_MAX = 20, 22, 20


@pytest.fixture(scope="module")
def modules() -> dict[str, structure.Module]:
    return structure.read_modules(ROOT, parsed)


def module(name: str, source: str) -> structure.Module:
    return structure.Module(name, Path(f"{name}.py"), ast.parse(source), source.count("\n"))


SOURCES = {
    "core.a": """
from halfmoon.core import c
from halfmoon.core.b import Box, first
def start(box: Box):
    first(inner())
    box.put()
    c.last()
def inner(): ...
def never(): ...
""",
    "core.b": """
from halfmoon.core.c import last
class Box:
    def put(self):
        self.look()
        last()
    def look(self): ...
def first(): ...
""",
    "core.c": "def last(): ...\n",
}


def test_a_walk_reads_each_function_once_and_counts_what_it_comes_back_to() -> None:
    walk = structure.walk({name: module(name, text) for name, text in SOURCES.items()}, ("core.a", "start"))
    assert walk.places == [
        ("core.a", "start"),
        ("core.a", "inner"),
        ("core.b", "first"),
        ("core.b", "Box.put"),
        ("core.b", "Box.look"),
        ("core.c", "last"),
    ]
    assert (walk.stays, walk.returns) == (["core.a", "core.b", "core.c"], 0)


def test_a_walk_that_comes_back_has_a_return() -> None:
    back = SOURCES | {
        "core.c": "from halfmoon.core.a import never\ndef last():\n    never()\n    more()\ndef more(): ...\n"
    }
    walk = structure.walk({name: module(name, text) for name, text in back.items()}, ("core.a", "start"))
    assert walk.stays == ["core.a", "core.b", "core.c", "core.a", "core.c"]
    assert walk.returns == 2


def test_the_walk_of_a_request_through_the_core_is_nearly_a_line(
    modules: dict[str, structure.Module],
) -> None:
    walk = structure.walk(modules, structure.SUBMIT)
    assert ("conductor.core.placement.costed", "cost_request") in walk.places
    assert ("conductor.core.booking", "give_order") in walk.places
    assert walk.returns <= 40, [function for _, function in walk.places]


def test_the_walk_of_any_event_comes_back_no_more_often_than_it_did(
    modules: dict[str, structure.Module],
) -> None:
    assert structure.walk(modules, structure.EVENT).returns <= 91


def test_a_folder_has_few_files_a_module_few_imports_and_a_record_few_fields(
    modules: dict[str, structure.Module],
) -> None:
    sizes = Counter(each.folder for each in modules.values())
    assert {folder: size for folder, size in sizes.items() if size > FOLDER_FILES_MAX} == {}
    imports = {name: len(each.imports) for name, each in modules.items()}
    assert {name: count for name, count in imports.items() if count > IMPORTS_MAX} == {}
    assert [each for each in structure.fields(modules) if each[0] > FIELDS_MAX] == []
