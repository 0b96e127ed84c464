"""The token budget of a mixed worker's iterations, chosen by the time that they may take.

Source: Sarathi-Serve (OSDI'24, arXiv 2403.02310), section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.policy import Layout

#: Rows of a chunk are padded to this in fast numerics.
TILE_ROWS = 16


def token_budget(iteration_ns: Callable[[int], float], slo_ns: float, *, tile: int, tokens_max: int) -> int:
    """The most tokens of an iteration that takes no longer than `slo_ns`: a multiple of `tile`, at least one tile.

    `iteration_ns` of a number of tokens does not fall as they become more. Where one tile takes longer, no budget holds
    the objective and one tile breaks it least.
    """
    assert 0 < tile <= tokens_max, (tile, tokens_max)
    low, high = 1, tokens_max // tile
    while low < high:
        middle = (low + high + 1) // 2
        if iteration_ns(middle * tile) <= slo_ns:
            low = middle
        else:
            high = middle - 1
    return low * tile


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
