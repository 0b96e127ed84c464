"""Times between tokens while long prompts come, with stall-free batching and with whole prompts first; and whether the
token budget that a profile gives holds its objective. Fast numerics, the built-in model in f32, on one thread.

The batch former of mixed workers and the engine, without a cluster. Sequences decode all the time, each at its own
place; prompts come as a Poisson process and draw one token. Their clock is the CPU time of the one thread, which other
programs disturb less than any other clock: an iteration takes what it computes, and who arrives meanwhile waits for its
end. Iterations of decodes alone are not computed: each takes the median of those that were. The profile is measured by
the same clock, and gives the budget and the bound in time for each objective as a mixed worker does. An interval that
is longer than the objective by which the budget was chosen breaks it.

Sources: SARATHI (arXiv 2308.16369) and Sarathi-Serve (arXiv 2403.02310), sections 3 and 4.3.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from clusters import finish, parser, spread

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.numbers import MS_NS, SECOND_NS
from halfmoon.schemas.policy import Layout
from halfmoon.workers.batch_former import BatchFormer, Batching, BlockRoom, Iteration
from halfmoon.workers.cost_fit import DecodeTime, PrefillTime, fit_profile
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import load_model
from halfmoon.workers.model.prompt_rows import PromptRows
from halfmoon.workers.token_budget import TILE_ROWS, ProfileBound, largest_budget

BLOCK_TOKENS, DECODES, CONTEXT = 256, 4, 250
PROMPTS = (400, 800)
PROMPT_BLOCKS = -(-(PROMPTS[1] + 1) // BLOCK_TOKENS)
#: Prompts whose KV is there at once, at most; more wait.
PROMPTS_MAX = 2
#: Of the time in which one prompt comes, that it takes alone.
OFFERED = 0.5


class Bench:
    """An engine whose cache has sequences that decode, and room for prompts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        blocks = -(-(CONTEXT + 1) // BLOCK_TOKENS)
        self._decoding = [engine.allocator.allocate(blocks) for _ in range(DECODES)]
        self._free = [engine.allocator.allocate(PROMPT_BLOCKS) for _ in range(PROMPTS_MAX)]
        self._tables: dict[str, list[int]] = {}
        #: Of a step of all sequences, once the profile is measured.
        self.alone_ns = 0

    def compute(self, made: Iteration) -> int:
        """CPU time, ns. Sequences stay where they are: what is written is written again."""
        if not made.chunks:
            return self.alone_ns
        chunks = []
        for chunk in made.chunks:
            table = self._tables.get(chunk.name) or self._tables.setdefault(chunk.name, self._free.pop())
            tokens = [(place * 7919) % 49_000 for place in range(chunk.start, chunk.start + chunk.tokens)]
            chunks.append(PromptRows(tokens, chunk.start, table, want_logits=chunk.last))
        rows = len(made.decodes)
        began_ns = time.thread_time_ns()
        self.engine.mixed(chunks, [5] * rows, [CONTEXT] * rows, self._decoding[:rows])
        return time.thread_time_ns() - began_ns

    def over(self, name: str) -> None:
        self._free.append(self._tables.pop(name))

    def profile(self, rounds: int) -> CostProfile:
        """By the same clock: chunks at four places of a prompt, and steps of three batches."""
        prefills, decodes = [], []
        table = self._free[-1]
        for start, tokens in ((0, 64), (0, 256), (256, 64), (512, 256)):
            text = [7] * tokens
            took = [self._timed([PromptRows(text, start, table)], 0) for _ in range(rounds)]
            prefills.append(PrefillTime(start + tokens, start, int(statistics.median(took))))
        for rows in (1, DECODES // 2, DECODES):
            took = [self._timed([], rows) for _ in range(rounds)]
            self.alone_ns = int(statistics.median(took))
            decodes.append(DecodeTime(rows, rows * CONTEXT, self.alone_ns))
        return fit_profile(prefills, decodes)

    def _timed(self, chunks: list[PromptRows], rows: int) -> int:
        began_ns = time.thread_time_ns()
        self.engine.mixed(chunks, [5] * rows, [CONTEXT] * rows, self._decoding[:rows])
        return time.thread_time_ns() - began_ns


def served(
    bench: Bench, former: BatchFormer, prompts: list[tuple[int, int]]
) -> tuple[list[int], dict[str, list[int]]]:
    """Intervals between tokens of all sequences, and of prompts the first tokens; ns. `prompts`: (arrival, tokens)."""
    for number in range(DECODES):
        former.add(f"d{number}", 1)
    # They begin to decode.
    former.form()
    former.made()
    whole = former.batching is Batching.PREFILL_FIRST
    now_ns, waiting = 0, [(at_ns, f"p{number}", tokens) for number, (at_ns, tokens) in enumerate(prompts)]
    arrived = {name: at_ns for at_ns, name, _ in waiting}
    last_ns, between_ns, ttft_ns = {f"d{number}": 0 for number in range(DECODES)}, [], []
    #: Iterations whose chunks are as long as the budget lets them be, not the rest of a prompt.
    full_ns: list[int] = []
    open_prompts = len(waiting)
    while open_prompts:
        while waiting and waiting[0][0] <= now_ns:
            _, name, tokens = waiting.pop(0)
            former.add(name, tokens)
        made = former.form()
        step_ns = bench.compute(made)
        former.made()
        now_ns += step_ns
        if made.chunks and (whole or not any(chunk.last for chunk in made.chunks)):
            full_ns.append(step_ns)
        for name in made.decodes:
            between_ns.append(now_ns - last_ns[name])
            last_ns[name] = now_ns
        for chunk in made.chunks:
            if chunk.last:
                former.remove(chunk.name)
                bench.over(chunk.name)
                ttft_ns.append(now_ns - arrived[chunk.name])
                open_prompts -= 1
    return between_ns, {"ttft": ttft_ns, "full": full_ns, "all": [now_ns]}


def drawn(profile: CostProfile, count: int, seed: int) -> list[tuple[int, int]]:
    draw, at_ns, made = random.Random(seed), 0.0, []
    mean_ns = profile.prefill_ns(sum(PROMPTS) // 2, 0) / OFFERED
    for _ in range(count):
        at_ns += draw.expovariate(1 / mean_ns)
        made.append((int(at_ns), draw.randint(*PROMPTS)))
    return made


def measured(
    bench: Bench, profile: CostProfile, prompts: list[tuple[int, int]], *, slo_ns: int, batching: Batching
) -> dict[str, Any]:
    layout = Layout(
        model="-",
        model_fingerprint="-",
        layers=30,
        kv_heads=3,
        head_dim=64,
        block_tokens=BLOCK_TOKENS,
        dtype="float32",
        numerics="fast",
    )
    budget = largest_budget(
        layout,
        profile,
        iteration_ns=slo_ns,
        batch_max=DECODES,
        context_tokens=2 * DECODES * CONTEXT,
        chunk_tokens=PROMPTS[1],
    )
    bound = ProfileBound(profile, slo_ns, lambda names: profile.step_ns(len(names), len(names) * CONTEXT))
    stall_free = batching is Batching.STALL_FREE
    former = BatchFormer(
        BlockRoom(10_000, BLOCK_TOKENS),
        budget_tokens=budget if stall_free else PROMPTS[1],
        sequences_max=DECODES + PROMPTS_MAX,
        batching=batching,
        bound=bound if stall_free else None,
        chunk_min=TILE_ROWS,
    )
    between_ns, found = served(bench, former, prompts)
    ms = spread([one / MS_NS for one in between_ns])
    at_budget = statistics.median(found["full"]) / MS_NS
    seconds = found["all"][0] / SECOND_NS
    return {
        "batching": batching.value,
        "objective_ms": round(slo_ns / MS_NS, 1),
        "budget": budget if stall_free else 0,
        "between_ms": ms,
        "iteration_at_budget_ms": round(at_budget, 1),
        "p99_over_iteration": round(ms["p99"] / at_budget, 3),
        "p99_over_objective": round(ms["p99"] * MS_NS / slo_ns, 3),
        "broken": round(sum(one > slo_ns for one in between_ns) / len(between_ns), 4),
        "ttft_ms": spread([one / MS_NS for one in found["ttft"]]),
        "tokens_s": round((sum(tokens for _, tokens in prompts) + len(between_ns)) / seconds, 1),
    }


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{row['batching']:13} objective {row['objective_ms']:6.1f} ms, budget {row['budget']:4}: between tokens p50 "
        f"{row['between_ms']['p50']:.0f}, p99 {row['between_ms']['p99']:.0f}, most {row['between_ms']['max']:.0f} ms; "
        f"an iteration with a chunk {row['iteration_at_budget_ms']:.0f} ms, p99 over it "
        f"{row['p99_over_iteration']:.2f}; broken {row['broken']:.1%}; first token p50 {row['ttft_ms']['p50']:.0f} ms; "
        f"{row['tokens_s']:.0f} tokens/s"
        for row in rows
    ]
    whole = rows[-1]
    lines += [
        f"prefill first over stall-free at {row['objective_ms']:.0f} ms: p99 between tokens "
        f"{whole['between_ms']['p99'] / row['between_ms']['p99']:.1f} times, throughput of stall-free "
        f"{row['tokens_s'] / whole['tokens_s']:.3f}"
        for row in rows[:-1]
    ]
    return lines


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument("--rounds", type=int, default=3, help="of the profile")
    options.add_argument(
        "--objectives", type=float, nargs="+", default=[3.0, 8.0], help="times a step of the decodes"
    )
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    torch.set_num_threads(1)
    engine = Engine(
        load_model("smollm2-135m-instruct", dtype=torch.float32),
        num_blocks=64,
        block_tokens=BLOCK_TOKENS,
        exact=False,
    )
    engine.cache.k.normal_()  # KV that was never written reads falsely fast
    engine.cache.v.normal_()
    bench = Bench(engine)
    bench.profile(1)  # the first of each shape prepares its products
    profile = bench.profile(args.rounds)
    step_ns = profile.step_ns(DECODES, DECODES * CONTEXT)
    prompts = drawn(profile, args.prompts, args.seed)
    rows = [
        measured(bench, profile, prompts, slo_ns=int(times * step_ns), batching=Batching.STALL_FREE)
        for times in args.objectives
    ]
    slo_ns = int(args.objectives[0] * step_ns)
    rows.append(measured(bench, profile, prompts, slo_ns=slo_ns, batching=Batching.PREFILL_FIRST))
    finish(args, {"step_ms": round(step_ns / MS_NS, 1), "rows": rows}, lines_of(rows))


if __name__ == "__main__":
    main()
