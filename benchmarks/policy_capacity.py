"""Capacity of a simulated cluster under the papers' own rule, and under our policy: on the same fixed split, with
groups of prefill workers, with workers that change roles by load (`--elastic`), and of mixed workers; by workload.

Capacity is the highest speed of a workload at which 90 % of all requests, refused ones included, hold TTFT and TBT
(Mooncake, FAST'25, section 5.1). 8 prefill and 8 decode workers of one profile, or 16 mixed ones; all refuse by
prediction; computations differ from the profile by up to 5 %, drawn. The gain over the papers' rule, whose split is
fixed, is meaned over the seeds, which draw the workload (of the recorded conversations: which half). A search is of
one process; as many run side by side as there are cores.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any, NamedTuple

from clusters import finish, parsed, parser
from policies import PROFILE, WORKERS

from benchmarks.workloads import KINDS
from halfmoon.conductor.simulation.capacity import HELD_MIN, Runs
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import PROFILES
from halfmoon.conductor.simulation.report import Objectives
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.schemas.numbers import MS_NS, SECOND_NS
from halfmoon.schemas.policy import Policy

OBJECTIVES = Objectives(ttft_ns=30 * SECOND_NS, tbt_ns=100 * MS_NS)
THEIRS = "mooncake"
TWO_POOLS = ClusterShape(prefill=WORKERS, decode=WORKERS, block_tokens=512)
MIXED = ClusterShape(prefill=0, decode=0, mixed=2 * WORKERS, block_tokens=512)
#: The workers, and what differs from each other in a policy.
WAYS: dict[str, tuple[ClusterShape, dict[str, Any]]] = {
    THEIRS: (TWO_POOLS, {"name": "mooncake"}),
    "halfmoon": (TWO_POOLS, {}),
    "halfmoon, groups": (TWO_POOLS, {"prefill_group": 4}),
    "halfmoon, elastic": (TWO_POOLS, {"elastic": "on"}),
    "halfmoon, mixed": (MIXED, {}),
}
#: The speed that is looked at first.
STARTS = {"conversation": 4.0, "recorded agents": 8.0, "agents": 4.0, "bursts": 6.0}


class Search(NamedTuple):
    """One capacity; `requests` of 0 are all of the workload."""

    kind: str
    seed: int
    way: str
    requests: int
    precision: float


def capacity(search: Search) -> float:
    """The highest speed that holds."""
    arrivals = KINDS[search.kind](search.seed)[: search.requests or None]
    cluster, fields = WAYS[search.way]

    def at(speed: float) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        simulate(
            arrivals,
            cluster,
            Policy(
                admission="predicted",
                ttft_slo_ns=OBJECTIVES.ttft_ns,
                tbt_slo_ns=OBJECTIVES.tbt_ns,
                **fields,
            ).present(),
            PROFILES[PROFILE],
            RunOptions(speed=speed, slo=OBJECTIVES, noise_percent=5, seed=search.seed),
            outcomes=outcomes,
        )
        return outcomes

    return Runs(at).capacity(OBJECTIVES, start=STARTS[search.kind], precision=search.precision).speed


def gain(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """In percent, over all seeds."""
    each = [100 * (own / other - 1) for other, own in zip(theirs, ours, strict=True)]
    return {"mean": round(statistics.fmean(each), 1), "min": round(min(each), 1), "max": round(max(each), 1)}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--kinds", nargs="+", choices=[*STARTS], default=[*STARTS])
    options.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    options.add_argument("--requests", type=int, default=0, help="only the first so many of each workload")
    options.add_argument("--precision", type=float, default=0.02, help="of a capacity, as a share (0.02)")
    args = parsed(options, kinds=["agents"], seeds=[1], requests=1_000, precision=0.5)
    searches = [
        Search(kind, seed, way, args.requests, args.precision)
        for kind, seed, way in product(args.kinds, args.seeds, WAYS)
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(searches, pool.map(capacity, searches), strict=True))
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        speeds = {way: [found[one] for one in searches if (one.kind, one.way) == (kind, way)] for way in WAYS}
        gains = {way: gain(speeds[THEIRS], own) for way, own in speeds.items() if way != THEIRS}
        rows.append({"kind": kind, "speeds": speeds, "gain_percent": gains})
    result = {
        "profile": PROFILE,
        "workers": [WORKERS, WORKERS],
        "held_min": HELD_MIN,
        "ttft_ms": OBJECTIVES.ttft_ns // MS_NS,
        "tbt_ms": OBJECTIVES.tbt_ns // MS_NS,
        "seeds": args.seeds,
        "rows": rows,
    }
    finish(
        args,
        result,
        [
            f"{row['kind']:16} {way:18} {one['mean']:+.1f} % ({one['min']:+.1f} to {one['max']:+.1f}): "
            f"{', '.join(map(str, row['speeds'][way]))}; {THEIRS} {', '.join(map(str, row['speeds'][THEIRS]))}"
            for row in rows
            for way, one in row["gain_percent"].items()
        ],
    )


if __name__ == "__main__":
    main()
