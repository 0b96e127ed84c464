"""What the fence of a pool's slots costs (`halfmoon.store.pool.fence`), beside the copy that it guards.

A real segment in shared memory, two mappings of it as an agent and a worker have them. By turns: the copy of one layer
of a block alone, and the same within `PoolView.writing`; then admitting an order to a slot, and taking it away.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from clusters import finish, parser

from halfmoon.schemas.policy import Layout
from halfmoon.store.pool.fence import SegmentFence
from halfmoon.store.pool.segment import Geometry, PoolView, Segment

SLOTS, CALLS, ORDER = 16, 400, "1-0"
#: Blocks of SmolLM2-135M in f32 and bf16, and of a small one whose copy costs next to nothing.
LAYOUTS = {
    "256 tokens, f32": ("float32", 256),
    "256 tokens, bf16": ("bfloat16", 256),
    "16 tokens, bf16": ("bfloat16", 16),
}


def layout_of(dtype: str, block_tokens: int) -> Layout:
    return Layout(
        model="m",
        model_fingerprint="f",
        layers=30,
        kv_heads=3,
        head_dim=64,
        block_tokens=block_tokens,
        dtype=dtype,
    )  # type: ignore[arg-type]


def each_us(work: Callable[[int], Any]) -> float:
    """Microseconds of CPU a call."""
    began = time.process_time()
    for number in range(CALLS):
        work(number % SLOTS)
    return (time.process_time() - began) / CALLS * 1e6


def measure(name: str, rounds: int) -> dict[str, Any]:
    layout = layout_of(*LAYOUTS[name])
    geometry = Geometry.of(layout, SLOTS)
    segment = Segment.create(f"halfmoon-bench-fence-{os.getpid()}", geometry)
    worker = PoolView.attach(segment.view.name, geometry)
    try:
        fence = SegmentFence(segment.view)
        source = np.ones_like(worker.layer_block(0, 0))
        for slot in range(SLOTS):
            fence.admit(slot, ORDER)
            worker.layer_block(slot, 0)[:] = source

        def bare(slot: int) -> None:
            worker.layer_block(slot, 0)[:] = source

        def fenced(slot: int) -> None:
            with worker.writing(slot, ORDER):
                worker.layer_block(slot, 0)[:] = source

        def given_away(slot: int) -> None:
            assert fence.withdraw(slot)
            fence.admit(slot, ORDER)

        turns = [(each_us(bare), each_us(fenced), each_us(given_away)) for _ in range(rounds)]
    finally:
        worker.close()
        segment.close()
    alone, within, moves = ([round(turn[part], 2) for turn in turns] for part in range(3))
    ratios = sorted(round(b / a, 3) for a, b in zip(alone, within, strict=True))
    return {
        "layer_block_bytes": int(source.nbytes),
        "copy_us": statistics.median(alone),
        "fenced_copy_us": statistics.median(within),
        "ratio": statistics.median(ratios),
        "ratio_least_most": [ratios[0], ratios[-1]],
        "withdraw_and_admit_us": statistics.median(moves),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=15)
    args = options.parse_args()
    found = {name: measure(name, args.rounds) for name in LAYOUTS}
    lines = []
    for name, figures in found.items():
        least, most = figures["ratio_least_most"]
        lines.append(
            f"{name}: {figures['layer_block_bytes']:,} bytes in {figures['copy_us']:.1f} us, fenced"
            f" {figures['fenced_copy_us']:.1f} us: {figures['ratio']:.3f} ({least:.3f} to {most:.3f});"
            f" a slot given away {figures['withdraw_and_admit_us']:.2f} us"
        )
    finish(args, {"rounds": args.rounds, "layouts": found}, lines)


if __name__ == "__main__":
    main()
