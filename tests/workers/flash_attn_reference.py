"""Stands in for the package `flash_attn` where there is no GPU: its two functions that we call, in plain torch.

Written from the documentation of flash-attn 2 and the checks that its functions make, so that a call that the
package would refuse fails here too: dtypes, int32 tables and lengths, pages of a multiple of 256 tokens, heads that
divide. Two of its habits are kept because callers have to live with them: a query that sees no key gets `out` 0 and
a log-sum-exp of *plus* infinity, and arguments that we do not pass are not there. What it cannot show is the
kernels' own rounding and speed.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch

Tensor = torch.Tensor

PAGE_TOKENS_MULTIPLE = 256
HEAD_DIM_MAX = 256


def stand_in() -> ModuleType:
    """The module for `sys.modules["flash_attn"]`."""
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    causal: bool = False,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of `q` `[batch, rows, heads, head_dim]` to a paged cache.

    `k_cache` and `v_cache` are `[blocks, page, kv_heads, head_dim]`, `block_table` `[batch, pages]` and
    `cache_seqlens` `[batch]`, both int32. Returns out like `q`, and if wanted the f32 log-sum-exp
    `[batch, heads, rows]`.
    """
    batch, rows, heads, _ = q.shape
    _check_operands(q, k_cache, v_cache)
    assert k_cache.dim() == v_cache.dim() == 4, (k_cache.shape, v_cache.shape)
    assert k_cache.shape == v_cache.shape, (k_cache.shape, v_cache.shape)
    page = k_cache.shape[1]
    assert page % PAGE_TOKENS_MULTIPLE == 0, f"a page of {page} tokens"
    assert block_table.dtype == cache_seqlens.dtype == torch.int32, (block_table.dtype, cache_seqlens.dtype)
    assert block_table.dim() == 2, block_table.shape
    assert block_table.shape[0] == cache_seqlens.numel() == batch, (
        block_table.shape,
        cache_seqlens.shape,
        batch,
    )
    assert block_table.device == cache_seqlens.device == q.device
    assert num_splits >= 0, num_splits
    out, lse = torch.empty_like(q), torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    for i, keys in enumerate(cache_seqlens.tolist()):
        table = block_table[i].tolist()
        assert 0 <= keys <= len(table) * page, (keys, len(table), page)
        pages = table[: -(-keys // page)]
        # On a GPU a wrong number reads another's memory without a word.
        assert all(0 <= block < k_cache.shape[0] for block in pages), (pages, k_cache.shape)
        index = torch.tensor(pages, dtype=torch.int64, device=q.device)
        k, v = (cache.index_select(0, index).flatten(0, 1)[:keys] for cache in (k_cache, v_cache))
        out[i], lse[i] = _attend(q[i], k, v, causal)
    return (out, lse) if return_softmax_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """Attention of sequences that lie one after the other: `q` `[queries, heads, head_dim]`, `k` and `v`
    `[keys, kv_heads, head_dim]`, their ends int32 `[batch + 1]`.

    Returns out like `q`, and if wanted the f32 log-sum-exp `[heads, queries]` and no probabilities.
    """
    _check_operands(q, k, v)
    assert q.dim() == k.dim() == v.dim() == 3, (q.shape, k.shape, v.shape)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32, (cu_seqlens_q.dtype, cu_seqlens_k.dtype)
    assert cu_seqlens_q.shape == cu_seqlens_k.shape, (cu_seqlens_q.shape, cu_seqlens_k.shape)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (ends_q[0], ends_q[-1], ends_k[0], ends_k[-1]) == (0, q.shape[0], 0, k.shape[0]), (ends_q, ends_k)
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    for i in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        assert 0 <= rows.stop - rows.start <= max_seqlen_q, (rows, max_seqlen_q)
        assert 0 <= keys.stop - keys.start <= max_seqlen_k, (keys, max_seqlen_k)
        out[rows], lse[:, rows] = _attend(q[rows], k[keys], v[keys], causal)
    return (out, lse, None) if return_attn_probs else out


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), f"flash-attn does not take {q.dtype}"
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert q.device == k.device == v.device, (q.device, k.device, v.device)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "the last dimension must be contiguous"
    heads, kv_heads, dim = q.shape[-2], k.shape[-2], q.shape[-1]
    assert heads % kv_heads == 0, (heads, kv_heads)
    assert dim == k.shape[-1] == v.shape[-1] <= HEAD_DIM_MAX, (dim, k.shape, v.shape)
    assert dim % 8 == 0, dim


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """One sequence: out like `q` `[rows, heads, head_dim]` and lse `[heads, rows]`, computed in f32.

    The causal mask stands at the bottom right: the last query sees all keys.
    """
    rows, heads, dim = q.shape
    keys, group = k.shape[0], heads // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_k) / math.sqrt(dim)
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    sees = torch.isfinite(scores).any(-1)  # [heads, rows]
    lse = torch.where(sees, torch.logsumexp(scores, dim=-1), float("inf"))
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = torch.einsum("hqk,khd->qhd", weights, wide_v)
    return out.to(q.dtype), lse
