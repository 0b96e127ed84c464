"""Figures of the structure of this code base, read from its sources; nothing of it is imported or run.

Circles are strongly connected groups of modules in the graph of imports, those under `TYPE_CHECKING` and inside
functions included: a type that two files need of each other ties them as much as a call does.

    python benchmarks/structure.py                     # this checkout
    python benchmarks/structure.py --against ../older  # beside another checkout of it
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("bus", "cli", "conductor", "schemas", "store", "workers")
PAPERS = "benchmarks/papers"
ROLES = {"attention", "decode", "frontend", "mixed", "prefill", "store"}
#: A subject that is a relative clause, a quantity without a name, an actor who is "who".
CLUMSY = re.compile(
    r"\b(who|whoever|so many|so long|so much|told|said|says|what is|that which)\b", re.IGNORECASE
)
#: Where most is decided: their lines should have reasons.
HARDEST = (
    "bus.publisher",
    "conductor.core.admission",
    "conductor.core.loans",
    "conductor.core.machine",
    "conductor.core.moves",
    "conductor.core.orders",
    "conductor.core.placement.best_first",
    "store.pool.pool",
    "workers.decode.orders",
    "workers.decode.state",
    "workers.mixed.state",
    "workers.prefill.job",
)
#: Module, and the function in it; a method has its class before it.
Place = tuple[str, str]
#: Where the walk of a request that arrives begins, and that of any event.
SUBMIT: Place = ("conductor.core.orders", "accept_or_reject")
EVENT: Place = ("conductor.core.machine", "Core.step")


@dataclass
class Module:
    """One source file. `name` is dotted and without `halfmoon.`."""

    name: str
    path: Path
    tree: ast.Module
    lines: int
    imports: set[str] = field(default_factory=set)

    @property
    def folder(self) -> str:
        return self.name.rpartition(".")[0]

    @functools.cached_property
    def comments(self) -> dict[int, str]:
        """By line."""
        with self.path.open("rb") as file:
            tokens = tokenize.tokenize(file.readline)
            return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    @property
    def comment_lines(self) -> int:
        return len(self.comments)

    @property
    def reasons(self) -> int:
        """Lines of comments that are neither a field's description, nor a rule across, nor for a tool."""
        return sum(not re.match(r"#:|# -{3}|# (noqa|type:|fmt:)", text) for text in self.comments.values())

    def prose(self) -> Iterator[str]:
        """Docstrings and comments."""
        yield from self.comments.values()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""

    def role_comparisons(self) -> int:
        """`==`, `in` and `case` with a role's name. Of an order's `phase`, a half or a stage: these are no roles."""
        return sum(
            any(isinstance(each, ast.Constant) and each.value in ROLES for each in ast.walk(node))
            and not (
                isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(("phase", "half", "stage"))
            )
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Compare | ast.MatchValue)
        )

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def read_modules(root: Path, parse: Callable[[str], ast.Module] = ast.parse) -> dict[str, Module]:
    """Every module of the packages below `root`, with the modules of ours that it imports."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.name == "__init__.py":
                continue
            source = path.read_text(encoding="utf-8")
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            modules[name] = Module(name, path, parse(source), source.count("\n"))
    for module in modules.values():
        module.imports = {name for name in _imported(module.tree) if name in modules and name != module.name}
    return modules


def _imported(tree: ast.Module) -> Iterator[str]:
    """Both readings of `from a import b`: module `a` with a name `b`, and module `a.b`."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.removeprefix("halfmoon.")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("halfmoon"):
            module = (node.module or "").removeprefix("halfmoon").lstrip(".")
            for alias in node.names:
                yield f"{module}.{alias.name}".lstrip(".")
            yield module


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements below `node`, those inside functions too. Nearly all nodes of a tree are expressions."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inside in getattr(node, name, ()):
            yield inside
            yield from _statements(inside)


def circles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Groups of modules that reach each other by imports. Source: Tarjan, strongly connected components, 1972."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(modules[name].imports):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(modules):
        if name not in index:
            visit(name)
    return sorted(found)


def shared_class_names(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Names of top-level classes that more than one module defines."""
    owners: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(module.name)
    return {name: places for name, places in sorted(owners.items()) if len(places) > 1}


class Walk(NamedTuple):
    """The functions that a reader passes who follows a call, in the order in which they are first read.

    The walk goes from a function to each that it calls, innermost calls first, and through that one's own calls
    before the next. A call is followed where its function is named: in the same module, by an import, or on `self`, a
    parameter or a variable that is annotated with a class of the walked modules or made by calling it.
    """

    places: list[Place]

    @property
    def stays(self) -> list[str]:
        """Modules, each as often as the walk comes to it from another."""
        return [module for module, _ in groupby(self.places, key=lambda place: place[0])]

    @property
    def returns(self) -> int:
        """Stays in a module that the walk was in before."""
        return len(self.stays) - len(set(self.stays))


def walk(modules: Mapping[str, Module], start: Place) -> Walk:
    """The walk from `start` through its package and the packages inside that; empty where there is no such function."""
    inside = start[0].rpartition(".")[0] + "."
    names = {name: _Names(name, module.tree) for name, module in modules.items() if name.startswith(inside)}
    functions = {place: node for each in names.values() for place, node in each.functions()}
    found: dict[Place, None] = {}

    def visit(place: Place) -> None:
        if place in functions and place not in found:
            found[place] = None
            for target in names[place[0]].called(place[1], functions[place]):
                visit(target if target in functions else (target[0], f"{target[1]}.__init__"))

    visit(start)
    return Walk(list(found))


class _Names:
    """A module, and what its names stand for."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.module, self.tree = module, tree
        self.known: dict[str, Place] = {
            node.name: (module, node.name)
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("halfmoon."):
                origin = (node.module or "").removeprefix("halfmoon.")
                self.known |= {each.asname or each.name: (origin, each.name) for each in node.names}

    def functions(self) -> Iterator[tuple[Place, ast.FunctionDef]]:
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                yield (self.module, node.name), node
            elif isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef):
                        yield (self.module, f"{node.name}.{each.name}"), each

    def called(self, name: str, function: ast.FunctionDef) -> Iterator[Place]:
        """What a function of the module calls, innermost calls first."""
        kinds = dict.fromkeys(("self", "cls"), (self.module, name.rpartition(".")[0]))
        for node in ast.walk(function):
            match node:
                case (
                    ast.arg(arg=each, annotation=ast.Name(id=kind))
                    | ast.AnnAssign(target=ast.Name(id=each), annotation=ast.Name(id=kind))
                    | ast.Assign(targets=[ast.Name(id=each)], value=ast.Call(func=ast.Name(id=kind)))
                ) if kind in self.known:
                    kinds[each] = self.known[kind]
        for call in _calls(function):
            match call.func:
                case ast.Name(id=each) if each in self.known:
                    yield self.known[each]
                case ast.Attribute(value=ast.Name(id=each), attr=attribute) if each in kinds:
                    module, kind = kinds[each]
                    yield module, f"{kind}.{attribute}"
                case ast.Attribute(value=ast.Name(id=each), attr=attribute) if each in self.known:
                    # A module that was imported whole, or a method of a class.
                    module, inside = self.known[each]
                    yield f"{module}.{inside}", attribute
                    yield module, f"{inside}.{attribute}"


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        # What is gone through is made before what is made of each.
        children.sort(key=lambda child: not isinstance(child, ast.comprehension))
    for child in children:
        yield from _calls(child)
    if isinstance(node, ast.Call):
        yield node


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """`self` and `cls` apart."""
    names = function.args
    every = [*names.posonlyargs, *names.args, *names.kwonlyargs]
    return len([each for each in every if each.arg not in ("self", "cls")])


def fields(modules: Mapping[str, Module]) -> list[tuple[int, str]]:
    """Annotated fields of each class but those of the class itself, inherited ones left out, and its name."""
    return [
        (
            sum(
                isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
                for each in node.body
            ),
            f"{module.name}.{node.name}",
        )
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]


def _clumsy(modules: Mapping[str, Module]) -> float:
    """Per 1,000 words of docstrings and comments."""
    prose = " ".join(text for module in modules.values() for text in module.prose())
    return round(1000 * len(CLUMSY.findall(prose)) / len(prose.split()), 1)


def figures(root: Path) -> dict[str, Any]:
    """All figures of the checkout at `root`."""
    modules = read_modules(root)
    rings = circles(modules)
    folders: dict[str, int] = defaultdict(int)
    for module in modules.values():
        folders[module.folder] += 1
    largest = max(folders, key=lambda folder: (folders[folder], folder))
    agent = modules.get("store.agent.agent") or modules["store.agent"]
    widest = max(modules.values(), key=lambda module: (len(module.imports), module.name))
    lengths = [
        ((function.end_lineno or 0) - function.lineno + 1, f"{module.name}.{function.name}")
        for module in modules.values()
        for function in module.functions()
    ]
    sizes = [module.lines for module in modules.values()]
    lines = sum(sizes)
    papers = sum(path.read_text().count("\n") for path in (root / PAPERS).rglob("*.py"))
    wide = [
        (_parameters(function), f"{module.name}.{function.name}")
        for module in modules.values()
        for function in module.functions()
    ]
    hardest = [module for name, module in modules.items() if name in HARDEST]
    return {
        "files": len(modules),
        "lines": lines,
        "lines beside, of the papers": papers,
        "circles of imports": len(rings),
        "files in circles": sum(map(len, rings)),
        "largest folder": f"{folders[largest]} ({largest})",
        "modules that the store agent imports": len(agent.imports),
        "most modules that one imports": f"{len(widest.imports)} ({widest.name})",
        "returns in the walk of a submit": walk(modules, SUBMIT).returns,
        "returns in the walk of any event": walk(modules, EVENT).returns,
        "class names with two owners": len(shared_class_names(modules)),
        "comment lines, percent": round(100 * sum(m.comment_lines for m in modules.values()) / lines, 1),
        "lines of a file, median and largest": f"{statistics.median(sizes):.0f}, {max(sizes)}",
        "functions": len(lengths),
        "longest function": "{} ({})".format(*max(lengths)),
        "functions over 40 lines, percent": round(100 * sum(n > 40 for n, _ in lengths) / len(lengths), 1),
        "functions with over 6 parameters": sum(count > 6 for count, _ in wide),
        "most parameters": "{} ({})".format(*max(wide)),
        "fields of the largest record": "{} ({})".format(*max(fields(modules))),
        "comparisons with a role's name": sum(module.role_comparisons() for module in modules.values()),
        "clumsy words per 1,000 of prose": _clumsy(modules),
        "reasons in the hardest files, percent": round(
            100 * sum(module.reasons for module in hardest) / sum(module.lines for module in hardest), 1
        ),
        "words of ARCHITECTURE": len((root / "ARCHITECTURE.md").read_text().split()),
        "words of README": len((root / "README.md").read_text().split()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures as a table, one column for each checkout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="DIR", type=Path, help="another checkout, shown first")
    parser.add_argument("--brief", action="store_true", help="changes nothing: it is brief")
    parser.add_argument(
        "--detail", action="store_true", help="also list circles, shared class names and a submit's walk"
    )
    args = parser.parse_args(argv)
    columns = {"before": figures(args.against)} if args.against else {}
    columns["now"] = figures(ROOT)
    print(f"{'':40}" + "".join(f"{name:>40}" for name in columns))
    for row in columns["now"]:
        print(f"{row:40}" + "".join(f"{column[row]!s:>40}" for column in columns.values()))
    if args.detail:
        modules = read_modules(ROOT)
        for ring in circles(modules):
            print("circle:", " ".join(ring))
        for name, owners in shared_class_names(modules).items():
            print("class:", name, *owners)
        for name, places in groupby(walk(modules, SUBMIT).places, key=lambda place: place[0]):
            print("walk:", name, *(function for _, function in places))


if __name__ == "__main__":
    main()
