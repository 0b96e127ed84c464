"""What a test run started ends with it, however it ends: processes, and segments of shared memory.

`watch()` starts a second process beside a pytest process. It reads a pipe that the kernel closes when the pytest
process is gone, by SIGKILL too. Then it ends what is left of the run: every process that carries the run's mark in its
environment, which children inherit, and every segment that bears the mark in its cluster's name. A run that ends as it
should leaves nothing.

The file is a program too, and imports nothing of ours: `python guardian.py MARK`, with the pipe as its standard input.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: Marks of the run and of those around it (a run inside a test), separated by commas.
VARIABLE = "HALFMOON_TEST_RUN"
#: For a cluster that is told to end (SIGTERM): it drains, then it removes its segments. What remains is killed.
PATIENCE_S = 30.0
SHM = Path("/dev/shm")


def watch() -> subprocess.Popen[bytes]:
    """The guardian of this process, which keeps it for life: its pipe is in it. Children that start from now on carry
    a new mark.
    """
    around = os.environ.pop(VARIABLE, "")
    mark = secrets.token_hex(4)
    # It carries no mark: the guardian of a run around this one would end it before its work is done.
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark], stdin=subprocess.PIPE, start_new_session=True
    )
    os.environ[VARIABLE] = f"{around},{mark}" if around else mark
    return guardian


def cluster_name() -> str:
    """A new name, as short as a segment's name needs it. Its segments are told from those of other runs."""
    return f"t{os.environ.get(VARIABLE, '').rpartition(',')[2]}{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Process:
    """One of a run. `within`: marks of the runs inside that run that it is of."""

    parent: int
    within: tuple[str, ...]


def marked(mark: str) -> dict[int, Process]:
    """Processes of the run by their ids. Those that have ended and wait to be collected are not among them."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            own = next((v for v in variables if v.startswith(VARIABLE.encode() + b"=")), b"")
            marks = own.decode().partition("=")[2].split(",")
            if mark in marks:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found[int(entry.name)] = Process(parent, tuple(marks[marks.index(mark) + 1 :]))
    return found


def end(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def one_ends(pids: Iterable[int], within_s: float) -> bool:
    """Whether one of them ends in that time; one that has ended counts."""
    ends = select.poll()
    with contextlib.ExitStack() as opened:
        for pid in pids:
            try:
                process = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            opened.callback(os.close, process)
            ends.register(process, select.POLLIN)
        return bool(ends.poll(1000 * within_s))


def end_run(mark: str) -> None:
    """Returns when nothing of the run is left, nor of the runs inside it, whose guardians may have been killed."""
    runs, told = {mark}, set[int]()
    until = time.monotonic() + PATIENCE_S
    while left := marked(mark):
        runs.update(inner for process in left.values() for inner in process.within)
        # A cluster's first process ends the others in their order; a pytest process of the run ends its own clusters.
        first = {pid for pid, process in left.items() if process.parent not in left}
        end(first - told, signal.SIGTERM)
        told |= first
        if not one_ends(left, max(0.0, until - time.monotonic())):
            end(left, signal.SIGKILL)
            one_ends(left, 1.0)
    for run in runs:
        for segment in SHM.glob(f"halfmoon-t{run}*"):
            segment.unlink(missing_ok=True)


def report_of(mark: str) -> Path:
    """Where a guardian says why it could not do its work. A test run has taken away what it could write to."""
    return Path(tempfile.gettempdir()) / f"halfmoon-guardian-{mark}.txt"


if __name__ == "__main__":
    # Ctrl-C is for the run. The end of the pipe says that it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    try:
        end_run(sys.argv[1])
    except BaseException:
        report_of(sys.argv[1]).write_text(traceback.format_exc())
        raise
