"""How many tokens one iteration of a mixed worker computes."""

from __future__ import annotations

import argparse

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.policy import Layout
from halfmoon.workers.options import WorkerOptions
from halfmoon.workers.token_budget import largest_budget


def token_budget_of(
    args: argparse.Namespace, options: WorkerOptions, layout: Layout, profile: CostProfile, kv_blocks: int
) -> int:
    """Tokens of one iteration of a mixed worker."""
    if isinstance(options.token_budget, int):
        return options.token_budget
    return largest_budget(
        layout,
        profile,
        iteration_ns=args.iteration_ms * 1_000_000,
        batch_max=options.batch_max,
        context_tokens=kv_blocks * layout.block_tokens,
        chunk_tokens=options.chunk_tokens,
    )
