"""What the canonical split of exact mode costs: decode steps and a prefill chunk of the built-in model, with attention
split into segments and with attention over the whole sequence, in turn, in one engine, on one thread.

Times are CPU time of the thread, which neighbours disturb less than the clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from clusters import finish, parsed, parser, spread

from halfmoon.workers.model.attention.choice import make_attention
from halfmoon.workers.model.attention.kernel import Attention
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import load_model

BLOCK_TOKENS, BLOCKS = 256, 72
DECODE = ((1, 500), (8, 500), (1, 2000), (8, 2000), (1, 4000), (4, 4000))
CHUNK_PAST = 3840


def cpu_ms(work: Callable[[], Any]) -> float:
    started = time.thread_time()
    work()
    return (time.thread_time() - started) * 1000


def cases(engine: Engine) -> dict[str, Callable[[], Any]]:
    """What is measured, by name."""
    table = list(range(BLOCKS))
    work: dict[str, Callable[[], Any]] = {
        f"prefill chunk of {BLOCK_TOKENS} after {CHUNK_PAST}": lambda: engine.prefill_chunk(
            [5] * BLOCK_TOKENS, CHUNK_PAST, table
        )
    }
    for batch, context in DECODE:
        need = context // BLOCK_TOKENS + 1
        tables = [table[i * need % (BLOCKS - need) :][:need] for i in range(batch)]
        work[f"decode step, batch {batch}, {context} tokens"] = partial(
            engine.decode, [5] * batch, [context] * batch, tables
        )
    return work


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=25)
    options.add_argument("--cases", type=int, default=1 + len(DECODE), help="only the first so many")
    args = parsed(options, rounds=2, cases=2)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = Engine(
            load_model("smollm2-135m-instruct", dtype=dtype),
            num_blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            exact=True,
        )
        engine.cache.k.normal_()  # KV that was never written reads falsely fast
        engine.cache.v.normal_()
        whole = make_attention("auto", engine.device, dtype, BLOCK_TOKENS, exact=True)
        kinds: dict[str, Attention] = {"split": engine.attention, "whole": whole}
        for name, measured in list(cases(engine).items())[: args.cases]:
            pairs: list[dict[str, float]] = []
            for _ in range(args.rounds):
                pair = {}
                for kind, attention in kinds.items():
                    engine.attention = attention
                    pair[kind] = cpu_ms(measured)
                pairs.append(pair)
            del pairs[0]  # both paths' first shapes
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "what": name,
                    "split_ms": spread([pair["split"] for pair in pairs]),
                    "whole_ms": spread([pair["whole"] for pair in pairs]),
                    "ratio": spread([pair["split"] / pair["whole"] for pair in pairs]),
                }
            )
    lines = [
        f"{row['dtype']:>9} {row['what']:<36} split {row['split_ms']['p50']:7.1f} ms, "
        f"whole {row['whole_ms']['p50']:7.1f} ms, ratio {row['ratio']['p50']:.3f} "
        f"({row['ratio']['min']:.2f} to {row['ratio']['max']:.2f})"
        for row in rows
    ]
    finish(args, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
