"""What a test may not rest on: a clock that it compares, a pause, a short bound, a port that is not bound yet.

Each check is a function from a source to complaints, as in tests/test_tidy.py, which runs them over all of `tests`.
tests/eventually.py is the one place that waits and knows how long.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests import eventually
from tests.sources import dotted, nodes, parsed

#: They may look at a clock and pause: who waits, and the meter beside each test.
WAITS = ("tests/eventually.py", "tests/stalls.py")
#: Seconds. A bound from here on only ends what hangs.
BOUND_S_MIN = 60.0
#: Of the wall, and of the processor: shared caches, frequency and a hypervisor change what the same work takes of it.
_CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "time")
_TAKE_A_CLOCK = ("clock_gettime", "pthread_getcpuclockid")
CLOCKS = (
    {f"time.{name}{unit}" for name in (*_CLOCKS, *_TAKE_A_CLOCK) for unit in ("", "_ns")}
    | {name + unit for name in (*_CLOCKS[:-1], _TAKE_A_CLOCK[0]) for unit in ("", "_ns")}
    | {"loop.time", "os.times", "os.wait3", "os.wait4"}
)
#: What other calls give of a processor's time: `getrusage` has it beside the memory, `psutil` for one process or all.
CPU_FIELDS = {"ru_utime", "ru_stime", "children_system", "children_user"}
CPU_CALLS = {"cpu_percent", "cpu_times", "cpu_times_percent"}
CLOCK_WORDS = re.compile(
    r"monotonic|perf_counter|process_time|thread_time|clock_gettime|ru_[us]time|children_|cpu_|os\.(times|wait)"
    r"|getrusage|time\.time|\.time\("
)
SLEEPS = {"asyncio.sleep", "sleep", "time.sleep"}
BOUNDS = re.compile(r"asyncio|bound_s")
#: Each with the place of its bound among the arguments and the bound's name.
BOUNDED = {
    "asyncio.timeout": (0, "delay"),
    "asyncio.wait": (None, "timeout"),
    "asyncio.wait_for": (1, "timeout"),
    "eventually": (None, "bound_s"),
    "eventually_here": (None, "bound_s"),
    "timeout": (0, "delay"),
    "wait_for": (1, "timeout"),
}
PICKS_PORTS = {"free_port", "free_tcp_port", "unused_port", "unused_tcp_port"}
#: Calls whose value is a time where their arguments are.
ARITHMETIC = {
    "abs",
    "divmod",
    "float",
    "int",
    "itertools.pairwise",
    "list",
    "max",
    "min",
    "pairwise",
    "round",
    "sorted",
    "statistics.mean",
    "statistics.median",
    "sum",
    "zip",
}

#: Programs that may pause, each with its reason: time is their subject. No file that holds a test is one of them,
#: whatever stands here, and nothing but the pauses is excused.
PROGRAMS = {
    "tests/adapters/fake_engine.py": "an engine takes time for the tokens of a prompt",
    "tests/chaos/exhaustion.py": "a resource is away for some seconds, is looked at meanwhile, and clients arrive",
    "tests/chaos/exhaustion_machine.py": "what a process lets go of is taken away, again and again",
    "tests/chaos/live.py": "hours of a run are noted and watched",
    "tests/chaos/live_faults.py": "faults arrive by chance, and last",
    "tests/chaos/live_load.py": "clients of a long load leave, and come back after a refusal",
    "tests/chaos/live_watch.py": "memory is sampled over hours",
    "tests/injected/halfmoon_delays.py": "what the world may delay is late",
    "tests/store/soak.py": "an agent looks at its books each second for hours",
}


def may_wait(path: Path) -> bool:
    return path.parts[0] != "tests" or path.as_posix() in WAITS


def is_program(path: Path, source: str) -> bool:
    tests = (ast.FunctionDef, ast.AsyncFunctionDef)
    return path.as_posix() in PROGRAMS and not any(
        isinstance(node, tests) and node.name.startswith("test_") for node in nodes(source)
    )


# --- a clock that is compared -------------------------------------------------------------------------------


def compared_clocks(path: Path, source: str) -> list[str]:
    """Assertions that compare a clock, or what was measured by one."""
    if may_wait(path) or not CLOCK_WORDS.search(source):
        return []
    found = []
    for scope in _scopes(source):
        times: set[str] = set()
        while (more := times | set(_names_of_times(scope, times))) != times:
            times = more
        for node in scope:
            if isinstance(node, ast.Assert) and _compares(node.test, times):
                found.append(f"{path}:{node.lineno}: an assertion over a clock")
    return found


def _scopes(source: str) -> Iterator[list[ast.AST]]:
    """The nodes of each function at the top or in a class, functions inside of it included; then all the others."""
    rest = {id(node): node for node in nodes(source)}
    tops = [parsed(source).body]
    tops += [node.body for node in nodes(source) if isinstance(node, ast.ClassDef)]
    for body in tops:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = [one for one in ast.walk(node) if rest.pop(id(one), None)]
                if inside:
                    yield inside
    yield list(rest.values())


def _names_of_times(scope: list[ast.AST], times: set[str]) -> Iterator[str]:
    """Names that hold what a clock told, given those in `times` do."""
    for node in scope:
        match node:
            case ast.Assign(targets=targets, value=value) if _is_time(value, times):
                yield from (name for target in targets for name in _names(target))
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value) if (
                _is_time(value, times)
            ):
                yield from _names(target)
            case ast.AnnAssign(target=target, value=ast.expr() as value) if _is_time(value, times):
                yield from _names(target)
            case ast.comprehension(target=target, iter=value) | ast.For(target=target, iter=value) if (
                _is_time(value, times)
            ):
                yield from _names(target)
            case ast.Call(func=ast.Attribute(value=kept, attr="append"), args=[value]) if _is_time(
                value, times
            ) and dotted(kept):
                yield dotted(kept)
            case _:
                pass


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _names(one)
    elif isinstance(target, ast.Starred):
        yield from _names(target.value)
    elif name := dotted(target):
        yield name


def _is_time(value: ast.AST, times: set[str]) -> bool:
    """Whether a clock's value, or one made of it by arithmetic, is in `value`."""
    match value:
        case ast.Attribute(attr=field) if field in CPU_FIELDS:
            return True
        case ast.Subscript(value=ast.Call(func=called)) if dotted(called).endswith("getrusage"):
            return True
        # The fields of one that was kept whole are its times, but for the memory that getrusage tells.
        case ast.Attribute(value=whole, attr=field) if not field.startswith("ru_"):
            return dotted(value) in times or _is_time(whole, times)
        case ast.Name() | ast.Attribute():
            return dotted(value) in times
        case ast.Call(func=called, args=args):
            if isinstance(called, ast.Attribute) and called.attr in CPU_CALLS:
                return True
            if dotted(called) in CLOCKS or dotted(called).endswith("loop().time"):
                return True
            if isinstance(called, ast.Attribute) and called.attr == "time" and "loop" in ast.unparse(called):
                return True
            return dotted(called) in ARITHMETIC and any(_is_time(arg, times) for arg in args)
        case ast.Lambda():
            return False
        case _:
            return any(_is_time(one, times) for one in ast.iter_child_nodes(value))


def _compares(test: ast.expr, times: set[str]) -> bool:
    sides = [
        side
        for node in ast.walk(test)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
    ]
    return any(_is_time(side, times) for side in sides)


# --- pauses, bounds, ports ----------------------------------------------------------------------------------


def pauses(path: Path, source: str) -> list[str]:
    """Sleeping for longer than the other tasks take their turn."""
    if may_wait(path) or "sleep" not in source or is_program(path, source):
        return []
    return [
        f"{path}:{call.lineno}: {name} pauses"
        for call, name in _calls(source)
        if name in SLEEPS and not (call.args and _number(call.args[0], source) == 0)
    ]


def short_bounds(path: Path, source: str) -> list[str]:
    """Bounds that are not seen to be BOUND_S_MIN seconds or more."""
    if may_wait(path) or not BOUNDS.search(source):
        return []
    found = []
    for call, name in _calls(source):
        if name not in BOUNDED:
            continue
        place, word = BOUNDED[name]
        bound = next((one.value for one in call.keywords if one.arg == word), None)
        if bound is None and place is not None and len(call.args) > place:
            bound = call.args[place]
        if bound is not None and (_number(bound, source) or 0) < BOUND_S_MIN:
            found.append(f"{path}:{call.lineno}: {name} ends what only takes its time")
    return found


def picked_ports(path: Path, source: str) -> list[str]:
    """Ports that are chosen before whoever will listen there has them."""
    if may_wait(path) or "port" not in source:
        return []
    found = {}
    for node in nodes(source):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.arg(arg=name) if (
                name in PICKS_PORTS
            ):
                found[node.lineno] = f"{path}:{node.lineno}: {name} picks a port that is not bound"
            case ast.With() if any("socket" in ast.unparse(item.context_expr) for item in node.items):
                for inside in ast.walk(node):
                    if isinstance(inside, ast.Return) and "getsockname" in ast.unparse(inside):
                        line = inside.lineno
                        found[line] = f"{path}:{line}: a port is told when its socket is closed"
            case _:
                pass
    return list(found.values())


def _calls(source: str) -> Iterator[tuple[ast.Call, str]]:
    for node in nodes(source):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def _number(value: ast.expr, source: str) -> float | None:
    """The number that `value` is, written there or a name of; None where it is not seen."""
    match value:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return _constants(source).get(name)
        case _:
            return None


@functools.cache
def _constants(source: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for node in parsed(source).body:
        match node:
            case ast.ImportFrom(module="tests.eventually"):
                values = {one.name: getattr(eventually, one.name, None) for one in node.names}
                found |= {name: value for name, value in values.items() if isinstance(value, float)}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int() | float() as number)):
                found[name] = number
            case _:
                pass
    return found


CHECKS = [compared_clocks, pauses, short_bounds, picked_ports]

#: Each check with a source that it refuses, and a piece of the complaint.
REFUSED = [
    (compared_clocks, "assert time.monotonic() < until", "x.py:1: an assertion over a clock"),
    (
        compared_clocks,
        "def f():\n    a = time.time()\n    b = time.time() - a\n    assert 0 < b < 3",
        "x.py:4",
    ),
    (compared_clocks, "assert (took := round(time.perf_counter() - began, 2)) < 3", "over a clock"),
    (compared_clocks, "at.append(time.monotonic())\nassert max(at) - min(at) < 1", "x.py:2"),
    (compared_clocks, "at = [time.time_ns()]\nassert all(b > a for a, b in pairwise(at))", "x.py:2"),
    (compared_clocks, "began = time.process_time()\nassert time.process_time() - began < 4", "x.py:2"),
    (compared_clocks, "began = time.thread_time_ns()\nassert time.thread_time_ns() - began < 4", "x.py:2"),
    (compared_clocks, "from time import process_time\nassert process_time() < 4", "x.py:2"),
    (compared_clocks, "assert time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) < 1", "x.py:1"),
    (compared_clocks, "used = resource.getrusage(resource.RUSAGE_SELF)\nassert used.ru_utime < 1", "x.py:2"),
    (compared_clocks, "took = resource.getrusage(who).ru_stime\nassert took < 1", "x.py:2"),
    (compared_clocks, "assert resource.getrusage(who)[0] < 1", "x.py:1"),
    (compared_clocks, "at = os.times()\nassert os.times().user - at.user < 1", "x.py:2"),
    (compared_clocks, "assert sum(psutil.Process(pid).cpu_times()[:2]) < 1", "x.py:1"),
    (compared_clocks, "used = process.cpu_times()\nassert used.user + used.system < 1", "x.py:2"),
    (compared_clocks, "assert psutil.cpu_percent(interval=1) < 5", "x.py:1"),
    (compared_clocks, "loop = asyncio.get_running_loop()\nassert loop.time() > 3", "x.py:2"),
    (compared_clocks, "assert asyncio.get_running_loop().time() > 3", "x.py:1"),
    (pauses, "async def f():\n    await asyncio.sleep(0.01)", "x.py:2: asyncio.sleep pauses"),
    (pauses, "time.sleep(pause_s)", "time.sleep pauses"),
    (pauses, "PAUSE_S = 2\ntime.sleep(PAUSE_S)", "x.py:2"),
    (short_bounds, "import asyncio\nasync def f():\n    async with asyncio.timeout(5): pass", "x.py:3"),
    (short_bounds, "asyncio.wait_for(f(), timeout=59)", "asyncio.wait_for ends"),
    (short_bounds, "asyncio.wait(tasks, timeout=0.3)", "asyncio.wait ends"),
    (short_bounds, "import asyncio\nSOON_S = 2\nasyncio.wait_for(f(), SOON_S)", "x.py:3"),
    (short_bounds, "asyncio.timeout(self.seconds)", "takes its time"),
    (short_bounds, "SOON_S = 9\neventually_here(ready, 'it is', bound_s=SOON_S)", "x.py:2"),
    (picked_ports, "from halfmoon.bus.embedded import free_port", "free_port picks"),
    (picked_ports, "def test_x(unused_tcp_port): pass", "unused_tcp_port picks"),
    (
        picked_ports,
        "def port():\n    with socket.socket() as one:\n        return one.getsockname()[1]",
        "x.py:3: a port is told",
    ),
]
#: As REFUSED, of a file that is one of PROGRAMS.
REFUSED_OF_PROGRAMS = [
    (pauses, "def test_x():\n    time.sleep(3)", ":2: time.sleep pauses"),
    (pauses, "class TestX:\n    async def test_x(self): await asyncio.sleep(3)", ":2: asyncio.sleep pauses"),
    (compared_clocks, "assert time.monotonic() < until", ":1: an assertion over a clock"),
    (short_bounds, "asyncio.wait_for(f(), timeout=59)", "asyncio.wait_for ends"),
    (picked_ports, "from halfmoon.bus.embedded import free_port", "free_port picks"),
]
#: Sources that none of them refuses.
ALLOWED = [
    "call = Call('o1', deadline_ns=time.monotonic_ns() + 10**10)\nassert move(call) == 3",
    "started = time.monotonic()\nassert len(found) == 2",
    "before = resource.getrusage(who).ru_maxrss\nassert resource.getrusage(who).ru_maxrss - before < 300",
    "began = time.process_time()\nprint(time.process_time() - began)\nassert cpu_times(text) == (3, 4)",
    "def f():\n    a = time.time()\ndef g(a):\n    assert a == 3",
    "async def f():\n    await asyncio.sleep(0)",
    "from tests.eventually import BOUND_S, SCENARIO_S\nasyncio.wait_for(f(), BOUND_S)\nasyncio.timeout(SCENARIO_S)",
    "import asyncio\nLONG_S = 90\nasyncio.timeout(LONG_S)\nasyncio.wait(tasks)",
    "asyncio.run(double.wait_for(RequestArrived, 2))",
    "with socket.create_server(('', 0)) as one:\n    port = one.getsockname()[1]\n    serve(one)",
]
