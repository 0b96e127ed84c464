"""The core is a pure function of the log: its source is held to the rules at the head of `machine`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import halfmoon.conductor.core.machine

FOLDER = Path(halfmoon.conductor.core.machine.__file__).parent
#: Beside our own schemas and the core itself. Nothing here knows a clock, a file, a socket or a random
#: number.
PURE = (
    "__future__",
    "bisect",
    "collections.abc",
    "functools",
    "hashlib",
    "itertools",
    "msgspec",
    "operator",
    "struct",
    "typing",
)
FORBIDDEN_NAMES = (
    "hash",
    "id",
    "open",
    "print",
    "input",
    "eval",
    "exec",
    "compile",
    "__import__",
    "globals",
    "set",
    "frozenset",
)
#: Where floats are: the least-squares fit.
WITH_FLOATS = ("cost.py",)


def faults(source: str, name: str = "sample.py") -> list[str]:
    """What in `source` breaks the rules: `line: rule`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        fault = _fault(node, name in WITH_FLOATS)
        if fault:
            found.append(f"{getattr(node, 'lineno', 0)}: {fault}")
    return found


def _fault(node: ast.AST, with_floats: bool) -> str:
    match node:
        case ast.Import(names=names):
            return next((f"imports {alias.name}" for alias in names if not _pure(alias.name)), "")
        case ast.ImportFrom(module=module, level=level):
            return "" if level == 0 and _pure(module or "") else f"imports {module}"
        case ast.Name(id=name) if name in FORBIDDEN_NAMES:
            return f"uses {name}"
        case ast.Attribute(attr="__hash__" | "__dict__" | "urandom" | "now" | "time"):
            return f"uses .{node.attr}"
        case ast.Set() | ast.SetComp():
            return "makes a set"
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor() | ast.Sub()) if _is_view(node.left):
            return "makes a set of a dictionary's keys"
        case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
            return "is asynchronous"
        case ast.Global() | ast.Nonlocal():
            return "has state outside State"
        case ast.Constant(value=float()) if not with_floats:
            return "uses a float"
        case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()) if not with_floats:
            return "divides into a float"
        case ast.BinOp(op=ast.Pow()) if with_floats and not _whole(node):
            return "raises to a power"
        case ast.Call(func=ast.Name(id="round" | "pow")):
            return "rounds or raises to a power"
    return ""


def _pure(module: str) -> bool:
    return module in PURE or module.startswith(("halfmoon.schemas.", "halfmoon.conductor.core"))


def _is_view(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("keys", "items")
    )


def _whole(node: ast.BinOp) -> bool:
    return all(
        isinstance(side, ast.Constant) and isinstance(side.value, int) for side in (node.left, node.right)
    )


def core_files() -> list[Path]:
    return sorted(FOLDER.rglob("*.py"))


def test_the_core_is_found() -> None:
    names = {str(path.relative_to(FOLDER)) for path in core_files()}
    assert {"machine.py", "invariants.py", "state/core_state.py", "placement/best_first.py"} < names


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_module_of_the_core_keeps_the_rules(path: Path) -> None:
    assert faults(path.read_text(), path.name) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import time", "1: imports time"),
        ("import random", "1: imports random"),
        ("import os", "1: imports os"),
        ("from os import environ", "1: imports os"),
        ("import logging", "1: imports logging"),
        ("import asyncio", "1: imports asyncio"),
        ("from pathlib import Path", "1: imports pathlib"),
        ("from datetime import datetime", "1: imports datetime"),
        ("from halfmoon.bus.connection import Bus", "1: imports halfmoon.bus.connection"),
        ("from halfmoon.conductor.live.timers import Timers", "1: imports halfmoon.conductor.live.timers"),
        ("from . import state", "1: imports None"),
        ("x = hash('a')", "1: uses hash"),
        ("x = min([], key=id)", "1: uses id"),
        ("x = object.__hash__", "1: uses .__hash__"),
        ("print(1)", "1: uses print"),
        ("open('f')", "1: uses open"),
        ("for x in {1, 2}: pass", "1: makes a set"),
        ("y = [x for x in {z for z in []}]", "1: makes a set"),
        ("for x in set([1]): pass", "1: uses set"),
        ("for x in frozenset([1]): pass", "1: uses frozenset"),
        ("y = {}.keys() & {}.keys()", "1: makes a set of a dictionary's keys"),
        ("async def f(): pass", "1: is asynchronous"),
        ("def f():\n    global x", "2: has state outside State"),
        ("x = 1.5", "1: uses a float"),
        ("x = 1 / 2", "1: divides into a float"),
        ("x = 3\nx /= 2", "2: divides into a float"),
        ("x = round(3)", "1: rounds or raises to a power"),
    ],
)
def test_each_rule_can_fail(source: str, fault: str) -> None:
    assert faults(source) == [fault]


def test_powers_of_floats_are_found_where_floats_may_be() -> None:
    assert faults("x = 2**10 + 1.5 / 2", "cost.py") == []
    assert faults("x = y**0.5", "cost.py") == ["1: raises to a power"]
