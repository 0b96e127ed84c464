"""What the benchmark programs share: a cluster of their own, percentiles, what was beside, and results as
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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

__all__ = ["ROOT", "bus_config", "cluster", "finish", "parsed", "parser", "spread"]

BRIEF = "as little as passes through all the code; the figures are not measurements"
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


@contextlib.contextmanager
def cluster(*flags: str) -> Iterator[dict[str, Any]]:
    """A cluster by `halfmoon up`; its addresses ("nats", "http", "directory")."""
    name = f"bench-{uuid.uuid4().hex[:6]}"
    _ran.update(SERVING)
    with tempfile.TemporaryDirectory() as state:
        said = Path(state) / "said"
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "halfmoon.cli.main", "up", "--cluster", name, *flags],
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


def finish(args: argparse.Namespace, result: dict[str, Any], lines: Sequence[str]) -> None:
    """Print for a person or a program; save when asked."""
    result = {**result, "beside": beside(*_ran)}
    if args.save:
        keep(RESULTS / f"{args.save}.json", result)
    print(json.dumps(result) if args.json else "\n".join(lines))
