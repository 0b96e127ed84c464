"""What a test run started ends with it, also where pytest is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import guardian
from tests.cluster.harness import command_of
from tests.eventually import eventually_here, noted_where_late
from tests.guardian import SHM

ROOT = Path(__file__).parents[1]

#: A cluster in a process of its own, and an agent's segment in that of the test; then the test hangs.
HANGS = """
import signal
from pathlib import Path
from halfmoon.store.pool.segment import Geometry, Segment, segment_name
from tests.cluster.harness import running
from tests.guardian import cluster_name

def test_hangs(tmp_path):
    segment = Segment.create(segment_name(cluster_name(), "node"), Geometry(slots=2, layers=2, layer_block_bytes=4096))
    with running(tmp_path, "--engine", "null", "--prefill", "1", "--decode", "1") as cluster:
        named = Path({ready!r} + ".new")
        named.write_text(cluster.name)
        named.rename({ready!r})  # whoever sees the file sees the name in it
        signal.pause()
"""


def of_cluster(name: str) -> list[str]:
    """Processes and segments that bear its name."""
    processes = [" ".join(command_of(int(p.name))) for p in Path("/proc").iterdir() if p.name.isdigit()]
    return [line for line in processes if name in line] + [str(p) for p in SHM.glob(f"halfmoon-{name}*")]


def guardians() -> dict[str, int]:
    """Those of all runs: process by mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        words = command_of(int(entry.name)) if entry.name.isdigit() else []
        if words[3:4] == [guardian.__file__]:
            found[words[4]] = int(entry.name)
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="one process", marks=pytest.mark.slow),
        pytest.param(("-n", "1"), id="a process for tests"),
    ],
)
def test_pytest_is_killed_and_nothing_is_left_of_its_clusters(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    ready = tmp_path / "ready"
    (tmp_path / "test_inside.py").write_text(HANGS.format(ready=str(ready)))
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = realtime\ntimeout = 0\n")
    pytest_run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    eventually_here(lambda: ready.exists() or pytest_run.poll() is not None, "a cluster of the run inside")
    name = ready.read_text()
    mark = name[:-6]  # the run's, before what is the cluster's own
    assert [path.name for path in SHM.glob(f"halfmoon-{mark}*-node")]
    assert len(of_cluster(mark)) > 6
    own = guardians()[mark[1:]]
    if options:  # the guardian of the process for tests: that of the whole run needs no other
        os.kill(own, signal.SIGKILL)
    pytest_run.send_signal(signal.SIGKILL)
    pytest_run.wait()
    reports = guardian.report_of("*")
    with noted_where_late(
        lambda: (of_cluster(mark), guardians(), [p.read_text() for p in reports.parent.glob(reports.name)])
    ):
        eventually_here(lambda: not of_cluster(mark), "nothing with the run's name")
