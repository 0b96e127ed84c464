"""How many tokens one iteration of a mixed worker computes."""

from __future__ import annotations

import argparse

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.policy import Layout
from halfmoon.workers.batch_former import token_budget
from halfmoon.workers.options import WorkerOptions

#: Rows of a chunk are padded to this in fast numerics.
TILE_ROWS = 16


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


def largest_budget(
    layout: Layout,
    profile: CostProfile,
    *,
    iteration_ns: int,
    batch_max: int,
    context_tokens: int,
    chunk_tokens: int,
) -> int:
    """The most tokens of an iteration that takes no longer than `iteration_ns`, by the profile: with a full batch whose
    sequences have half of the cache's `context_tokens`, and a chunk in the middle of a prompt of a quarter of them.

    In exact numerics chunks are whole blocks and share no product with decodes, which come on top; in fast ones all
    rows are computed together, in whole tiles. Never less than one tile, nor more than `chunk_tokens` of prompts.
    """
    decode_ns = profile.step_ns(batch_max, context_tokens // 2)
    before = context_tokens // 8

    def takes_ns(tokens: int) -> int:
        return decode_ns + profile.prefill_ns(before + tokens, before) - profile.prefill_base_ns

    if layout.numerics == "exact":
        tile = layout.block_tokens
        most = max(tile, chunk_tokens)
        return token_budget(takes_ns, iteration_ns, tile=tile, tokens_max=most) + batch_max
    most = max(TILE_ROWS, chunk_tokens)
    return token_budget(
        lambda tokens: takes_ns(max(0, tokens - batch_max)), iteration_ns, tile=TILE_ROWS, tokens_max=most
    )
