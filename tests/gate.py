"""`python tests/gate.py [--load] [--runs N]`: `.ci/run --clone`, and a row of `results/gate.json` for each run.

A row has the commit, the seconds of each stage, pytest's closing line, its second runs and the largest stall of a test.
`--load`: beside the run two loops that compute, at equal priority, and a writer that fills and syncs 200 MB again and
again. Exit status 1 when a run was red; its row is kept too. A row is of its own commit, and is never older. The pages
of figures are made anew with it.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured import RESULTS, ROOT, beside, digests, keep
from halfmoon.bus.embedded import die_with_parent

KEPT = RESULTS / "gate.json"
STAGE = re.compile(r"^(\S+) +(\d+) s  (passed|skipped|FAILED[^=]*)(.*)$", re.MULTILINE)
BUSY = "while True: pass"
WRITER = """
import os, sys
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(200):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
"""


@contextlib.contextmanager
def load(wanted: bool) -> Iterator[None]:
    """Two cores' worth of computing and a disk's of writing, ended with the block."""
    with tempfile.TemporaryDirectory() as directory:
        programs = [[BUSY], [BUSY], [WRITER, f"{directory}/filled"]] if wanted else []
        running = [
            subprocess.Popen([sys.executable, "-c", *words], preexec_fn=die_with_parent) for words in programs
        ]
        try:
            yield
            ended = [process.returncode for process in running if process.poll() is not None]
            if ended:
                sys.exit(f"the load ended during the run: {ended}")
        finally:
            for process in running:
                process.kill()
                process.wait()


def row_of(output: str, now: Mapping[str, Any], *, green: bool, loaded: bool) -> dict[str, Any]:
    """From what `.ci/run` printed, and `beside()` after it."""
    stages = {name: (int(seconds), verdict.strip()) for name, seconds, verdict, _ in STAGE.findall(output)}
    closing = re.findall(r"^test +\d+ s  \S+.*?=+ (.*) =+$", output, re.MULTILINE)
    stalls = re.findall(r"^largest stall: (.*)$", output, re.MULTILINE)
    second_runs = re.findall(r"^(tests/\S+::.*)\n +at first: (.*)$", output, re.MULTILINE)
    return {
        "date": now["date"],
        "commit": now["commit"],
        "cpu": now["cpu"],
        "cores": now["cores"],
        "under_load": loaded,
        "green": green,
        "seconds": {name: seconds for name, (seconds, _) in stages.items()},
        "red": {name: verdict for name, (_, verdict) in stages.items() if verdict.startswith("FAILED")},
        "tests": closing[-1] if closing else "",
        "second_runs": [{"test": test, "why": why} for test, why in second_runs],
        "largest_stall": stalls[-1] if stalls else "",
        "load_average_after": now["load_average"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    green = True
    for _ in range(args.runs):
        judged = beside()["commit"]  # others may follow meanwhile
        with load(args.load):
            ran = subprocess.Popen([ROOT / ".ci/run", "--clone"], stdout=subprocess.PIPE, text=True)
            assert ran.stdout is not None
            lines = []
            for line in ran.stdout:
                lines.append(line)
                print(line, end="", flush=True)
            status = ran.wait()
        # Of the program alone: each row names the commit that was judged.
        now = {**beside(), "commit": judged, "modules": digests(["tests/gate.py"])}
        row = row_of("".join(lines), now, green=status == 0, loaded=args.load)
        green = green and row["green"]
        rows = orjson.loads(KEPT.read_bytes())["rows"] if KEPT.exists() else []
        keep(KEPT, {"rows": [*rows, row], "beside": now})
        # The pages that tell of results belong to the same commit as the row: one without the other is red.
        subprocess.run([sys.executable, ROOT / "benchmarks/figures.py"], check=True)
    sys.exit(0 if green else 1)


if __name__ == "__main__":
    main()
