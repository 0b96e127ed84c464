"""The programs in benchmarks/: `make bench` and `make bench-check` name all of them, and each starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if re.search(r"^def main\(", path.read_text(), re.M)
)
#: What `make bench` does not run, and why.
NOT_IN_BENCH = {
    "structure": "counts what another checkout and this one are built of, of which `make bench` has one",
    "turns": "measures another checkout and this one by turns, of which `make bench` has one",
    "experiments": "`make experiments`",
    "flames": "needs another checkout and a py-spy, which is not installed here",
    "cpu_engines": "needs engines that are not installed here, `make bench-cpu-engines`",
    "engine_ends": "an end of cpu_engines.py, run by the interpreter that has the engine",
    "dynamo_edge": "needs a Dynamo that is not installed here, `make bench-dynamo`",
    "vllm_router": "needs a program that is not installed here, `make bench-vllm-router`",
    "vllm_pair": "needs a vLLM that is not installed here, `make bench-vllm-pair`",
    "vllm_tier": "needs a vLLM that is not installed here, `make bench-vllm-tier`",
    "engine_routing": "needs a vLLM and a router that are not installed here, `make bench-engine-routing`",
    "figures": "makes pages of what is measured already, `make docs`",
    "workloads": "writes traces, which others read",
    "mooncake_store": "an end of transfer.py, run by the interpreter that has Mooncake's wheel",
}
#: What measures nothing by itself, or, as the experiments do, on no clock.
NO_SHORT_FORM = {"engine_ends", "experiments", "figures", "mooncake_store", "workloads"}
#: What runs nowhere but where somebody installed more.
NEEDS_MORE = {
    "cpu_engines", "dynamo_edge", "engine_routing", "flames", "vllm_pair", "vllm_router", "vllm_tier",
}  # fmt: skip


def named(variable: str) -> list[str]:
    """The words of a variable of the Makefile."""
    (words,) = re.findall(rf"^{variable} := (.*)$", MAKEFILE, re.M)
    return str(words).split()


#: In one process: what they import takes seconds, and most of them import the same.
STARTS = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, "benchmarks")
found = {}
_, names, *words = sys.argv
for name in names.split():
    sys.argv = [name, *words]
    text = io.StringIO()
    status = "it did not end"
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            runpy.run_path(f"benchmarks/{name}.py", run_name="__main__")
        except SystemExit as end:
            status = end.code
    found[name] = (status, text.getvalue())
print(json.dumps(found))
"""


def started(programs: list[str], *words: str) -> dict[str, tuple[int | None, str]]:
    """Of each program its exit status, and what it printed."""
    command = [sys.executable, "-c", STARTS, " ".join(programs), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int | None, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_make_bench_runs_every_program_or_there_is_a_reason() -> None:
    bench = named("BENCH")
    assert len(bench) == len(set(bench))
    assert set(bench) | set(NOT_IN_BENCH) == set(PROGRAMS)
    assert not set(bench) & set(NOT_IN_BENCH)


def test_make_bench_check_runs_every_program() -> None:
    assert {*named("BENCH"), *named("COMPARISONS")} == set(PROGRAMS) - NO_SHORT_FORM - NEEDS_MORE
    assert ".ci/bench-check $(BENCH) $(COMPARISONS)" in MAKEFILE


def test_each_program_starts_and_has_a_short_form() -> None:
    programs = [name for name in PROGRAMS if name not in NO_SHORT_FORM]
    for name, (status, text) in started(programs, "--help").items():
        assert status in (0, None), (name, status, text)
        assert "--brief" in text, name


def test_what_a_short_form_finds_is_not_saved() -> None:
    status, text = started(["channels"], "--brief", "--save", "nothing")["channels"]
    assert status == 2, text
    assert "not allowed with" in text
