"""Prefill of a prompt several times as long as the worker's cache, against the same with a cache that holds it.

    python benchmarks/outgrown_cache.py [--rounds N] [--save NAME]

The built-in model, f32, one thread, blocks and segments as by default, computed as the worker does it: every block is
put to a pool, and what the cache does not hold is attended to there. Time of CPU, by turns, so that what else the
machine does hits both alike; the bits must be the same.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from clusters import finish, parsed, parser, spread

from halfmoon.schemas.policy import Layout
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import load_model
from halfmoon.workers.model.segments import segment_tokens
from halfmoon.workers.prefill.actions import ComputePrompt
from halfmoon.workers.prefill.cache_window import CacheWindow, PromptMemory
from halfmoon.workers.prefill.computation import PromptComputation

BLOCK_TOKENS = 256
SEGMENT = segment_tokens(BLOCK_TOKENS)
#: A cache of one segment, and a prompt of three.
CACHE, BLOCKS = SEGMENT // BLOCK_TOKENS, 3 * SEGMENT // BLOCK_TOKENS


class Pool:
    """Slots of memory, of which slot i is block i of the prompt."""

    def __init__(self, layout: Layout) -> None:
        self.blocks = np.zeros((BLOCKS, layout.layers, layout.layer_block_bytes), dtype=np.uint8)

    def layer_block(self, slot: int, layer: int) -> np.ndarray:
        found: np.ndarray = self.blocks[slot, layer]
        return found

    def writing(self, slot: int, order_id: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def prefilled(
    engine: Engine, pool: Pool, layout: Layout, room: int, copies: ThreadPoolExecutor
) -> tuple[float, str]:
    """Seconds of CPU, and the digest of the last token's logits."""
    tokens = BLOCKS * BLOCK_TOKENS
    prompt = ComputePrompt(
        order_id="1-1",
        token_ids=[(i * i * 31 + 17 * i) % 40000 + 20 for i in range(tokens)],
        chunks=[range(at, at + BLOCK_TOKENS) for at in range(0, tokens, BLOCK_TOKENS)],
        prefix_blocks=0,
        fetched_layer=layout.layers - 1,
        slots=list(range(BLOCKS)),
        present=[],
    )
    window = CacheWindow(BLOCKS, room=room, each=SEGMENT // BLOCK_TOKENS)
    computation = PromptComputation(
        prompt,
        PromptMemory(engine=engine, pool=pool, layout=layout, window=window),
        copies=copies,
        tell=lambda _: None,
    )
    started = time.process_time()
    logits: Any = computation.run(list(range(window.blocks)))
    return time.process_time() - started, engine.logits_digest(logits)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    args = parsed(options, rounds=1)
    torch.set_num_threads(1)
    model = load_model("smollm2-135m-instruct", dtype=torch.float32)
    config = model.config
    layout = Layout(
        model=model.name,
        model_fingerprint=model.fingerprint,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_tokens=BLOCK_TOKENS,
        dtype="float32",
        segment_tokens=SEGMENT,
    )
    engines = [Engine(model, num_blocks=n, block_tokens=BLOCK_TOKENS, exact=True) for n in (BLOCKS, CACHE)]
    pool = Pool(layout)
    held_s, outgrown_s = [], []
    with ThreadPoolExecutor(1) as copies:
        for engine in engines:  # the first chunk prepares the kernels
            engine.prefill_chunk([7] * BLOCK_TOKENS, 0, [0], want_logits=True)
        for _ in range(args.rounds):
            held = prefilled(engines[0], pool, layout, BLOCKS, copies)
            outgrown = prefilled(engines[1], pool, layout, CACHE, copies)
            assert held[1] == outgrown[1], "not the same bits"
            held_s.append(held[0])
            outgrown_s.append(outgrown[0])
    ratio = spread([mine / theirs for mine, theirs in zip(outgrown_s, held_s, strict=True)])
    result = {
        "prompt_tokens": BLOCKS * BLOCK_TOKENS,
        "cache_tokens": CACHE * BLOCK_TOKENS,
        "held_cpu_s": spread(held_s),
        "outgrown_cpu_s": spread(outgrown_s),
        "ratio": ratio,
    }
    line = (
        f"{BLOCKS * BLOCK_TOKENS} tokens: {result['held_cpu_s']['p50']:.2f} s of CPU where the cache holds it,"
        f" {result['outgrown_cpu_s']['p50']:.2f} s of CPU in one of {CACHE * BLOCK_TOKENS} tokens,"
        f" ratio {ratio['p50']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}), the same bits"
    )
    finish(args, result, [line])


if __name__ == "__main__":
    main()
