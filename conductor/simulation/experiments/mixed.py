"""Mixed workers against pools of their own, as many workers each, and the conductor's choice where there are both."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from halfmoon.conductor.simulation.cluster_shape import ClusterShape
from halfmoon.conductor.simulation.experiments.runner import MS, Context, S, Section
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.trace import Arrival, faster

SLO = Objectives(ttft_ns=10 * S, tbt_ns=200 * MS)
WORKERS = 4
#: Of what four workers could do if each did what there is to do.
LOADS = (0.3, 0.6, 0.9, 1.2)
REQUESTS = 600
#: Natural logarithm's standard deviation of the lengths.
SPREAD = 0.5
#: Mean tokens of prompts and answers.
SHORT, LONG = (800, 200), (12_000, 300)
#: A decode step whose batch is taken as full where the load is reckoned.
FULL_STEP_NS = 40 * MS
TRACE_REQUESTS = 1_000
SPEEDS = (0.25, 0.5, 1.0)
MIXED = ClusterShape(prefill=0, decode=0, mixed=WORKERS)
EVEN = ClusterShape(prefill=WORKERS // 2, decode=WORKERS // 2)
SPLITS = [ClusterShape(prefill=prefill, decode=WORKERS - prefill) for prefill in range(1, WORKERS)]
BOTH = ClusterShape(prefill=1, decode=1, mixed=WORKERS - 2)
#: The conductor's choice reaches so much of the better of the two.
WITHIN = 0.9
COLUMNS = [
    "requests",
    "load",
    *(
        f"{name}: {part}"
        for name in ("2 + 2", "4 mixed", "choice")
        for part in ("held", "p90 TTFT s", "p90 TBT ms")
    ),
    "mixed chosen for",
    "choice over the better",
    "best split",
    "its held",
]
_OVER = COLUMNS.index("choice over the better")


def arrivals_of(prompt: int, answer: int, load: float, seed: int) -> list[Arrival]:
    """Poisson; they ask for `load` of `WORKERS` workers with a full batch each."""
    cost = LLAMA3_A800.cost
    row_ns = cost.decode_per_sequence_ns + cost.decode_per_context_token_ps * (prompt + answer / 2) / 1e3
    batch = (FULL_STEP_NS - cost.decode_base_ns) / row_ns
    work_s = cost.prefill_ns(prompt, 0) / 1e9 + answer * FULL_STEP_NS / batch / 1e9
    draw, at_s, made = random.Random(seed), 0.0, list[Arrival]()
    for _ in range(REQUESTS):
        at_s += draw.expovariate(load * WORKERS / work_s)
        lengths = [
            max(2, round(draw.lognormvariate(math.log(mean) - SPREAD * SPREAD / 2, SPREAD)))
            for mean in (prompt, answer)
        ]
        made.append(Arrival(at_ns=int(at_s * S), prompt_tokens=lengths[0], output_tokens=lengths[1]))
    return made


def mixed(context: Context) -> Section:
    """Objectives held by load, for short and long prompts."""
    loads: list[tuple[str, str, Sequence[Arrival]]] = [
        (name, f"{load:g}", arrivals_of(*lengths, load, seed))
        for name, lengths, seed in (("short", SHORT, 7), ("long", LONG, 8))
        for load in LOADS
    ]
    trace = context.arrivals[:TRACE_REQUESTS]
    loads += [("conversation", f"speed {speed:g}", faster(trace, speed)) for speed in SPEEDS]
    rows = [_row(context, *load) for load in loads]
    least = min(float(row[_OVER]) for row in rows)
    return Section(
        title="Mixed workers against prefill and decode workers",
        setting=f"{WORKERS} workers of {LLAMA3_A800.name}; TTFT ≤ {SLO.ttft_ns // S} s, TBT ≤ {SLO.tbt_ns // MS} ms, "
        f"early rejection. Lengths are log-normal around {SHORT[0]:,} : {SHORT[1]} and {LONG[0]:,} : {LONG[1]} tokens, "
        f"{REQUESTS} requests each; of the conversation trace the first {TRACE_REQUESTS:,}. Choice: {BOTH.workers} "
        f"workers, of which the conductor takes, for each request, a pair or a mixed one by predicted first token, "
        f"then time between tokens. Held: the share of requests that held both objectives.",
        columns=COLUMNS,
        rows=rows,
        why=[
            f"The aim: the choice within {1 - WITHIN:.0%} of the better of 2 + 2 and 4 mixed at every load. At least "
            f"{least:.3f} of it, {'MET' if least >= WITHIN else 'NOT MET'}. The best of all splits is known only "
            f"afterwards.",
            "Mixed workers lend their whole machine to whatever there is to do, so no pool is idle while the other "
            "queues: that is why they have the earlier first tokens where a split does not fit the load. Their times "
            "between tokens are those of iterations with chunks, near the objective that the token budget is chosen "
            "for; a decode worker of its own never waits for a prompt.",
            "Where the choice is behind four mixed workers, it is because two of its four are not mixed: under long "
            "prompts its decode worker has time that nobody can use for prompts.",
            "Chunks are shortened so that an iteration takes no longer than the objective by the profile. With a fixed "
            "number of tokens, chosen for the middle of a prompt, iterations at the end of long ones took longer: at "
            "speed 1 of the conversation trace four mixed workers then held 34.5% instead of 92.3%, and the choice "
            "46.1%.",
        ],
    )


def _row(context: Context, name: str, load: str, arrivals: Sequence[Arrival]) -> list[str]:
    chosen: dict[str, Outcome] = {}
    even, alone = (_run(context, arrivals, shape) for shape in (EVEN, MIXED))
    both = _run(context, arrivals, BOTH, chosen)
    splits = {
        str(shape.workers): even if shape == EVEN else _run(context, arrivals, shape) for shape in SPLITS
    }
    best = max(splits, key=lambda split: splits[split].effective_capacity)
    placed = [one.prefill_id for one in chosen.values() if one.prefill_id]
    cells = [name, load]
    for report in (even, alone, both):
        cells += [
            f"{report.effective_capacity:.1%}",
            f"{report.ttft_ms.p90 / 1e3:.2f}",
            f"{report.tbt_ms.p90:.0f}",
        ]
    better = max(even.effective_capacity, alone.effective_capacity)
    return [
        *cells,
        f"{sum(one.startswith('mixed') for one in placed) / len(placed):.0%}",
        f"{both.effective_capacity / better:.3f}",
        best,
        f"{splits[best].effective_capacity:.1%}",
    ]


def _run(
    context: Context,
    arrivals: Sequence[Arrival],
    cluster: ClusterShape,
    outcomes: dict[str, Outcome] | None = None,
) -> SimulationReport:
    return context.run(
        "halfmoon", "predicted", cluster=cluster, slo=SLO, arrivals=arrivals, outcomes=outcomes
    )
