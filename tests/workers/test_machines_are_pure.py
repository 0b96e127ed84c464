"""The workers' machines are pure: events in, actions out. Their sources import no clock, no loop, no model, no I/O."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import halfmoon.workers.prefill.state

FOLDER = Path(halfmoon.workers.prefill.state.__file__).parent
MACHINES = ("actions", "events", "job", "stages", "state")
#: Beside our own schemas and the machine itself.
PURE = ("__future__", "collections", "collections.abc", "dataclasses", "enum", "typing")
OURS = ("halfmoon.schemas.", "halfmoon.workers.machines")
FORBIDDEN_NAMES = ("open", "print", "input", "hash", "id", "globals")


def faults(source: str) -> list[str]:
    """`line: rule` for each place of `source` that breaks one."""
    found = [(getattr(node, "lineno", 0), _fault(node)) for node in ast.walk(ast.parse(source))]
    return [f"{line}: {fault}" for line, fault in sorted(found) if fault]


def _fault(node: ast.AST) -> str:
    match node:
        case ast.Import(names=names):
            return next((f"imports {alias.name}" for alias in names if not _pure(alias.name)), "")
        case ast.ImportFrom(module=module):
            return "" if _pure(module or "") else f"imports {module}"
        case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
            return "is asynchronous"
        case ast.Global():
            return "has state outside its objects"
        case ast.Name(id=name) if name in FORBIDDEN_NAMES:
            return f"uses {name}"
    return ""


def _pure(module: str) -> bool:
    if module == "halfmoon.workers.prefill":
        return True
    if module.startswith("halfmoon.workers.prefill."):
        return module.rpartition(".")[2] in MACHINES
    return module in PURE or module.startswith(OURS)


@pytest.mark.parametrize("name", MACHINES)
def test_a_module_of_a_machine_keeps_the_rules(name: str) -> None:
    assert faults((FOLDER / f"{name}.py").read_text()) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import time", "1: imports time"),
        ("import asyncio", "1: imports asyncio"),
        ("import torch", "1: imports torch"),
        ("from halfmoon.bus.connection import Bus", "1: imports halfmoon.bus.connection"),
        ("from halfmoon.workers.prefill.worker import x", "1: imports halfmoon.workers.prefill.worker"),
        ("async def f(): pass", "1: is asynchronous"),
        ("def f():\n    global x", "2: has state outside its objects"),
        ("print(1)", "1: uses print"),
    ],
)
def test_each_rule_can_fail(source: str, fault: str) -> None:
    assert faults(source) == [fault]
