"""How the time of a simulation grows with workers and with requests: a table; with `--save` also plots.

Copies of the conversation trace beside each other, as many as keep the load of each worker the same. CPU
time, not wall time, because other programs may run.

`--full` is a million requests to a thousand workers; else that row of the last time is kept.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from clusters import ROOT, finish, parsed, parser

from benchmarks.papers.plots import curves
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import copies, read_trace
from halfmoon.schemas.policy import Policy

#: Requests between two lines of progress.
TOLD_EVERY = 50_000


def measure(workers: int, requests: int) -> dict[str, Any]:
    """`workers` in all, half of each role; the load that the trace puts on 16."""
    trace = read_trace(ROOT / "benchmarks/traces/conversation_trace.jsonl.zst")
    beside = max(1, workers // 16)
    arrivals = copies(trace[: max(1, requests // beside)], requests, beside=beside)
    began, told = time.process_time(), 0

    def progress(arrived: int) -> None:
        nonlocal told
        if arrived // TOLD_EVERY > told:
            told = arrived // TOLD_EVERY
            print(
                f"{arrived} requests, {time.process_time() - began:.1f} s of CPU", file=sys.stderr, flush=True
            )

    cluster, policy = ClusterShape(prefill=workers // 2, decode=workers // 2), Policy(tbt_slo_ns=10**8)
    report = simulate(arrivals, cluster, policy, LLAMA3_A800, RunOptions(progress=progress))
    took = time.process_time() - began
    return {
        "workers": workers,
        "requests": report.endings.requests,
        "cpu_s": round(took, 2),
        "ms_a_request": round(took / report.endings.requests * 1e3, 3),
        "events": report.events,
        "token_reuse": report.service.token_reuse,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def kept(name: str) -> dict[str, Any] | None:
    """The row of a million requests in results/NAME.json."""
    path = ROOT / "results" / f"{name}.json"
    row: dict[str, Any] | None = json.loads(path.read_bytes()).get("full") if name and path.exists() else None
    return row


def plot(
    by_workers: list[dict[str, Any]], by_requests: list[dict[str, Any]], full: dict[str, Any] | None
) -> None:
    """Both curves, into results/experiments."""
    folder = Path(ROOT / "results" / "experiments")
    curves(
        folder / "scale_workers.png",
        {
            f"{by_workers[0]['requests']} requests": [
                (row["workers"], row["ms_a_request"]) for row in by_workers
            ]
        },
        xlabel="workers",
        ylabel="CPU ms a request",
        log_x=True,
        log_y=True,
    )
    curves(
        folder / "scale_requests.png",
        {
            "16 workers": [(row["requests"], row["cpu_s"]) for row in by_requests],
            "1,000 workers": [(row["requests"], row["cpu_s"]) for row in (by_workers[-1], full) if row],
        },
        xlabel="requests",
        ylabel="CPU s",
        log_x=True,
        log_y=True,
    )


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--workers", default="16,64,256,1000")
    options.add_argument("--requests", default="3000,12000,48000")
    options.add_argument("--requests-each", type=int, default=12000, help="for the growth with workers")
    options.add_argument("--full", action="store_true", help="also a million requests to a thousand workers")
    args = parsed(options, workers="16", requests="300", requests_each=300)
    by_workers = [measure(int(count), args.requests_each) for count in args.workers.split(",")]
    by_requests = [measure(16, int(count)) for count in args.requests.split(",")]
    full = measure(1000, 1_000_000) if args.full else kept(args.save)
    if args.save:
        plot(by_workers, by_requests, full)
    rows = by_workers + by_requests + ([full] if full else [])
    lines = [
        f"{row['workers']:5d} workers {row['requests']:8d} requests: {row['cpu_s']:8.1f} s, "
        f"{row['ms_a_request']:6.2f} ms a request"
        for row in rows
    ]
    finish(args, {"by_workers": by_workers, "by_requests": by_requests, "full": full}, lines)


if __name__ == "__main__":
    main()
