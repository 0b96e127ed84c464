"""Decodes beside a chunk of a prompt, against decodes alone: fast numerics, the built-in model, on one thread.

In each round an iteration of the chunk, one of the decodes and one of both take turns. The marginal cost is what the
decodes add to the chunk, over what they cost alone; the gain is that of one iteration of both over one of each.

By CPU time of the one thread, which other programs disturb less than the clock.

Source: SARATHI (arXiv 2308.16369), table 2.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from clusters import finish, parsed, parser, spread

from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import load_model
from halfmoon.workers.model.prompt_rows import PromptRows

BLOCK_TOKENS = 256
#: Tokens of the chunk, sequences that decode, and the context of all of them.
SHAPES = ((64, 16, 256), (128, 16, 256), (128, 8, 256), (256, 16, 256), (512, 16, 512), (128, 16, 2_000))


class Bench:
    """A chunk at the end of a prompt, and sequences that decode, in one cache."""

    def __init__(self, engine: Engine, chunk: int, decodes: int, context: int) -> None:
        self._engine, self._decodes, self._context = engine, decodes, context
        blocks = -(-(context + 1) // BLOCK_TOKENS)
        self._tables = [engine.allocator.allocate(blocks) for _ in range(decodes + 1)]
        self._chunk = PromptRows(
            [(i * 7919) % 49000 for i in range(chunk)], context - chunk, self._tables[-1]
        )

    def ms(self, *, chunk: bool, decodes: bool) -> float:
        rows = self._decodes if decodes else 0
        started = time.thread_time()
        self._engine.mixed(
            [self._chunk] if chunk else [], [5] * rows, [self._context] * rows, self._tables[:rows]
        )
        return (time.thread_time() - started) * 1000

    def close(self) -> None:
        for table in self._tables:
            self._engine.allocator.free(table)


def measured(engine: Engine, chunk: int, decodes: int, context: int, rounds: int) -> dict[str, Any]:
    bench = Bench(engine, chunk, decodes, context)
    kinds = {
        "chunk": (True, False),
        "decodes": (False, True),
        "both": (True, True),
    }
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, (with_chunk, with_decodes) in kinds.items():
            ms = bench.ms(chunk=with_chunk, decodes=with_decodes)
            if turn:  # the first prepares the products for these shapes
                took[name].append(ms)
    bench.close()
    rounds_of = list(zip(took["chunk"], took["decodes"], took["both"], strict=True))
    return {
        "chunk": chunk,
        "decodes": decodes,
        "context": context,
        "ms": {name: round(statistics.median(found), 2) for name, found in took.items()},
        "marginal_over_alone": spread([(both - one) / other for one, other, both in rounds_of]),
        "gain": spread([(one + other) / both for one, other, both in rounds_of]),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    args = parsed(options, rounds=1, shapes=1)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model("smollm2-135m-instruct", dtype=dtype)
        engine = Engine(model, num_blocks=140, block_tokens=BLOCK_TOKENS, exact=False)
        engine.cache.k.normal_()  # KV that was never written reads falsely fast
        engine.cache.v.normal_()
        for chunk, decodes, context in SHAPES[: args.shapes]:
            row = {"dtype": str(dtype).removeprefix("torch.")}
            rows.append(row | measured(engine, chunk, decodes, context, args.rounds))
    lines = [
        f"{row['dtype']:>9} chunk {row['chunk']:3}, {row['decodes']:2} decodes, context {row['context']:4}: "
        f"ms {row['ms']}, marginal over alone {row['marginal_over_alone']['p50']:.2f}, gain {row['gain']['p50']:.2f} "
        f"({row['gain']['min']:.2f} to {row['gain']['max']:.2f})"
        for row in rows
    ]
    finish(args, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
