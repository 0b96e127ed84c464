"""What can be checked of the rules of this code base: imports, packages, sizes, docstrings, leftovers.

Each check is a function from a source to complaints, and a sample shows that it can fail.
"""

from __future__ import annotations

import ast
import functools
import io
import os
import re
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import structure
from tests import gate_rules
from tests.realtime import is_realtime
from tests.sources import dotted, nodes, parsed

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

#: Comparisons with a role's name, as `benchmarks/structure.py` counts them.
ROLE_COMPARISONS_MAX = 10

#: What each folder (or module that stands alone) may import of halfmoon, beside itself. A name is the longest
#: row that is a prefix of it: a row speaks for the folders inside it that have none of their own.
MAY_IMPORT: dict[str, set[str]] = {
    "schemas": {"schemas.api"},
    "schemas.api": {"schemas"},
    "bus": {"schemas"},
    "bus.edge": {"bus", "bus.telemetry", "schemas", "schemas.api"},
    "bus.telemetry": {"bus", "schemas", "schemas.api"},
    "conductor.code_version": set(),
    "conductor.core.state": {"schemas"},
    "conductor.core.placement": {"conductor.core.state", "schemas"},
    "conductor.core": {"conductor.core.placement", "conductor.core.state", "schemas"},
    "conductor.plugins": {"conductor.core.placement", "schemas"},
    "conductor.log_reading": {"bus", "conductor.code_version", "conductor.core", "schemas"},
    "conductor.simulation": {
        "conductor.core",
        "conductor.core.state",
        "schemas",
        "workers.batch_former",
        "workers.token_budget",
    },
    "conductor.replay": {
        "bus",
        "conductor.code_version",
        "conductor.core",
        "conductor.core.placement",
        "conductor.core.state",
        "conductor.log_reading",
        "conductor.simulation",
        "schemas",
    },
    "conductor.view": {
        "bus",
        "conductor.core",
        "conductor.core.placement",
        "conductor.core.state",
        "conductor.log_reading",
        "conductor.plugins",
        "conductor.replay",
        "schemas",
    },
    "conductor.live": {
        "bus",
        "bus.telemetry",
        "conductor.code_version",
        "conductor.core",
        "conductor.core.state",
        "conductor.log_reading",
        "conductor.view",
        "schemas",
    },
    "store.errors": {"schemas"},
    "store.pool": {"schemas", "store.errors"},
    "store.options": {"schemas", "store.pool"},
    "store.config": {
        "schemas",
        "store.options",
        "store.pool",
        "store.tiers",
        "store.transports.rdma",
        "store.transports.tcp",
    },
    "store.transports.base": {"schemas", "store.errors", "store.pool"},
    "store.transports": {"schemas", "store.errors", "store.pool", "store.transports.base"},
    "store.transports.engine": {"bus.telemetry", "store.errors", "store.transports.base"},
    "store.transports.rdma": {"schemas", "store.errors", "store.pool", "store.transports.base"},
    "store.transports.tcp": {
        "schemas",
        "store.errors",
        "store.pool",
        "store.transports",
        "store.transports.base",
    },
    "store.channels": {"schemas", "store.errors", "store.transports.tcp"},
    "store.tiers": {"schemas", "store.errors", "store.pool", "store.transports.base"},
    "store.locate": {"bus", "schemas"},
    "store.agent_client": {"bus", "schemas", "store.errors", "store.pool"},
    "store.client": {"bus", "schemas", "store.agent_client", "store.errors", "store.locate", "store.pool"},
    "store.kv_arrival": {"schemas"},
    "store.adapters": {
        "bus",
        "schemas",
        "store.agent_client",
        "store.client",
        "store.errors",
        "store.kv_arrival",
        "store.pool",
    },
    "store.agent.announcer": {"bus", "schemas", "store.pool", "store.tiers"},
    "store.agent": {
        "bus",
        "bus.telemetry",
        "schemas",
        "store.agent.announcer",
        "store.config",
        "store.errors",
        "store.locate",
        "store.pool",
        "store.tiers",
        "store.transports",
        "store.transports.base",
        "store.transports.engine",
        "store.transports.rdma",
        "store.transports.tcp",
    },
    "workers.batch_former": {"schemas", "workers.token_budget"},
    "workers.token_budget": {"schemas"},
    "workers.sketches": {"schemas"},
    "workers.model.loading": set(),
    "workers.model.text": {"workers.model.loading"},
    "workers.model": {"workers.model.loading"},
    "workers.frontend": {
        "bus",
        "bus.edge",
        "bus.telemetry",
        "schemas",
        "schemas.api",
        "workers.model",
        "workers.model.text",
        "workers.sketches",
    },
    "workers": {
        "bus",
        "bus.telemetry",
        "schemas",
        "store.agent_client",
        "store.channels",
        "store.errors",
        "workers.model",
        "workers.model.loading",
    },
    "workers.prefill": {
        "bus",
        "bus.telemetry",
        "schemas",
        "store.channels",
        "store.errors",
        "workers",
        "workers.attention",
        "workers.model",
    },
    "workers.attention": {
        "bus",
        "schemas",
        "store.agent_client",
        "store.channels",
        "store.errors",
        "store.pool",
        "workers",
        "workers.model",
        "workers.model.loading",
    },
    "workers.mixed": {
        "bus",
        "schemas",
        "store.errors",
        "store.pool",
        "workers",
        "workers.batch_former",
        "workers.decode",
        "workers.model",
        "workers.prefill",
    },
    "workers.adapters": {
        "bus",
        "bus.telemetry",
        "schemas",
        "store.agent.announcer",
        "store.pool",
        "workers",
        "workers.decode",
        "workers.mixed",
    },
    "workers.decode": {
        "store.channels",
        "workers.attention",
        "bus",
        "bus.telemetry",
        "schemas",
        "store.agent_client",
        "store.errors",
        "store.kv_arrival",
        "store.pool",
        "workers",
        "workers.model",
    },
}
#: The composition root: it may import everything.
ROOT_PACKAGE = "cli"
#: The folders at the top: the packages of halfmoon.
TOP = {row.partition(".")[0] for row in MAY_IMPORT} | {ROOT_PACKAGE}
#: What `schemas` may import beside the standard library, so that any process can speak without heavy imports.
SCHEMAS_MAY_IMPORT = {"msgspec", "numpy", "orjson", "xxhash"}
#: Modules that another engine loads by their path, and whose methods it calls.
ADAPTERS = (
    "store/adapters/sglang_hicache.py",
    "store/adapters/vllm_connector.py",
    "store/adapters/vllm_tier.py",
)
LINES_MAX = 500
FUNCTION_LINES_MAX = 70
NOT_OURS = {".git", ".venv", "build", "dist", "node_modules"}
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
TEXT_SUFFIXES = {
    "",
    ".cfg",
    ".conf",
    ".html",
    ".ini",
    ".js",
    ".json",
    ".lock",
    ".md",
    ".py",
    ".sh",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
}
#: Places that exist on one machine only, hosts that a mirror may stand for, things left for later. In pieces,
#: because this file is checked as well.
FORBIDDEN = re.compile(
    "|".join(
        "".join(pieces)
        for pieces in [
            ("/wo", "rk/"),
            ("/fa", "rm/"),
            ("pypi", r"\.org"),
            ("python", "hosted"),
            (r"\bTO", r"DO\b"),
            (r"\bFIX", r"ME\b"),
        ]
    )
)
MAYBE_BARE = re.compile(
    rf"import_module|__import__|\bfrom\s+\.|\bimport\b[^\n]*(?<![\w.])({'|'.join(TOP)})\b"
    rf"|\bfrom\s+({'|'.join(TOP)})\b"
)
SILENCED = re.compile(r"type:\s*ignore(?!\[)|\bnoqa(?!:)")
BEHIND_BRACKET = re.compile(r"""\s*[])}][^#"']*#(?! (?:fmt:|noqa|type:))""")
SWALLOWED = {"Exception", "BaseException"}
#: Modules that run what they read, and calls that hand text to a shell or to the interpreter.
RUNS_WHAT_IT_READS = {"cloudpickle", "dill", "jsonpickle", "marshal", "pickle", "shelve"}
RUNS_TEXT = {
    "asyncio.create_subprocess_shell",
    "commands.getoutput",
    "eval",
    "exec",
    "os.popen",
    "os.system",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "ssl._create_unverified_context",
    "tempfile.mktemp",
    "yaml.load",
    "yaml.unsafe_load",
}
#: Arguments that switch a guard off, and the value that leaves it on: torch.load, numpy.load, subprocess.
GUARDS: dict[str, object] = {"weights_only": True, "allow_pickle": False, "shell": False}


def files() -> Iterator[Path]:
    """Every text file of ours, relative to the root."""
    for folder, below, names in os.walk(ROOT):
        here = Path(folder)
        # What fuzzing has found is bytes of any kind.
        below[:] = sorted(name for name in below if ours(name) and here / name != CORPUS)
        for path in (here / name for name in sorted(names)):
            if ours(path.name) and path.suffix in TEXT_SUFFIXES and path.stat().st_size < 4 << 20:
                yield path.relative_to(ROOT)


def ours(name: str) -> bool:
    """Whether a file or folder of this name is neither hidden from the repository nor made from it."""
    made = ("cache__", "_cache", ".egg-info", ".links", ".hypothesis")
    return name not in NOT_OURS and not name.endswith(made)


FILES = list(files())
PYTHON = [path for path in FILES if path.suffix == ".py"]
PACKAGED = [path for path in PYTHON if path.parts[0] in TOP]


# --- the checks ---------------------------------------------------------------------------------------------


@functools.cache
def text(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, `from a import b` as `a.b`; relative ones keep their dots."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, "." * node.level + ".".join(filter(None, [node.module, alias.name]))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def directions(path: Path, source: str) -> list[str]:
    """Imports against the table of folders."""
    here = ".".join(path.with_suffix("").parts)
    if path.parts[0] == ROOT_PACKAGE or path.name == "__init__.py":
        return []
    row = row_of(here)
    if not row:
        return [f"{path}: has no row in MAY_IMPORT"]
    found = []
    for line, name in imported(source):
        first, _, rest = name.partition(".")
        if first == "halfmoon":
            target = row_of(rest) or rest
            if target != row and target not in MAY_IMPORT[row]:
                found.append(f"{path}:{line}: {row} must not import {target}")
        elif row == "schemas" and first not in sys.stdlib_module_names | SCHEMAS_MAY_IMPORT:
            found.append(f"{path}:{line}: schemas must not import {first}")
    return found


def row_of(name: str) -> str:
    """The longest row of MAY_IMPORT that `name` (dotted, without `halfmoon.`) is in; "" when there is none."""
    rows = [row for row in MAY_IMPORT if f"{name}.".startswith(f"{row}.")]
    return max(rows, key=len, default="")


def absolute(path: Path, source: str) -> list[str]:
    """Relative imports, and folders imported by their bare names: a second copy of every class."""
    found: list[str] = []
    # Most files name no folder of ours but behind `halfmoon.`, and need not be parsed.
    if not MAYBE_BARE.search(source):
        return found
    for line, name in imported(source):
        if name.startswith("."):
            found.append(f"{path}:{line}: relative import {name}")
        elif name.split(".")[0] in TOP:
            found.append(f"{path}:{line}: {name} is halfmoon.{name}")
    return found


def docstring_only(path: Path, source: str) -> list[str]:
    """`__init__.py` with more than a docstring, but for the one that says halfmoon's version."""
    tree = parsed(source)
    if (
        path.name != "__init__.py"
        or path.parts[-3:-1] == ("cli", "root")
        or (len(tree.body) == 1 and ast.get_docstring(tree))
    ):
        return []
    return [f"{path}: holds more, or less, than a docstring"]


def size(path: Path, source: str) -> list[str]:
    lines = source.count("\n")
    return [f"{path}: {lines} lines, {LINES_MAX} allowed"] if lines > LINES_MAX else []


def function_size(path: Path, source: str) -> list[str]:
    """Functions that nobody can read at a glance."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                message = f"{node.name} has {lines} lines, {FUNCTION_LINES_MAX} allowed"
                found.append(f"{path}:{node.lineno}: {message}")
    return found


def docstrings(path: Path, source: str) -> list[str]:
    """Public modules and classes that do not say what they are for."""
    tree = parsed(source)
    found = [] if ast.get_docstring(tree) else [f"{path}: no docstring"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            found.append(f"{path}:{node.lineno}: class {node.name} has no docstring")
    return found


def openings(path: Path, source: str) -> list[str]:
    """Docstrings that open with "Of" or "What": they are read twice. The messages' texts are published as they are."""
    if path.parts[0] == "schemas":
        return []
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or " ").split(maxsplit=1)[:1]
            if first in (["Of"], ["What"]):
                found.append(f"{path}:{getattr(node, 'lineno', 1)}: a docstring opens with {first[0]}")
    return found


def swallowed(path: Path, source: str) -> list[str]:
    """Every error caught, and nothing done."""
    found = []
    for node in nodes(source):
        if (
            isinstance(node, ast.ExceptHandler)
            and _catches_all(node.type)
            and all(map(_does_nothing, node.body))
        ):
            found.append(f"{path}:{node.lineno}: every error is caught and dropped")
        suppresses = isinstance(node, ast.Call) and dotted(node.func).endswith("suppress")
        if suppresses and any(map(_catches_all, node.args)):
            found.append(f"{path}:{node.lineno}: every error is suppressed")
    return found


def _catches_all(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(map(_catches_all, kind.elts))
    return kind is None or dotted(kind).rpartition(".")[2] in SWALLOWED


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, (ast.Pass, ast.Continue, ast.Break))


def switched_off(path: Path, source: str) -> list[str]:
    """Comments that silence a tool wholesale instead of one of its rules."""
    found: list[str] = []
    if not SILENCED.search(source):
        return found
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and SILENCED.search(token.string):
            found.append(f"{path}:{token.start[0]}: {token.string} names no code")
    return found


def runs_what_it_reads(path: Path, source: str) -> list[str]:
    """Reading that can run what it reads, text for a shell or the interpreter, and guards that are switched off."""
    found = [
        f"{path}:{line}: {name} runs what it reads"
        for line, name in imported(source)
        if name.partition(".")[0] in RUNS_WHAT_IT_READS
    ]
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and node.attr == "CERT_NONE":
            found.append(f"{path}:{node.lineno}: whoever answers is believed")
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        if called in RUNS_TEXT:
            found.append(f"{path}:{node.lineno}: {called}")
        given = {word.arg: word.value for word in node.keywords}
        for name, safe in GUARDS.items():
            value = given.get(name)
            if value is not None and not (isinstance(value, ast.Constant) and value.value is safe):
                found.append(f"{path}:{node.lineno}: {name}={ast.unparse(value)}")
        if called == "torch.load" and "weights_only" not in given:
            found.append(f"{path}:{node.lineno}: torch.load without weights_only=True")
    return found


#: What rests on real time by its name: imports, fixtures, calls. A process that is only run to its end does not.
REALTIME_IMPORTS = {"aiohttp", "halfmoon.bus.embedded", "multiprocessing", "socket", "tests.cluster.harness"}
REALTIME_FIXTURES = {"nats_server", "nats_url"}
REALTIME_CALLS = {
    "asyncio.create_subprocess_exec",
    "asyncio.timeout",
    "asyncio.wait_for",
    "time.monotonic",
    "time.perf_counter",
    "time.sleep",
}


def unmarked(path: Path, source: str) -> list[str]:
    """A test file that rests on real time, is not in tests/realtime.py and marks none of its tests."""
    if path.parts[0] != "tests" or not path.name.startswith("test_") or is_realtime(path.as_posix()):
        return []
    if "@pytest.mark.realtime" in source:
        return []
    found = [(line, name) for line, name in imported(source) if name in REALTIME_IMPORTS]
    for node in nodes(source):
        if isinstance(node, ast.arg) and node.arg in REALTIME_FIXTURES:
            found.append((node.lineno, node.arg))
        if isinstance(node, ast.Call) and (name := dotted(node.func)) in REALTIME_CALLS:
            found.append((node.lineno, name))
    return [
        f"{path}:{line}: {name} takes part in a test that is not in tests/realtime.py" for line, name in found
    ]


def behind_brackets(path: Path, source: str) -> list[str]:
    """A comment that the formatter pushed behind a closing bracket: it is read after what it explains."""
    return [
        f"{path}:{number}: a comment behind a closing bracket: {line.strip()}"
        for number, line in enumerate(source.splitlines(), 1)
        if BEHIND_BRACKET.match(line)
    ]


def leftovers(path: Path, source: str) -> list[str]:
    """Paths of one machine, hosts of registries, and things left for later."""
    return [
        f"{path}:{number}: {hit[0]}"
        for number, line in enumerate(source.splitlines(), 1)
        for hit in [FORBIDDEN.search(line)]
        if hit
    ]


Check = Callable[[Path, str], list[str]]
PACKAGE_CHECKS: list[Check] = [
    directions,
    docstring_only,
    size,
    function_size,
    docstrings,
    openings,
    swallowed,
    runs_what_it_reads,
]
PYTHON_CHECKS: list[Check] = [absolute, behind_brackets, switched_off, unmarked]


def complaints(checks: list[Check], paths: list[Path]) -> list[str]:
    return [complaint for path in paths for check in checks for complaint in check(path, text(path))]


# --- the rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", PACKAGE_CHECKS, ids=lambda check: check.__name__)
def test_the_packages_are_tidy(check: Check) -> None:
    found = complaints([check], PACKAGED)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("check", PYTHON_CHECKS, ids=lambda check: check.__name__)
def test_all_python_is_tidy(check: Check) -> None:
    found = complaints([check], PYTHON)
    assert not found, "\n".join(found)


def test_no_test_rests_on_luck() -> None:
    found = complaints(gate_rules.CHECKS, [path for path in PYTHON if path.parts[0] == "tests"])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("program", gate_rules.PROGRAMS)
def test_a_program_that_may_pause_does_and_holds_no_test(program: str) -> None:
    source = Path(program).read_text()
    assert gate_rules.is_program(Path(program), source)
    assert gate_rules.pauses(Path("tests/x.py"), source)


@pytest.fixture(scope="module")
def modules() -> dict[str, structure.Module]:
    return structure.read_modules(ROOT, parsed)


def test_no_module_imports_another_in_a_circle(modules: dict[str, structure.Module]) -> None:
    """Types included: see `benchmarks/structure.py`."""
    assert structure.circles(modules) == []


def test_a_circle_is_found_behind_type_checking_too(tmp_path: Path) -> None:
    for folder in structure.PACKAGES:
        (tmp_path / folder).mkdir()
    (tmp_path / "bus" / "a.py").write_text("from halfmoon.bus import b\n")
    behind = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from halfmoon.bus.a import A\n"
    (tmp_path / "bus" / "b.py").write_text(behind)
    assert structure.circles(structure.read_modules(tmp_path)) == [["bus.a", "bus.b"]]


def test_a_role_is_asked_for_its_record(modules: dict[str, structure.Module]) -> None:
    """Not for its name: a role that is added would be forgotten there."""
    assert sum(module.role_comparisons() for module in modules.values()) <= ROLE_COMPARISONS_MAX


def test_a_class_name_has_one_owner(modules: dict[str, structure.Module]) -> None:
    assert structure.shared_class_names(modules) == {}


def unused(packaged: Iterator[tuple[Path, str]], using: Iterator[str]) -> list[str]:
    """Functions and classes of the packages that nothing names but, perhaps, a test. `using`: sources beside them."""
    made: dict[str, str] = {}
    named: dict[str, None] = {}
    sources = list(packaged)
    for path, source in sources:
        for node in nodes(source):
            defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if defines and not node.name.startswith("__"):
                made[node.name] = f"{path}:{node.lineno}: only tests use {node.name}"
    for source in [*(source for _, source in sources), *using]:
        for node in nodes(source):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    named[name] = None
                case ast.Constant(value=str(name)) if name.isidentifier():
                    named[name] = None
                case _:
                    pass
    return [text for name, text in made.items() if name not in named]


def test_what_only_tests_use_is_gone() -> None:
    beside = [path for path in PYTHON if path.parts[0] in ("benchmarks", "examples")]
    found = unused(((path, text(path)) for path in PACKAGED), map(text, beside))
    # The machines' invariants are for tests and the world of chaos: a live worker does not pay for them.
    assert [one for one in found if not one.endswith("use validate") and not one.startswith(ADAPTERS)] == []


def test_a_definition_that_nothing_uses_is_found() -> None:
    source = "def used():\n    pass\ndef forgotten():\n    used()\n"
    assert unused(iter([(Path("bus/x.py"), source)]), iter([])) == ["bus/x.py:3: only tests use forgotten"]


def test_nothing_is_left_over_in_any_file() -> None:
    found = complaints([leftovers], FILES)
    assert not found, "\n".join(found)


def test_files_are_found_at_all() -> None:
    found = {str(path) for path in FILES}
    assert {"Makefile", "pyproject.toml", "schemas/codec.py", "tests/test_tidy.py"} <= found
    assert not any(path.startswith((".venv", ".git/")) for path in found)


# --- packaging ----------------------------------------------------------------------------------------------


def package_folders(root: Path) -> set[str]:
    """Every folder that holds Python of the packages, as dotted names."""
    top = [path for path in root.iterdir() if path.name in TOP or (path / "__init__.py").is_file()]
    return {
        ".".join(["halfmoon", *path.parent.relative_to(root).parts])
        for folder in top
        for path in folder.rglob("*.py")
        if folder.name not in ("tests", *NOT_OURS)
    }


def test_the_package_list_is_the_folders() -> None:
    """A sub-package that is not listed is missing from the wheel."""
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed)
    assert set(listed) == {"halfmoon"} | package_folders(ROOT)
    assert all((ROOT.joinpath(*name.split(".")[1:]) / "__init__.py").is_file() for name in listed[1:])


def test_every_package_is_mapped_to_its_folder() -> None:
    options = PROJECT["tool"]["setuptools"]
    folders = {name: name.removeprefix("halfmoon.").replace(".", "/") for name in options["packages"]}
    assert options["package-dir"] == folders | {"halfmoon": "cli/root"}


def test_the_links_for_mypy_are_the_folders() -> None:
    links = {
        link.name: link.resolve() for link in (ROOT / ".links" / "halfmoon").iterdir() if link.is_symlink()
    }
    root = {"__init__.py": ROOT / "cli" / "root" / "__init__.py"}
    assert links == {folder: ROOT / folder for folder in TOP} | root


def test_a_forgotten_sub_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "store" / "tiers").mkdir(parents=True)
    (tmp_path / "store" / "__init__.py").touch()
    (tmp_path / "store" / "tiers" / "ssd.py").touch()
    assert package_folders(tmp_path) == {"halfmoon.store", "halfmoon.store.tiers"}


def pins(name: str) -> dict[str, str]:
    """Package and exact version, as a lock file says."""
    # A requirement is one line; the hashes of its files follow, each in a line of its own.
    lines = [
        line.removesuffix(" \\")
        for line in (ROOT / name).read_text().splitlines()
        if line and not line.startswith(("#", "-r ", "    --hash="))
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), lines
    return {str(canonicalize_name(line.split("==")[0])): line.split("==")[1] for line in lines}


def test_the_locks_pin_every_dependency_within_its_range() -> None:
    run = pins("requirements.lock") | pins("requirements-torch.lock")
    dev = pins("requirements-dev.lock")
    assert not run.keys() & dev.keys()
    declared = [(line, run) for line in PROJECT["project"]["dependencies"]]
    declared += [(line, {**run, **dev}) for line in PROJECT["project"]["optional-dependencies"]["dev"]]
    for line, pinned in declared:
        wanted = Requirement(line)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)], prereleases=True), line


def test_the_locks_name_no_accelerator_libraries() -> None:
    """They come with torch's own build (requirements-cuda.lock), or not at all."""
    for name in (*pins("requirements.lock"), *pins("requirements-dev.lock")):
        assert not re.match(r"nvidia|cuda|triton|llama", name)


# --- each check can fail ------------------------------------------------------------------------------------

SAMPLES: list[tuple[Check, str, str, str]] = [
    (directions, "schemas/x.py", "from halfmoon.bus.log import Log", "schemas must not import bus"),
    (directions, "schemas/x.py", "import halfmoon.store", "schemas must not import store"),
    (directions, "schemas/x.py", "import torch", "schemas must not import torch"),
    (directions, "bus/x.py", "from halfmoon import store", "bus must not import store"),
    (directions, "store/agent/x.py", "from halfmoon.workers.worker import Worker", "must not import workers"),
    (
        directions,
        "workers/x.py",
        "def f():\n    import halfmoon.conductor",
        "workers must not import conductor",
    ),
    (
        directions,
        "workers/model/x.py",
        "import halfmoon.schemas.types",
        "workers.model must not import schemas",
    ),
    (
        directions,
        "workers/frontend/x.py",
        "from halfmoon.store import errors",
        "frontend must not import store.errors",
    ),
    (
        directions,
        "conductor/core/x.py",
        "from halfmoon.bus import tasks",
        "conductor.core must not import bus",
    ),
    (
        directions,
        "conductor/core/x.py",
        "from halfmoon.conductor.live import shell",
        "must not import conductor.live",
    ),
    (directions, "conductor/new/x.py", "x = 1", "has no row"),
    (
        directions,
        "store/pool/x.py",
        "import halfmoon.store.agent.agent",
        "store.pool must not import store.agent",
    ),
    (
        directions,
        "store/transports/rdma/x.py",
        "from halfmoon.store.transports.tcp import wire",
        "store.transports.rdma must not import store.transports.tcp",
    ),
    (
        directions,
        "store/transports/engine.py",
        "from halfmoon.store.transports import shm",
        "store.transports.engine must not import store.transports",
    ),
    (directions, "workers/x.py", "from halfmoon.cli import main", "workers must not import cli"),
    (
        directions,
        "conductor/live/x.py",
        "if 1:\n    from halfmoon.store.pool import pool",
        "2: conductor.live",
    ),
    (directions, "conductor/live/x.py", "from halfmoon.workers import worker", "must not import workers"),
    (
        directions,
        "conductor/core/x.py",
        "import_module('halfmoon.workers.model.engine')",
        "not import workers.model",
    ),
    (absolute, "bus/x.py", "from schemas.codec import encode", "schemas.codec.encode is halfmoon."),
    (absolute, "tests/x.py", "import store.pool as pool", "store.pool is halfmoon.store.pool"),
    (absolute, "bus/x.py", "from . import log", "relative import .log"),
    (absolute, "bus/x.py", "from ..schemas import codec", "relative import ..schemas.codec"),
    (docstring_only, "bus/__init__.py", '"""The bus."""\nfrom halfmoon.bus.log import Log', "holds more"),
    (docstring_only, "bus/__init__.py", "", "or less"),
    (size, "bus/x.py", "x = 1\n" * 501, "501 lines"),
    (function_size, "bus/x.py", "def f():\n" + "    x = 1\n" * 70, "x.py:1: f has 71 lines"),
    (docstrings, "bus/x.py", "x = 1", "x.py: no docstring"),
    (docstrings, "bus/x.py", '"""X."""\nclass Log:\n    pass', "class Log has no docstring"),
    (
        openings,
        "bus/x.py",
        '"""X."""\ndef f():\n    """Of all, the first."""',
        "x.py:2: a docstring opens with Of",
    ),
    (openings, "bus/x.py", '"""What it is."""', "opens with What"),
    (swallowed, "bus/x.py", "try:\n    f()\nexcept Exception:\n    pass", "x.py:3: every error"),
    (swallowed, "bus/x.py", "try:\n    f()\nexcept:\n    ...", "caught and dropped"),
    (
        swallowed,
        "bus/x.py",
        "while 1:\n  try:\n    f()\n  except (OSError, BaseException):\n    continue",
        "dropped",
    ),
    (
        swallowed,
        "bus/x.py",
        "def f():\n  try:\n    g()\n  except Exception as e:\n    return None",
        "dropped",
    ),
    (swallowed, "bus/x.py", "with contextlib.suppress(OSError, Exception):\n    f()", "suppressed"),
    (switched_off, "bus/x.py", "x = 1  # type: " + "ignore", "names no code"),
    (unmarked, "tests/workers/test_x.py", "import socket", "test_x.py:1: socket takes part"),
    (unmarked, "tests/workers/test_x.py", "def test_x(nats_url): pass", "test_x.py:1: nats_url takes part"),
    (unmarked, "tests/test_x.py", "import time\n\ntime.sleep(1)", "test_x.py:3: time.sleep takes part"),
    (switched_off, "bus/x.py", "x = 1  # no" + "qa", "names no code"),
    (runs_what_it_reads, "store/x.py", "from pickle import loads", "x.py:1: pickle.loads runs"),
    (runs_what_it_reads, "store/x.py", "import yaml\nyaml.load(text)", "x.py:2: yaml.load"),
    (runs_what_it_reads, "store/x.py", "torch.load(file)", "without weights_only"),
    (runs_what_it_reads, "store/x.py", "torch.load(file, weights_only=False)", "weights_only=False"),
    (runs_what_it_reads, "store/x.py", "np.load(file, allow_pickle=asked)", "allow_pickle=asked"),
    (runs_what_it_reads, "store/x.py", "subprocess.run(text, shell=True)", "shell=True"),
    (runs_what_it_reads, "store/x.py", "x = eval(text)", "eval"),
    (runs_what_it_reads, "bus/x.py", "context.verify_mode = ssl.CERT_NONE", "is believed"),
    (leftovers, "docs/x.md", "see /wo" + "rk/main", "/wo" + "rk/"),
    (leftovers, "bus/x.py", "# TO" + "DO: later", "TO" + "DO"),
    (leftovers, "Makefile", "pip install -i https://pypi" + ".org/simple", "pypi" + ".org"),
]


SAMPLES += [
    (behind_brackets, "bus/x.py", "x = f(\n    1\n)  # because", "behind a closing bracket"),
    (behind_brackets, "bus/x.py", "if (\n    y\n):  # because\n    pass", "behind a closing bracket"),
]
SAMPLES += [(check, "tests/x.py", source, expected) for check, source, expected in gate_rules.REFUSED]
SAMPLES += [
    (check, program, source, expected)
    for program in gate_rules.PROGRAMS
    for check, source, expected in gate_rules.REFUSED_OF_PROGRAMS
]


@pytest.mark.parametrize(("check", "path", "source", "expected"), SAMPLES)
def test_each_check_can_fail(check: Check, path: str, source: str, expected: str) -> None:
    found = check(Path(path), source)
    assert len(found) == 1
    assert expected in found[0]


GOOD: list[tuple[Check, str, str]] = [
    (behind_brackets, "bus/x.py", "x = f(\n    1\n)  # fmt: skip"),
    (directions, "schemas/x.py", "import json\nimport msgspec\nfrom halfmoon.schemas.types import Id"),
    (
        directions,
        "workers/x.py",
        "import torch\nfrom halfmoon.store import agent_client\nimport halfmoon.bus.log",
    ),
    (
        directions,
        "cli/x.py",
        "from halfmoon.conductor.live import shell\nfrom halfmoon.workers.decode import worker",
    ),
    (absolute, "bus/x.py", "from halfmoon.schemas import codec\nfrom concurrent import futures"),
    (docstring_only, "bus/__init__.py", '"""The bus."""\n'),
    (docstring_only, "bus/x.py", "x = 1"),
    (size, "bus/x.py", "x = 1\n" * 500),
    (function_size, "bus/x.py", "def f():\n" + "    x = 1\n" * 69),
    (docstrings, "bus/x.py", '"""X."""\nclass _Log:\n    pass'),
    (swallowed, "bus/x.py", "try:\n    f()\nexcept Exception:\n    g()\n    raise"),
    (swallowed, "bus/x.py", "try:\n    f()\nexcept OSError:\n    pass"),
    (unmarked, "tests/store/test_x.py", "import socket"),
    (unmarked, "tests/workers/test_x.py", "import subprocess\n\nsubprocess.run([])"),
    (switched_off, "bus/x.py", "x = 1  # type: ignore[misc]  # noqa: E501\ny = '# type: " + "ignore'"),
    (
        runs_what_it_reads,
        "store/x.py",
        "torch.load(file, weights_only=True)\nmodel.eval()\nyaml.safe_load(x)",
    ),
    (leftovers, "docs/x.md", "a /workshop/ of network/ers, method\u00f3s"),
]

GOOD += [(check, "tests/x.py", source) for check in gate_rules.CHECKS for source in gate_rules.ALLOWED]
GOOD += [(check, file, source) for file in gate_rules.WAITS for check, source, _ in gate_rules.REFUSED]
GOOD += [(gate_rules.pauses, program, "time.sleep(pause_s)") for program in gate_rules.PROGRAMS]


@pytest.mark.parametrize(("check", "path", "source"), GOOD)
def test_no_check_fails_without_cause(check: Check, path: str, source: str) -> None:
    assert check(Path(path), source) == []
