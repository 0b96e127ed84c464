"""What the benchmark programs share: a cluster of their own, percentiles, what was beside, and results as
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
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

ROOT = Path(__file__).resolve().parents[1]


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    made.add_argument("--save", metavar="NAME", default="", help="also write results/NAME.json")
    return made


@contextlib.contextmanager
def cluster(*flags: str) -> Iterator[dict[str, Any]]:
    """A cluster by `halfmoon up`; its addresses ("nats", "http", "directory")."""
    name = f"bench-{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryDirectory() as state:
        process = subprocess.Popen(
            [sys.executable, "-m", "halfmoon.cli.main", "up", "--cluster", name, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_STATE_HOME": state},
            start_new_session=True,
        )
        directory = Path(state) / "halfmoon" / name
        try:
            deadline = time.monotonic() + 180
            while not (directory / "cluster.json").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the cluster did not start")
                time.sleep(0.05)
            addresses = json.loads((directory / "cluster.json").read_text())
            yield {**addresses, "directory": str(directory), "pid": process.pid}
        finally:
            process.terminate()
            process.wait(60)


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


def beside() -> dict[str, Any]:
    """The machine, the day, and what else ran."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def finish(args: argparse.Namespace, result: dict[str, Any], lines: Sequence[str]) -> None:
    """Print for a person or a program; save when asked."""
    result = {**result, "beside": beside()}
    if args.save:
        (ROOT / "results").mkdir(exist_ok=True)
        (ROOT / "results" / f"{args.save}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if args.json else "\n".join(lines))
