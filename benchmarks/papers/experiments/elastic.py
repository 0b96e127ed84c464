"""Roles that change by load: a load whose prompts and answers swing against each other, served by any split that stays
and by one that follows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from benchmarks.papers.experiments.runner import MS, Context, S, Section
from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.trace import Arrival, faster

WORKERS = 16
SLO = Objectives(ttft_ns=10 * S, tbt_ns=30 * MS)
#: The ratio of prompt to answer is tenfold in every other phase.
SWING = 10.0
PHASE_S = 120
PHASES = 4
#: Of what the workers could do if none of them ever had the wrong role.
OFFERED = 0.9
#: Natural logarithm's standard deviation of the lengths.
SPREAD = 0.5


class Swinging(msgspec.Struct, frozen=True, kw_only=True):
    """Mean tokens of prompts and answers in the middle of the swing, and how much of it is the prompts'."""

    name: str
    prompt: int
    answer: int
    #: 0: the answers swing alone; 1: the prompts do.
    prompts_share: float
    seed: int

    def means(self, phase: int) -> tuple[float, float]:
        half = math.sqrt(SWING) if phase % 2 == 0 else 1 / math.sqrt(SWING)
        return (
            self.prompt * half**self.prompts_share,
            self.answer / half ** (1 - self.prompts_share),
        )

    def arrivals(self, phases: int = PHASES) -> list[Arrival]:
        """Poisson, in each phase as many as ask for `OFFERED` of all workers together."""
        draw, made, at_s = random.Random(self.seed), list[Arrival](), 0.0
        for phase in range(phases):
            prompt, answer = self.means(phase)
            rate_s = OFFERED * WORKERS / sum(work_s(prompt, answer))
            end_s = PHASE_S * (phase + 1)
            while (at_s := at_s + draw.expovariate(rate_s)) < end_s:
                lengths = [
                    max(2, round(draw.lognormvariate(math.log(mean) - SPREAD * SPREAD / 2, SPREAD)))
                    for mean in (prompt, answer)
                ]
                made.append(Arrival(at_ns=int(at_s * S), prompt_tokens=lengths[0], output_tokens=lengths[1]))
            at_s = end_s
        return made


def work_s(prompt: float, answer: float) -> tuple[float, float]:
    """The time that a request of mean lengths takes of a prefill and of a decode worker that is full, in seconds."""
    cost, context = LLAMA3_A800.cost, prompt + answer / 2
    row_ns = cost.decode_per_sequence_ns + cost.decode_per_context_token_ps * context / 1e3
    batch = (SLO.tbt_ns - cost.decode_base_ns) / row_ns
    return cost.prefill_ns(int(prompt), 0) / 1e9, answer * SLO.tbt_ns / batch / 1e9


#: The planner's numbers were chosen on these.
CHOSEN_ON = (
    Swinging(name="answers swing, 9,000 : 400", prompt=9_000, answer=400, prompts_share=0.0, seed=1),
    Swinging(name="both swing, 12,000 : 400", prompt=12_000, answer=400, prompts_share=0.5, seed=2),
)
#: And not on these, nor on the synthetic trace.
SHOWN_ON = (
    Swinging(name="answers swing, 6,000 : 500", prompt=6_000, answer=500, prompts_share=0.0, seed=11),
    Swinging(name="both swing, 16,000 : 300", prompt=16_000, answer=300, prompts_share=0.5, seed=12),
    Swinging(name="prompts swing, 10,000 : 400", prompt=10_000, answer=400, prompts_share=1.0, seed=13),
)

#: Prefill workers of the splits that stay, of 16.
SPLITS = range(1, 16)
#: At least as good as the best of them, and so many times as good as the worst.
WORST_TIMES = 1.5
COLUMNS = [
    "",
    "load",
    "requests",
    "elastic",
    "held",
    "changes",
    "best split",
    "its goodput",
    "over best",
    "worst split",
    "its goodput",
    "over worst",
]
_OVER_BEST, _OVER_WORST = COLUMNS.index("over best"), COLUMNS.index("over worst")
#: How many times as fast the traces come.
SPEEDS = {"conversation": 3.0, "synthetic": 3.0}
TRACE_REQUESTS = 4_000


def swung(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """A trace whose answers are longer in every other phase and shorter in between, tenfold in all."""
    half, made = math.sqrt(SWING), []
    for arrival in faster(arrivals, speed):
        phase = arrival.at_ns // (PHASE_S * S)
        tokens = arrival.output_tokens * half if phase % 2 else arrival.output_tokens / half
        made.append(msgspec.structs.replace(arrival, output_tokens=max(1, round(tokens))))
    return made


def elastic(context: Context) -> Section:
    """Goodput of roles that follow the load, against every split that stays."""
    loads: list[tuple[str, str, Sequence[Arrival]]] = [
        *(("chosen on", load.name, load.arrivals()) for load in CHOSEN_ON),
        ("shown on", "conversation trace", swung(context.arrivals[:TRACE_REQUESTS], SPEEDS["conversation"])),
        *(("shown on", load.name, load.arrivals()) for load in SHOWN_ON),
        ("shown on", "synthetic trace", swung(context.drawn, SPEEDS["synthetic"])),
    ]
    rows = [_row(context, *load) for load in loads]
    return Section(
        title="Roles that change by load",
        setting=f"{WORKERS} workers; every {PHASE_S} s the ratio of prompt to answer changes tenfold; TTFT ≤ "
        f"{SLO.ttft_ns // S} s, TBT ≤ {SLO.tbt_ns // MS} ms, early rejection. Drawn loads ask in each phase for "
        f"{OFFERED:.0%} of what the workers could do if each had the right role; of the traces the answers swing, "
        f"{SPEEDS['conversation']:g} and {SPEEDS['synthetic']:g} times as fast. Goodput: requests a second that hold "
        f"both objectives, over the time in which they arrive. "
        f"Splits that stay: {SPLITS[0]} to {SPLITS[-1]} prefill workers. Elastic begins at 8 + 8, "
        f"changes one worker at a time, and knows nothing of the phases. Of the conversation trace the first "
        f"{TRACE_REQUESTS:,} requests.",
        columns=COLUMNS,
        rows=rows,
        why=[
            _verdict(rows),
            "Prompts that take longer than their objective also alone ask for no worker: no number of workers would "
            "serve them. Until they were left out, the planner took twice as many prefill workers as the "
            "conversation trace can use (0.87 of the best split), and decode lacked them in the next phase.",
            "The best split is known only afterwards.",
            "The numbers of the planner (window, how long a load must last, targets) were chosen on the first two "
            "loads; they are the defaults of `halfmoon up --elastic`.",
            "A decode worker that is to change must finish its answers first, which takes as long as an answer; a "
            "prefill worker its queue. In that time it takes nothing new. So a swing that is not much longer than an "
            "answer cannot be followed.",
        ],
    )


def _row(context: Context, chosen: str, name: str, arrivals: Sequence[Arrival]) -> list[str]:
    fixed = {split: _run(context, arrivals, split, elastic=False) for split in SPLITS}
    found = _run(context, arrivals, WORKERS // 2, elastic=True)
    # Each run ends with its last answer; a straggler that only one of them serves is no reason to call it slower.
    a_second = len(arrivals) / ((arrivals[-1].at_ns - arrivals[0].at_ns) / S)
    best = max(fixed, key=lambda split: fixed[split].service.effective_capacity)
    worst = min(fixed, key=lambda split: fixed[split].service.effective_capacity)
    held = found.service.effective_capacity
    cells = [
        chosen,
        name,
        f"{len(arrivals):,}",
        f"{held * a_second:.2f}",
        f"{held:.1%}",
        f"{found.role_changes}",
    ]
    for split in (best, worst):
        other = fixed[split].service.effective_capacity
        cells += [f"{split} + {WORKERS - split}", f"{other * a_second:.2f}", f"{held / other:.3f}"]
    return cells


def _verdict(rows: list[list[str]]) -> str:
    """The aim, and by how much each kind of load reaches it at least."""
    words = []
    for kind in ("drawn", "traces"):
        those = [row for row in rows if ("trace" in row[1]) == (kind == "traces")]
        best, worst = (min(float(row[column]) for row in those) for column in (_OVER_BEST, _OVER_WORST))
        words.append(
            f"{kind}: {best:.3f} of the best split and {worst:.2f} times the worst at least, "
            f"{'MET' if best >= 1 and worst >= WORST_TIMES else 'NOT MET'}"
        )
    return f"The aim: at least the best split, and {WORST_TIMES:g} times the worst. {'; '.join(words)}."


def _run(context: Context, arrivals: Sequence[Arrival], prefill: int, *, elastic: bool) -> SimulationReport:
    return context.run(
        "halfmoon",
        "predicted",
        cluster=ClusterShape(prefill=prefill, decode=WORKERS - prefill),
        slo=SLO,
        arrivals=arrivals,
        elastic=elastic,
    )
