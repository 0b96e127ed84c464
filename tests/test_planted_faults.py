"""The planted faults have their places. `make planted-faults` looks that tests find them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.planted_faults import FAULTS, Fault, found, planted
from tests.tree_copies import ROOT


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_one_place_and_is_python(name: str) -> None:
    fault = FAULTS[name]
    assert ast.dump(ast.parse(planted(fault, ROOT))) != ast.dump(ast.parse((ROOT / fault.file).read_text()))
    for test in fault.tests.split():
        assert (ROOT / test).exists(), test


def test_a_fault_without_its_place_is_told() -> None:
    with pytest.raises(LookupError, match="has the place of the fault 0 times: 'no such line'"):
        planted(Fault("bus/connection.py", "no such line", "", ""), ROOT)


@pytest.mark.parametrize(
    ("test", "expected"),
    [("assert double(2) == 4", True), ("assert double(0) == 0", False), ("import nowhere", True)],
)
def test_only_a_red_test_finds_a_fault(test: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text("def double(n):\n    return 2 * n\n")
    body = f"from doubling import double\ndef test_it():\n    {test}\n"
    (tmp_path / "test_doubling.py").write_text(body)
    was_found, closing = found(Fault("doubling.py", "2 * n", "3 * n", "test_doubling.py"), tmp_path)
    assert was_found is expected, closing
    assert (tmp_path / "doubling.py").read_text().endswith("return 2 * n\n")


def test_tests_that_do_not_run_find_nothing(tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text("two = 2\n")
    assert found(Fault("doubling.py", "2", "3", "test_nowhere.py"), tmp_path)[0] is False
