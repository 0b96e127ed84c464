"""Which implementation of attention a device gets."""

from __future__ import annotations

import torch

from halfmoon.workers.model.attention.flash import FlashAttention, flash_unavailable
from halfmoon.workers.model.attention.kernel import Attention, SdpaAttention


class AttentionUnavailable(Exception):
    """`flash` was asked for by name and is not available, for the reasons given."""


def make_attention(
    choice: str, device: torch.device, dtype: torch.dtype, block_tokens: int, *, exact: bool = False
) -> Attention:
    """`auto` takes flash-attn where it can; `flash` raises `AttentionUnavailable` where it cannot."""
    if choice not in ("auto", "sdpa", "flash"):
        raise AttentionUnavailable(f"attention is {choice!r}; supported: auto, sdpa, flash")
    if choice == "sdpa":
        return SdpaAttention(block_tokens, device)
    reasons = flash_unavailable(device, dtype, block_tokens)
    if not reasons:
        return FlashAttention(block_tokens, device, exact=exact)
    if choice == "flash":
        raise AttentionUnavailable("; ".join(reasons))
    return SdpaAttention(block_tokens, device)
