"""docs/security.md: each promise names the tests that hold it, and pytest collects them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
_TEST = re.compile(r"`(tests/[\w/]+\.py::\w+)`")


def promises(page: str) -> list[tuple[str, list[str]]]:
    """Each bullet of the sections "Promised", without its tests, and its tests."""
    found = []
    for section in page.split("\n## ")[1:]:
        if section.startswith("Promised"):
            for bullet in re.split(r"\n- ", section)[1:]:
                found.append((_TEST.sub("", bullet).strip(), _TEST.findall(bullet)))
    return found


def unheld(page: str) -> list[str]:
    """Promises without a test, and sentences of a section "Promised" that are no bullets."""
    found = [text for text, tests in promises(page) if not tests]
    for section in page.split("\n## ")[1:]:
        if section.startswith("Promised"):
            lines = [line for line in section.splitlines()[1:] if line and not line.startswith(("- ", "  "))]
            found += [line for line in lines if not line.startswith("Each line is ")]
    return found


def not_collected(tests: list[str]) -> str:
    """Pytest's complaint about tests that it does not find; "" when it collects each of them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *tests], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    return "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-2000:]


def test_every_promise_names_a_test() -> None:
    assert unheld(PAGE) == []
    assert len(promises(PAGE)) > 40


def test_every_plane_has_promises() -> None:
    named = {
        line.removeprefix("## Promised: ") for line in PAGE.splitlines() if line.startswith("## Promised")
    }
    assert {"NATS", "HTTP", "blocks", "files and processes", "clients and tenants"} <= named


def test_the_tests_that_are_named_are_collected(collected: set[str]) -> None:
    """By this run where it is of the whole suite; the others are collected now."""
    others = {test for _, tests in promises(PAGE) for test in tests} - collected
    assert not others or not_collected(sorted(others)) == ""


def test_no_test_is_named_elsewhere_on_the_page() -> None:
    """It would not be looked for."""
    assert len(_TEST.findall(PAGE)) == sum(len(tests) for _, tests in promises(PAGE))


@pytest.mark.parametrize("page", ["\n## Promised: x\n\n- It holds.\n", "\n## Promised: x\n\nIt holds.\n"])
def test_a_promise_that_nothing_holds_is_found(page: str) -> None:
    assert unheld(page) == [page.split("\n\n")[1].strip().removeprefix("- ")]


def test_a_test_that_is_gone_is_found() -> None:
    here = "tests/test_security_claims.py::test_every_promise_names_a_test"
    assert "not found" in not_collected([here, here.replace("names", "named")])
