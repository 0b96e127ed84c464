"""Policies compared in the simulator: kinds of workloads, each at several speeds, under every policy.

8 prefill and 8 decode workers of one profile, or `--mixed` workers that do both; nothing refused. A cell of the table
is a kind at a speed: of each policy TTFT, mean and p90, and the time of a whole answer, meaned over the seeds, which
draw the workload. `behind` is how far the policy in question is behind the best of the others, in percent (negative:
ahead). Where there are prefill workers it runs a second time with groups of them, which no other policy has: `ahead` is
how far it is ahead of each other one, alone and in groups, by kind, in the mean over the speeds.

In a closed loop a turn of a session waits for the answer before it: only kinds with sessions are run.

A run is of one process; as many run side by side as there are cores, which changes no figure.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from typing import Any, NamedTuple, get_args

from clusters import finish, parsed, parser

from benchmarks.workloads import KINDS, SESSIONS_KINDS
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import PROFILES
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.numbers import MS_NS
from halfmoon.schemas.policy import Policy, PolicyName

RIVALS: tuple[PolicyName, ...] = ("mooncake", "lmetric", "dynamo", "sticky")
SPEEDS = (0.5, 1.0, 2.0, 3.0)
PROFILE = "llama3-70b-8xa800"
WORKERS = 8


class Run(NamedTuple):
    """One simulation; `requests` of 0 are all of the workload."""

    kind: str
    speed: float
    seed: int
    policy: PolicyName
    group: int
    requests: int
    closed_loop: bool
    mixed: int


def title(policy: str, group: int) -> str:
    return policy if group == 1 else f"{policy} in groups"


def own_titles(policy: str) -> tuple[str, str]:
    return title(policy, 1), title(policy, WORKERS)


class Measured(NamedTuple):
    """What a run took: TTFT and the whole answer's time in ms, the share of time that prefill workers computed, tokens
    reused.
    """

    mean: float
    p90: float
    answer: float
    busy: float
    reuse: float


@cache
def _arrivals(kind: str, seed: int) -> list[Arrival]:
    return KINDS[kind](seed)


def measure(run: Run) -> Measured:
    arrivals = _arrivals(run.kind, run.seed)
    pool = 0 if run.mixed else WORKERS
    outcomes: dict[str, Outcome] = {}
    report = simulate(
        arrivals[: run.requests] if run.requests else arrivals,
        ClusterShape(prefill=pool, decode=pool, mixed=run.mixed, block_tokens=512),
        Policy(name=run.policy, admission="none", prefill_group=run.group).present(),
        PROFILES[PROFILE],
        RunOptions(speed=run.speed, closed_loop=run.closed_loop),
        outcomes=outcomes,
    )
    return Measured(
        report.service.ttft_ms.mean,
        report.service.ttft_ms.p90,
        statistics.fmean((one.ended_ns - one.arrived_ns) / MS_NS for one in outcomes.values()),
        report.devices.prefill_busy,
        report.service.token_reuse,
    )


def cells(runs: Sequence[Run], measured: Sequence[Measured], ours: PolicyName) -> Iterator[dict[str, Any]]:
    """A row for each kind and speed, in the order of the runs."""
    found: dict[tuple[str, float], dict[str, list[Measured]]] = {}
    for run, one in zip(runs, measured, strict=True):
        found.setdefault((run.kind, run.speed), {}).setdefault(title(run.policy, run.group), []).append(one)
    for (kind, speed), policies in found.items():
        mean = {name: statistics.fmean(one.mean for one in some) for name, some in policies.items()}
        p90 = {name: statistics.fmean(one.p90 for one in some) for name, some in policies.items()}
        answer = {name: statistics.fmean(one.answer for one in some) for name, some in policies.items()}
        yield {
            "kind": kind,
            "speed": speed,
            "busy": round(statistics.fmean(one.busy for one in policies[ours]), 3),
            "mean_ms": {name: round(value, 1) for name, value in mean.items()},
            "p90_ms": {name: round(value, 1) for name, value in p90.items()},
            "answer_ms": {name: round(value, 1) for name, value in answer.items()},
            "behind_mean_percent": _behind(mean, ours),
            "behind_p90_percent": _behind(p90, ours),
            "behind_answer_percent": _behind(answer, ours),
        }


def _behind(values: dict[str, float], ours: str) -> float:
    best = min(value for name, value in values.items() if name not in own_titles(ours))
    return round((values[ours] / best - 1) * 100, 1)


def worst(rows: Sequence[dict[str, Any]], measure: str) -> dict[str, Any]:
    """The cell in which the policy in question is furthest behind."""
    row = max(rows, key=lambda row: row[measure])
    return {"kind": row["kind"], "speed": row["speed"], "percent": row[measure]}


def ahead(rows: Sequence[dict[str, Any]], ours: str) -> dict[str, dict[str, dict[str, float]]]:
    """Kind, how the policy in question ran, other policy: by how many percent its mean TTFT is shorter."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        means = [row["mean_ms"] for row in rows if row["kind"] == kind]
        own = [name for name in means[0] if name in own_titles(ours)]
        found[kind] = {
            name: {
                other: round(statistics.fmean(1 - one[name] / one[other] for one in means) * 100, 1)
                for other in means[0]
                if other not in own
            }
            for name in own
        }
    return found


def _line(row: dict[str, Any]) -> str:
    figures = "  ".join(
        f"{name} {row['mean_ms'][name]:.0f}/{row['p90_ms'][name]:.0f}/{row['answer_ms'][name]:.0f}"
        for name in row["mean_ms"]
    )
    return (
        f"{row['kind']:16} {row['speed']:3g}  busy {row['busy']:.0%}  {figures}  "
        f"behind {row['behind_mean_percent']:+.1f} %/{row['behind_p90_percent']:+.1f} %/"
        f"{row['behind_answer_percent']:+.1f} %"
    )


def _summary(result: dict[str, Any]) -> Iterator[str]:
    for which in ("worst_mean", "worst_p90", "worst_answer"):
        cell = result[which]
        yield f"{which}: {cell['kind']} at {cell['speed']:g}, behind {cell['percent']:+.1f} %"
    for kind, ways in result["ahead_percent"].items():
        for name, others in ways.items():
            figures = ", ".join(f"{other} {percent:.1f} %" for other, percent in others.items())
            yield f"{kind}: {name} ahead of {figures}"


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    options.add_argument("--speeds", nargs="+", type=float, default=[*SPEEDS])
    options.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    options.add_argument(
        "--policy", choices=get_args(PolicyName), default="halfmoon", help="the one in question"
    )
    options.add_argument("--rivals", nargs="+", choices=get_args(PolicyName), default=[*RIVALS])
    options.add_argument(
        "--prefill-group",
        type=int,
        default=WORKERS,
        help="of the policy in question, the second time; 1: once",
    )
    options.add_argument(
        "--mixed", type=int, default=0, metavar="N", help="so many mixed workers instead of two pools"
    )
    options.add_argument("--requests", type=int, default=0, help="only the first so many of each workload")
    options.add_argument("--closed-loop", action="store_true", help="turns wait for the answers before them")
    args = parsed(options, kinds=["chat", "agents"], speeds=[1.0], seeds=[1], requests=200)
    if args.closed_loop:
        args.kinds = [kind for kind in args.kinds if kind in SESSIONS_KINDS]
    rivals = [name for name in args.rivals if name != args.policy]
    ways = [(args.policy, 1), *((name, 1) for name in rivals)]
    if args.mixed:
        args.prefill_group = 1
    if args.prefill_group > 1:
        ways.append((args.policy, args.prefill_group))
    runs = [
        Run(
            kind,
            speed,
            seed,
            name,
            group,
            args.requests,
            args.closed_loop,
            args.mixed,
        )
        for kind, seed, speed, (name, group) in product(args.kinds, args.seeds, args.speeds, ways)
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        measured = list(pool.map(measure, runs, chunksize=len(ways)))
    rows = list(cells(runs, measured, args.policy))
    result = {
        "policy": args.policy,
        "prefill_group": args.prefill_group,
        "closed_loop": args.closed_loop,
        "profile": PROFILE,
        "workers": [args.mixed] if args.mixed else [WORKERS, WORKERS],
        "seeds": args.seeds,
        "worst_mean": worst(rows, "behind_mean_percent"),
        "worst_p90": worst(rows, "behind_p90_percent"),
        "worst_answer": worst(rows, "behind_answer_percent"),
        "ahead_percent": ahead(rows, args.policy),
        "rows": rows,
    }
    finish(args, result, [*(_line(row) for row in rows), *_summary(result)])


if __name__ == "__main__":
    main()
