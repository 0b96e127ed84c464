"""What exact numerics cost: prefill, decode and mixed iterations of the built-in model, exact against fast, in turn, on
one thread. Beside them, decode whose products have whole groups of rows, as where no smaller number is seen to change
no bit.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from clusters import finish, parsed, parser, spread

from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import load_model
from halfmoon.workers.model.prompt_rows import PromptRows
from halfmoon.workers.model.self_test import trial_of
from halfmoon.workers.model.transformer import Transformer

BLOCK_TOKENS, PROMPT_TOKENS, CONTEXT_TOKENS, CHUNK_TOKENS = 256, 2048, 1000, 1024


def prefill_ms(engine: Engine, tokens: int) -> float:
    table = engine.allocator.allocate(tokens // BLOCK_TOKENS)
    step = min(CHUNK_TOKENS, tokens)
    ids = [(i * 7919) % 49000 for i in range(tokens)]
    started = time.perf_counter()
    for at in range(0, tokens, step):
        engine.prefill_chunk(ids[at : at + step], at, table, want_logits=at + step == tokens)
    took = time.perf_counter() - started
    engine.allocator.free(table)
    return took * 1000


def decode_ms(engine: Engine, batch: int, steps: int) -> float:
    """Mean of `steps` steps."""
    blocks = (CONTEXT_TOKENS + steps) // BLOCK_TOKENS + 1
    tables = [engine.allocator.allocate(blocks) for _ in range(batch)]
    started = time.perf_counter()
    for step in range(steps):
        engine.decode([5] * batch, [CONTEXT_TOKENS + step] * batch, tables)
    took = (time.perf_counter() - started) / steps
    for table in tables:
        engine.allocator.free(table)
    return took * 1000


def mixed_ms(engine: Engine, batch: int, iterations: int) -> float:
    """Mean of `iterations`, each of one block of a prompt beside one token of `batch` sequences."""
    tables = [engine.allocator.allocate(CONTEXT_TOKENS // BLOCK_TOKENS + 1) for _ in range(batch)]
    prompt = engine.allocator.allocate(iterations)
    started = time.perf_counter()
    for i in range(iterations):
        chunk = PromptRows([(j * 7919) % 49000 for j in range(BLOCK_TOKENS)], i * BLOCK_TOKENS, prompt)
        engine.mixed([chunk], [5] * batch, [CONTEXT_TOKENS + i] * batch, tables)
    took = (time.perf_counter() - started) / iterations
    for table in (*tables, prompt):
        engine.allocator.free(table)
    return took * 1000


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, help="whole chunks")
    args = parsed(options, rounds=1, steps=1, prompt_tokens=2 * BLOCK_TOKENS)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model("smollm2-135m-instruct", dtype=dtype)
        # Of weights packed twice, each in pages of its own, one set may be read up to 10 % faster than the other.
        packed = Transformer(model.config, model.weights)
        engines = {
            name: Engine(
                model, num_blocks=64, block_tokens=BLOCK_TOKENS, exact=name != "fast", transformer=packed
            )
            for name in ("exact", "fast", "whole")
        }
        for name in ("exact", "fast"):
            trial_of(engines[name])  # as a worker's start does
        for engine in engines.values():  # KV that was never written reads falsely fast
            engine.cache.k.normal_()
            engine.cache.v.normal_()
        work = {
            f"prefill of {args.prompt_tokens} tokens": lambda engine: prefill_ms(engine, args.prompt_tokens),
            **{
                f"decode step, batch {batch}": partial(decode_ms, batch=batch, steps=args.steps)
                for batch in (1, 4, 8, 16)
            },
            **{
                f"a block of a prompt beside {batch} decodes": partial(
                    mixed_ms, batch=batch, iterations=args.steps
                )
                for batch in (1, 8)
            },
        }
        for name, measure in work.items():
            pairs = [{kind: measure(engine) for kind, engine in engines.items()} for _ in range(args.rounds)]
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "what": name,
                    "exact_ms": spread([pair["exact"] for pair in pairs]),
                    "fast_ms": spread([pair["fast"] for pair in pairs]),
                    "whole_ms": spread([pair["whole"] for pair in pairs]),
                    "ratio": spread([pair["exact"] / pair["fast"] for pair in pairs]),
                    "ratio_whole": spread([pair["whole"] / pair["fast"] for pair in pairs]),
                    "product_rows": {name: engine.product_rows for name, engine in engines.items()},
                }
            )
    lines = [
        f"{row['dtype']:>9} {row['what']:<24} exact {row['exact_ms']['p50']:8.1f} ms, "
        f"fast {row['fast_ms']['p50']:8.1f} ms, ratio {row['ratio']['p50']:.2f} "
        f"({row['ratio']['min']:.2f} to {row['ratio']['max']:.2f}), whole groups {row['ratio_whole']['p50']:.2f}"
        for row in rows
    ]
    finish(args, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
