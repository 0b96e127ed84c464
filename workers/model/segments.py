"""The fixed segments of a sequence over which exact mode attends: see `attention.exact`. Imports no torch."""

from __future__ import annotations

SEGMENT_TOKENS = 1024
"""A part of a sequence elsewhere is a whole number of segments, and costs a state of each to send; a step pays for each
beyond the first.
"""

AWAY = -1
"""In a block table: the block is elsewhere."""


def segment_tokens(block_tokens: int) -> int:
    """At least `SEGMENT_TOKENS`, in whole blocks."""
    return -(-SEGMENT_TOKENS // block_tokens) * block_tokens
