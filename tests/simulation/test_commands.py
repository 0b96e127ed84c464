"""`halfmoon simulate`, `capacity`, `size`, `experiments`, as a user runs them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from halfmoon.cli.main import main
from tests.eventually import BOUND_S, eventually_here
from tests.lengths import sizes
from tests.tree_copies import ROOT, copy_tree

#: In this order, whatever records the report is made of.
KEYS = (
    "system policy admission profile prefill decode speed seed mixed complete requests completed failed open rejected "
    "wasted_prefills ttft_ms tbt_ms token_reuse hits_by_source effective_capacity goodput_s duration_s prefill_gpu_s "
    "decode_gpu_s prefill_busy bytes_moved bytes_fetched bytes_pushed failed_fetches ttft_error tbt_error slo events "
    "digest role_changes wall_s"
)


def halfmoon(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.main", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The same in this process: its status, and what it writes."""
    try:
        code = main([*map(str, words)])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return int(code or 0), out, err  # type: ignore[call-overload]


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed, on however busy a machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.pure
def test_simulate_prints_what_scripts_rely_on(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ran(
        capsys, "simulate", "--trace", trace_file, "--requests", 200, "--prefill", 2, "--decode", 2, "--json"
    )
    report = json.loads(out)
    assert " ".join(report) == KEYS
    assert report["ttft_ms"].keys() == {"mean", "p50", "p90", "p99"}
    assert report["requests"] == 200


@pytest.fixture(scope="session")
def fonts() -> None:
    """matplotlib asks another process for the machine's fonts, once for each user: not within a test that has none."""
    importlib.import_module("matplotlib.font_manager")


@pytest.mark.pure
@pytest.mark.usefixtures("fonts")
def test_simulate_prints_a_table_and_draws(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ran(capsys, "simulate", "--trace", trace_file, "--requests", 200, "--plot", tmp_path)
    assert code == 0, err
    assert "TTFT ms" in out
    assert "token reuse" in out
    for name in ("ttft_tbt.png", "load.png", "hit_rate.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.pure
def test_capacity_and_size_answer(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--trace", trace_file, "--requests", 80, "--json")
    found = json.loads(
        ran(capsys, "capacity", *few, "--prefill", 2, "--decode", 1, "--tbt-limits", "100,200")[1]
    )
    assert 0 < found["tbt_ms"]["100"]["speed"] <= found["tbt_ms"]["200"]["speed"] * 1.01
    size = json.loads(ran(capsys, "size", *few, "--workers-max", 8, "--tbt-ms", 100)[1])
    assert size["held"] >= 0.9
    assert size["prefill"] + size["decode"] < 16
    few = (*few, "--token-budget", 1_024, "--mixed", 1)
    mixed = json.loads(ran(capsys, "size", *few, "--workers-max", 4)[1])
    assert (mixed["prefill"], mixed["decode"]) == (0, 0)
    pools = ("--prefill", 0, "--decode", 0)
    held = [
        json.loads(ran(capsys, "simulate", *few, *pools, "--mixed", count)[1])["effective_capacity"]
        for count in (mixed["mixed"] - 1 or 1, mixed["mixed"])
    ]
    assert held[-1] == pytest.approx(mixed["held"], abs=1e-4)
    assert held[-1] >= 0.9
    assert held[0] < 0.9 or mixed["mixed"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("times", sizes(1, 2))
def test_experiments_are_the_same_again_and_what_is_missing_is_said(
    trace_file: Path, tmp_path: Path, times: int
) -> None:
    pages = []
    for name in ("one", "two")[:times]:
        run = halfmoon("experiments", "hits", "--trace", trace_file, "--out", tmp_path / name)
        assert run.returncode == 0, run.stderr
        pages.append((tmp_path / name / "experiments.md").read_bytes())
    assert pages[0] == pages[-1]
    assert "| unbounded, conversation | 0.374 | 0.3736 | equal |" in pages[0].decode()
    assert "NOT RUN" in pages[0].decode()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["simulate", "--prefill", "0"], "--prefill 0: at least 1, or with --mixed none of either"),
        (
            ["simulate", "--mixed", "1", "--decode", "0"],
            "--decode 0: at least 1, or with --mixed none of either",
        ),
        (["simulate", "--mixed", "-1"], "--mixed -1: must not be negative"),
        (["simulate", "--token-budget", "-1"], "--token-budget -1: must not be negative"),
        (["simulate", "--mixed", "1", "--system", "vllm"], "--mixed: not with --system vllm"),
        (["simulate", "--speed", "-1"], "--speed -1"),
        (["simulate", "--profile", "x"], "profile x: there is llama3-70b-8xa800"),
        (["simulate", "--block-tokens", "100"], "cannot be cut into 100"),
        (["simulate", "--kv-blocks", "0"], "holds no block"),
        (["capacity", "--tbt-limits", "a"], "--tbt-limits a"),
        (["experiments", "nonsense"], "there is no nonsense"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_trace = [] if "--trace" in words else ["--trace", str(trace_file)]
    with pytest.raises(SystemExit) as end:
        main([*words, *with_trace])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_an_interrupted_simulation_marks_its_report(trace_file: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "trace.jsonl"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "halfmoon.cli.main", "simulate", "--trace", str(pipe), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with trace_file.open("rb") as packed, pipe.open("wb") as to_process:
        zstandard.ZstdDecompressor().copy_stream(packed, to_process)
    # The trace is read, and the whole of it takes some times as long.
    eventually_here(lambda: cpu_s(process.pid) >= 2, "the simulation has begun")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["complete"] is False
    assert report["requests"] < 12_031


@pytest.mark.slow
def test_interrupted_experiments_keep_what_is_whole_and_mark_the_rest(
    trace_file: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "halfmoon.cli.main",
            "experiments",
            "hits",
            "ttft",
            "--trace",
            str(trace_file),
            "--out",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "halfmoon halfmoon" not in process.stderr.readline():  # the first simulation of ttft
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=BOUND_S)
    assert process.returncode == 130
    assert not (tmp_path / "experiments" / "ttft.json").exists()
    page = (tmp_path / "experiments.md").read_text()
    assert "| unbounded, conversation |" in page
    assert "## ttft\n\nNOT RUN" in page


def test_without_a_checkout_the_clusters_of_halfmoon_are_simulated_and_nothing_of_the_papers(
    tmp_path: Path, trace_file: Path
) -> None:
    packages = sorted(link.name for link in (ROOT / ".links" / "halfmoon").iterdir())
    tree = copy_tree(tmp_path, ".links", *(f"{package}/*.py" for package in packages))

    def installed(*words: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(tree / ".links")}
        return subprocess.run(
            [sys.executable, "-m", "halfmoon.cli.main", *map(str, words)],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
        )

    run = installed("simulate", "--trace", trace_file, "--requests", 20, "--json")
    assert json.loads(run.stdout)["requests"] == 20
    other = installed("simulate", "--trace", trace_file, "--system", "vllm")
    assert (other.returncode, "--system" in other.stderr) == (2, True)
    missing = installed("experiments")
    assert (missing.returncode, "benchmarks/papers" in missing.stderr) == (1, True)
    with_one = installed("experiments", "hits")
    assert (with_one.returncode, "benchmarks/papers" in with_one.stderr) == (1, True)
