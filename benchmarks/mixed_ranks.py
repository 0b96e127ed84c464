"""What is least at the mixed worker that is taken (`Policy.mixed_rank`): the first token, or the answer and the work.

4 mixed workers of one profile, nothing refused, simulated. A row is a kind of workload at a speed, meaned over the
seeds, which draw it. Times are ms; `ratio` is by answer and work over by first token.

The rule was tuned on chat, agents, documents and bursts; the other kinds are those that it is shown on.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from typing import Any, NamedTuple, get_args

import msgspec
from clusters import finish, parsed, parser

from benchmarks.workloads import KINDS
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import PROFILES
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.policy import MixedRank, Policy

TUNED_ON = ("chat", "agents", "documents", "bursts")
SPEEDS = (0.5, 1.0, 1.5)
PROFILE = "llama3-70b-8xa800"
WORKERS, TOKEN_BUDGET = 4, 2048


class Run(NamedTuple):
    """One simulation of the first `requests` of a workload."""

    kind: str
    speed: float
    seed: int
    rank: MixedRank
    requests: int
    policy: str


class Measured(NamedTuple):
    """Times are ms, of the mean request but for `p90`."""

    ttft: float
    p90: float
    tpot: float
    answer: float
    reuse: float
    #: Share of the prompts' tokens that the busiest worker got.
    busiest: float


@cache
def _arrivals(kind: str, seed: int) -> list[Arrival]:
    return KINDS[kind](seed)


def measure(run: Run) -> Measured:
    outcomes: dict[str, Outcome] = {}
    policy = Policy(name=run.policy, admission="none").present()
    report = simulate(
        _arrivals(run.kind, run.seed)[: run.requests],
        ClusterShape(prefill=0, decode=0, mixed=WORKERS, token_budget=TOKEN_BUDGET),
        msgspec.structs.replace(policy, mixed_rank=run.rank),
        PROFILES[PROFILE],
        RunOptions(speed=run.speed),
        outcomes=outcomes,
    )
    tokens = dict.fromkeys((one.prefill_id for one in outcomes.values()), 0)
    for one in outcomes.values():
        tokens[one.prefill_id] += one.prompt_tokens
    return Measured(
        report.service.ttft_ms.mean,
        report.service.ttft_ms.p90,
        statistics.fmean(
            (one.ended_ns - one.first_token_ns) / 1e6 / (one.output_tokens - 1)
            for one in outcomes.values()
            if one.output_tokens > 1
        ),
        statistics.fmean((one.ended_ns - one.arrived_ns) / 1e6 for one in outcomes.values()),
        report.service.token_reuse,
        max(tokens.values()) / sum(tokens.values()),
    )


def rows(runs: list[Run], measured: list[Measured]) -> Iterator[dict[str, Any]]:
    """One for each kind and speed, in the order of the runs."""
    found: dict[tuple[str, float], dict[str, list[Measured]]] = {}
    for run, one in zip(runs, measured, strict=True):
        found.setdefault((run.kind, run.speed), {}).setdefault(run.rank, []).append(one)
    for (kind, speed), ranks in found.items():
        means = {
            rank: {
                figure: statistics.fmean(getattr(one, figure) for one in some) for figure in Measured._fields
            }
            for rank, some in ranks.items()
        }
        old, new = means["first_token"], means["answer_and_work"]
        yield {
            "kind": kind,
            "speed": speed,
            "tuned_on": kind in TUNED_ON,
            **{rank: {name: round(value, 3) for name, value in each.items()} for rank, each in means.items()},
            "ratio": {name: round(new[name] / old[name], 3) for name in ("ttft", "p90", "tpot", "answer")},
        }


def summary(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The geometric mean of the ratios, and the largest one, over the kinds it was tuned on, and over the others."""
    summed = {}
    for name, tuned in (("tuned_on", True), ("shown_on", False)):
        ratios = [row["ratio"] for row in found if row["tuned_on"] is tuned]
        if ratios:
            summed[name] = {
                figure: round(statistics.geometric_mean(one[figure] for one in ratios), 3)
                for figure in ratios[0]
            } | {"worst_ttft": max(one["ttft"] for one in ratios)}
    return summed


def _line(row: dict[str, Any]) -> str:
    ratios = "  ".join(f"{name} {value:.3f}" for name, value in row["ratio"].items())
    old, new = row["first_token"], row["answer_and_work"]
    return (
        f"{row['kind']:16} {row['speed']:3g}  TTFT {old['ttft']:.0f} -> {new['ttft']:.0f} ms  {ratios}  "
        f"busiest {old['busiest']:.0%} -> {new['busiest']:.0%}"
    )


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    options.add_argument("--speeds", nargs="+", type=float, default=[*SPEEDS])
    options.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    options.add_argument("--requests", type=int, default=400, help="only the first so many of each workload")
    options.add_argument(
        "--policy",
        default="local_cache_aware",
        help="name of the policy; an engine that computes what it lacks has this one",
    )
    args = parsed(options, kinds=["chat", "templates"], speeds=[1.0], seeds=[1], requests=100)
    runs = [
        Run(kind, speed, seed, rank, args.requests, args.policy)
        for kind, speed, seed, rank in product(args.kinds, args.speeds, args.seeds, get_args(MixedRank))
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        measured = list(pool.map(measure, runs))
    found = list(rows(runs, measured))
    summed = summary(found)
    result = {
        "policy": args.policy,
        "profile": PROFILE,
        "workers": WORKERS,
        "token_budget": TOKEN_BUDGET,
        "requests": args.requests,
        "seeds": args.seeds,
        "summary": summed,
        "rows": found,
    }
    finish(args, result, [*map(_line, found), *(f"{name}: {each}" for name, each in summed.items())])


if __name__ == "__main__":
    main()
