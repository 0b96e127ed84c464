"""The workers' machines are pure: events in, actions out. Their sources import no clock, no loop, no model, no I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import halfmoon.workers.machines

FOLDER = Path(halfmoon.workers.machines.__file__).parent
#: The modules of each machine; the others of its folder are the shell's.
MACHINES = {
    "prefill": (
        "actions",
        "answers",
        "cache_window",
        "events",
        "first_tokens",
        "job",
        "layer_runs",
        "layer_stages.job",
        "prefix_waits",
        "prompt_chunks",
        "reference_job",
        "stages",
        "state",
    ),
    "adapters": (
        "actions",
        "decode_half",
        "engine_blocks",
        "engines.completion",
        "engines.words",
        "events",
        "kv_events",
        "prefill_half",
        "state",
    ),
    "attention": ("actions", "events", "holds"),
    "mixed": ("actions", "events", "request", "room", "rows", "state"),
    "decode": (
        "actions",
        "batch",
        "deliveries",
        "events",
        "generated_blocks",
        "invariants",
        "lenders",
        "moves",
        "orders",
        "sequence",
        "state",
        "step_times",
    ),
}
#: Beside our own schemas and the machines themselves.
PURE = (
    "__future__",
    "abc",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "itertools",
    "msgspec",
    "typing",
    "xxhash",
)
#: Held to the same rules.
SHARED = (
    "batch_former",
    "finished_orders",
    "machines",
    "model.block_allocator",
    "model.prompt_rows",
    "model.sampling_params",
    "model.segments",
    "sample_requests",
    "token_budget",
)
#: Of other packages, held to the same rules.
ELSEWHERE = ("store.kv_arrival",)
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
    if not module.startswith("halfmoon.workers."):
        elsewhere = module.removeprefix("halfmoon.") in ELSEWHERE
        return module in PURE or elsewhere or module.startswith("halfmoon.schemas.")
    name = module.removeprefix("halfmoon.workers.")
    role, _, part = name.partition(".")
    return name in SHARED or (role in MACHINES and part in (*MACHINES[role], ""))


@pytest.mark.parametrize(
    "name", [*SHARED, *(f"{role}.{part}" for role, parts in MACHINES.items() for part in parts)]
)
def test_a_module_of_a_machine_keeps_the_rules(name: str) -> None:
    assert faults((FOLDER / f"{name.replace('.', '/')}.py").read_text()) == []


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_module_of_another_package_that_a_machine_uses_keeps_the_rules(name: str) -> None:
    assert faults((FOLDER.parent / f"{name.replace('.', '/')}.py").read_text()) == []


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed", "adapters"])
def test_importing_a_machine_imports_no_torch_no_bus_and_no_asyncio(role: str) -> None:
    heavy = ("torch", "nats", "asyncio", "halfmoon.bus.connection", "halfmoon.store.agent_client")
    program = (
        f"import sys, halfmoon.workers.{role}.state\nprint([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import time", "1: imports time"),
        ("import asyncio", "1: imports asyncio"),
        ("import torch", "1: imports torch"),
        ("from halfmoon.bus.connection import Bus", "1: imports halfmoon.bus.connection"),
        ("from halfmoon.workers.prefill.worker import x", "1: imports halfmoon.workers.prefill.worker"),
        ("from halfmoon.workers.decode.worker import x", "1: imports halfmoon.workers.decode.worker"),
        ("from halfmoon.workers.model.engine import x", "1: imports halfmoon.workers.model.engine"),
        ("async def f(): pass", "1: is asynchronous"),
        ("def f():\n    global x", "2: has state outside its objects"),
        ("print(1)", "1: uses print"),
    ],
)
def test_each_rule_can_fail(source: str, fault: str) -> None:
    assert faults(source) == [fault]
