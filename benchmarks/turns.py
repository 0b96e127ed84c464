"""Two checkouts measured by turns, in one run: is this code as fast as that of another commit?

    python benchmarks/turns.py --against ../older                 # all, three rounds
    python benchmarks/turns.py --against ../older --only replay   # one

The other checkout has an environment of its own (`make env` there). Each round runs the same benchmark program first
there and then here, each with its own checkout's code; the ratio is made round by round, so that a machine that
others use too slows both alike. Above 1: this checkout is the faster one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusters import ROOT, finish, parsed, parser

Read = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number in what a program prints. `read` finds it; a rate is better high, a time is better low."""

    name: str
    read: Read
    is_rate: bool


def _row(result: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = result["rows"][index]
    return found


PROGRAMS: dict[str, tuple[list[str], list[Figure]]] = {
    "replay": (
        [],
        [Figure(name="replay, events/s of CPU", read=lambda r: r["events_per_cpu_s_median"], is_rate=True)],
    ),
    "simulation_scale": (
        ["--workers", "64", "--requests", "3000", "--requests-each", "6000"],
        [
            Figure(
                name="simulation, 64 workers, ms of CPU a request",
                read=lambda r: r["by_workers"][0]["ms_a_request"],
                is_rate=False,
            )
        ],
    ),
    "control_plane": (
        ["--runs", "1", "--seconds", "5", "--cases", "1"],
        [
            Figure(
                name="control plane, ms to first token",
                read=lambda r: _row(r, 0)["first_token_p50_ms_at_1"],
                is_rate=False,
            ),
            Figure(
                name="control plane, requests/s at 32",
                read=lambda r: _row(r, 0)["requests_per_s_at_32"],
                is_rate=True,
            ),
        ],
    ),
    "transfer": (
        ["--rounds", "15"],
        [
            # Beside a socket in the same run: which contenders a checkout's program has makes either faster or slower.
            Figure(
                name="64 MiB over TCP, to a plain socket's speed",
                read=lambda r: r["tcp_get"]["mib_per_s"] / r["socket"]["mib_per_s"],
                is_rate=True,
            ),
            Figure(
                name="the same, CPU s of both ends a GiB",
                read=lambda r: r["tcp_get"]["cpu_s_per_gib"],
                is_rate=False,
            ),
            Figure(name="64 MiB in place, MiB/s", read=lambda r: r["client_get"]["mib_per_s"], is_rate=True),
            Figure(name="4 KiB over TCP, ms", read=lambda r: r["tcp_get_4kib"]["ms_median"], is_rate=False),
        ],
    ),
}


def measure(root: Path, program: str, *, brief: bool) -> dict[str, Any]:
    """What the program of the checkout at `root` prints as JSON."""
    python = root / ".venv" / "bin" / "python"
    interpreter = str(python) if python.exists() else sys.executable
    command = [interpreter, str(root / "benchmarks" / f"{program}.py"), "--json"]
    command += ["--brief"] if brief else PROGRAMS[program][0]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr[-2000:]}")
    printed: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return printed


def turns(against: Path, program: str, rounds: int, *, brief: bool) -> list[dict[str, Any]]:
    """A row for each figure of `program`: medians there and here, and the ratios of the rounds."""
    there, here = [], []
    for _ in range(rounds):
        there.append(measure(against, program, brief=brief))
        here.append(measure(ROOT, program, brief=brief))
    rows = []
    for figure in PROGRAMS[program][1]:
        old, new = [figure.read(one) for one in there], [figure.read(one) for one in here]
        ratios = [b / a if figure.is_rate else a / b for a, b in zip(old, new, strict=True)]
        rows.append(
            {
                "figure": figure.name,
                "there": round(statistics.median(old), 4),
                "here": round(statistics.median(new), 4),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
            }
        )
    return rows


def main() -> None:
    """Measure, print a table, and save it when asked."""
    made: argparse.ArgumentParser = parser(__doc__ or "")
    made.add_argument("--against", metavar="DIR", type=Path, help="the other checkout")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--only", nargs="*", choices=list(PROGRAMS), default=list(PROGRAMS))
    args = parsed(made, against=ROOT, rounds=1)
    if args.against is None:
        made.error("--against DIR is needed")
    against = args.against.resolve()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=against, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = [row for program in args.only for row in turns(against, program, args.rounds, brief=args.brief)]
    lines = [f"{'':46}{commit:>12}{'here':>12}   ratio (min to max of {args.rounds} rounds)"]
    lines += [
        f"{row['figure']:46}{row['there']:>12}{row['here']:>12}   "
        f"{row['ratio']} ({row['ratio_min']} to {row['ratio_max']})"
        for row in rows
    ]
    finish(args, {"against": commit, "rounds": args.rounds, "rows": rows}, lines)


if __name__ == "__main__":
    main()
