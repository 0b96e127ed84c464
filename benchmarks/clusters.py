"""What the benchmark programs share: a cluster of their own, what its processes take, percentiles, what was beside, and
results as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from halfmoon.bus.config import BusConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured import RESULTS, ROOT, SERVING, beside, keep

__all__ = [
    "PATIENT",
    "ROOT",
    "bus_config",
    "cluster",
    "cpu_by_process",
    "cpu_s",
    "family",
    "finish",
    "parsed",
    "parser",
    "pid_of",
    "python_in",
    "spread",
]

BRIEF = "as little as passes through all the code; the figures are not measurements"
#: With these options a slow machine refuses no request for its time.
PATIENT = ("--ttft-slo-ms", "200000", "--tbt-slo-ms", "100000")
#: Fields of /proc/PID/stat, counted from 0 behind the name: CPU time in ticks, its own and of children that have ended.
CPU_TICKS = slice(11, 15)
#: What ran in other processes than this.
_ran: set[str] = set()


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    kept = made.add_mutually_exclusive_group()
    kept.add_argument("--save", metavar="NAME", default="", help="also write results/NAME.json")
    kept.add_argument(
        "--brief", action="store_true", help="a check that all of it runs; its figures say nothing"
    )
    return made


def parsed(options: argparse.ArgumentParser, **brief: Any) -> argparse.Namespace:
    """The options of the command line. With `--brief` those of `brief` are the defaults, and the output says so.

    From now on SIGTERM is an exit as any other, by which a `cluster` ends too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args = options.parse_args()
    if args.brief:
        options.set_defaults(**brief)
        args = options.parse_args()
        print(f"--brief: {BRIEF}", file=sys.stderr if args.json else sys.stdout, flush=True)
    return args


def python_in(root: Path) -> str:
    """The interpreter that runs the code of a checkout: of another one, that of its own environment."""
    if root == ROOT:
        return sys.executable
    python = root / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{root} has no environment: `make env` there")
    return str(python)


@contextlib.contextmanager
def cluster(*flags: str, root: Path = ROOT) -> Iterator[dict[str, Any]]:
    """A cluster by `halfmoon up` of the checkout at `root`; its addresses ("nats", "http", "directory")."""
    name = f"bench-{uuid.uuid4().hex[:6]}"
    _ran.update(SERVING)
    with tempfile.TemporaryDirectory() as state:
        said = Path(state) / "said"
        with said.open("wb") as output:
            process = subprocess.Popen(
                [python_in(root), "-m", "halfmoon.cli.main", "up", "--cluster", name, *flags],
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "XDG_STATE_HOME": state},
                start_new_session=True,
            )
        directory = Path(state) / "halfmoon" / name
        try:
            deadline = time.monotonic() + 180
            while not (directory / "cluster.json").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the cluster did not start:\n{said.read_text()[-2000:]}")
                time.sleep(0.05)
            addresses = json.loads((directory / "cluster.json").read_text())
            yield {**addresses, "directory": str(directory), "pid": process.pid}
        finally:
            process.terminate()
            process.wait(60)


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    found = [pid]
    with contextlib.suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += family(child)
    return found


def cpu_by_process(pid: int) -> dict[str, float]:
    """Processor time in seconds of the process and of all that descend from it, processes of one name together."""
    ticks: dict[str, int] = {}
    for each in family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(") ")[2].split()
        name = process_name(command_of(each))
        ticks[name] = ticks.get(name, 0) + sum(map(int, fields[CPU_TICKS]))
    return {name: taken / os.sysconf("SC_CLK_TCK") for name, taken in ticks.items()}


def cpu_s(pid: int) -> float:
    """Processor time of the process and of all that descend from it."""
    return sum(cpu_by_process(pid).values())


def command_of(pid: int) -> list[str]:
    """The words that the process was started with."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")


def process_name(command: Sequence[str]) -> str:
    """What a process is called in a table: its `--id` without the number, else its module, else its program."""
    told = dict(itertools.pairwise(command))
    if "--id" in told:
        return re.sub(r"-\d+$", "", told["--id"])
    return told.get("-m") or Path(command[0]).name


def pid_of(up: int, name: str) -> int:
    """The process with that `--id` among those that descend from `up`."""
    for each in family(up):
        if ("--id", name) in itertools.pairwise(command_of(each)):
            return each
    raise SystemExit(f"no process of {name}")


def bus_config(addresses: dict[str, Any], name: str = "operator") -> BusConfig:
    """How the process `name` of a cluster reaches NATS."""
    return BusConfig(url=addresses["nats"], nkey_seed_file=f"{addresses['credentials']}/{name}.nk")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and percentiles."""
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {
        "n": len(ordered),
        "p50": round(statistics.median(ordered), 4),
        "p90": round(at(0.9), 4),
        "p99": round(at(0.99), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
    }


def finish(
    args: argparse.Namespace, result: dict[str, Any], lines: Sequence[str], *, also: Sequence[str] = ()
) -> None:
    """Print for a person or a program; save when asked. `also`: folders that ran in processes of the program's own."""
    result = {**result, "beside": beside(*_ran, *also)}
    if args.save:
        keep(RESULTS / f"{args.save}.json", result)
    print(json.dumps(result) if args.json else "\n".join(lines))
