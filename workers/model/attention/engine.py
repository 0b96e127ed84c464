"""The engine of an attention worker: a cache and the attention operator, without weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from halfmoon.workers.model.attention.choice import make_attention
from halfmoon.workers.model.attention.exact import ExactAttention
from halfmoon.workers.model.loading.config import ModelConfig
from halfmoon.workers.model.paged_cache import PagedCache


class AttentionEngine:
    """`config`: of the model, with the heads that are attended to here: `kv_heads` of its KV heads, and their queries'.

    Numerics are exact: segments of `segment_tokens`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kv_heads: int,
        num_blocks: int,
        block_tokens: int,
        segment_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        attention: str = "auto",
    ) -> None:
        assert config.kv_heads % kv_heads == 0, (config.kv_heads, kv_heads)
        self.config = replace(config, heads=config.heads // config.kv_heads * kv_heads, kv_heads=kv_heads)
        self.dtype = dtype
        self.cache = PagedCache(self.config, num_blocks, block_tokens, dtype, device)
        base = make_attention(attention, torch.device(device), dtype, block_tokens, exact=True)
        self.attention = ExactAttention(base, segment_tokens)
