"""Attention over the paged cache: one interface, its implementations for any device and for flash-attn.

Shapes. `q` is `[rows, heads, head_dim]`, `k_cache` and `v_cache` one layer of the cache,
`[num_blocks, block_tokens, kv_heads, head_dim]`. Queries are the last tokens of their sequence and their own keys are
in the cache already. A `Plan` is made once a step, and used by every layer of it.

A *partial attention state* is attention over some of the keys: the normalised `out` and the f32 log-sum-exp
of its scores. States over disjoint keys merge to the state over their union; that of no keys is the neutral
element. Chunked prefill uses it here (keys before the chunk, keys of the chunk); remote parts of a sequence
can use it as well. Source: FlashAttention-2, section 3.1; Infinite-LLM (arXiv 2401.02669), section 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """`out` `[rows, heads, head_dim]`; `lse` f32 `[rows, heads]`, natural logarithm, -inf where no
    key was.
    """

    out: Tensor
    lse: Tensor


def neutral(q: Tensor) -> Partial:
    """The state over no keys: merging with it changes nothing."""
    return Partial(
        torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    )


def merge(a: Partial, b: Partial) -> Partial:
    """The state over the keys of both, which must be disjoint. Accumulates in f32, returns `a.out`'s dtype."""
    lse = torch.logaddexp(a.lse, b.lse)
    # Rows that saw no key on either side have lse -inf, and -inf minus -inf is NaN: their weights are zero.
    safe = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    left = torch.exp(a.lse - safe).unsqueeze(-1)
    right = torch.exp(b.lse - safe).unsqueeze(-1)
    return Partial((a.out * left + b.out * right).to(a.out.dtype), lse)


@dataclass(slots=True)
class Plan:
    """Which cached tokens each sequence of a step attends to. Valid while tables and lengths stay as they
    were.
    """

    query_tokens: list[int]
    context_tokens: list[int]
    """Tokens in the cache including the queries' own."""
    tables: list[list[int]]
    first_rows: list[int | None]
    """Row of the first token when the blocks lie in one run, else None."""
    indices: list[Tensor | None]
    """Block numbers to gather, int64, where the blocks are scattered."""
    device_tables: Tensor | None = field(default=None)
    device_lengths: Tensor | None = field(default=None)


def make_plan(
    tables: Sequence[Sequence[int]],
    query_tokens: Sequence[int],
    context_tokens: Sequence[int],
    block_tokens: int,
    device: torch.device,
) -> Plan:
    plan = Plan(list(query_tokens), list(context_tokens), [], [], [])
    for table, tokens in zip(tables, context_tokens, strict=True):
        blocks = list(table[: -(-tokens // block_tokens)])
        assert len(blocks) * block_tokens >= tokens, (len(table), tokens, block_tokens)
        run = all(b == blocks[0] + i for i, b in enumerate(blocks))
        plan.tables.append(blocks)
        plan.first_rows.append(blocks[0] * block_tokens if run else None)
        plan.indices.append(None if run else torch.tensor(blocks, dtype=torch.int64, device=device))
    return plan


class Attention(ABC):
    """Implementations hold no state of a sequence; `name` is what the configuration calls them."""

    name: str

    def __init__(self, block_tokens: int, device: torch.device) -> None:
        self.block_tokens, self.device = block_tokens, device

    def plan(
        self, tables: Sequence[Sequence[int]], query_tokens: Sequence[int], context_tokens: Sequence[int]
    ) -> Plan:
        return make_plan(tables, query_tokens, context_tokens, self.block_tokens, self.device)

    @abstractmethod
    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, out: Tensor) -> None:
        """Causal attention of every sequence of `plan`, rows of `q` in its order, into `out` (like
        `q`).
        """

    @abstractmethod
    def partial(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
        """The state of one sequence's queries over `k`, `v` `[keys, kv_heads, head_dim]`.

        `causal` needs as many keys as queries: key j is seen by queries j and later.
        """


class SdpaAttention(Attention):
    """PyTorch alone. On CPU its private flash operator, which returns the log-sum-exp; elsewhere the public
    one.

    Each sequence is computed at its exact length and without padding, so that its bits do not depend on the
    batch or on where its blocks lie.
    """

    name = "sdpa"

    def __init__(self, block_tokens: int, device: torch.device, *, private_op: bool = True) -> None:
        super().__init__(block_tokens, device)
        found = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
        self._flash = found.default if private_op and found is not None and device.type == "cpu" else None

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, out: Tensor) -> None:
        row = 0
        kv_heads, (heads, dim) = k_cache.shape[2], q.shape[1:]
        grouped = q.view(-1, kv_heads, heads // kv_heads, dim)
        grouped_out = out.view(-1, kv_heads, heads // kv_heads, dim)
        for i, (rows, context) in enumerate(zip(plan.query_tokens, plan.context_tokens, strict=True)):
            k, v = self._sequence(k_cache, plan, i, context), self._sequence(v_cache, plan, i, context)
            if rows == 1 and self._flash is not None:
                # The query heads of one KV head are as good as further query rows, and read its keys once.
                one = self._flash(
                    grouped[row : row + 1], k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
                )
                grouped_out[row] = one[0].view(kv_heads, heads // kv_heads, dim)
            else:
                out[row : row + rows] = self._whole(q[row : row + rows], k, v)
            row += rows

    def _sequence(self, cache: Tensor, plan: Plan, i: int, tokens: int) -> Tensor:
        """`[tokens, kv_heads, head_dim]`: a view where the blocks lie in a row, a gathered copy otherwise."""
        first, index = plan.first_rows[i], plan.indices[i]
        if first is not None:
            return cache.flatten(0, 1)[first : first + tokens]
        assert index is not None
        return cache.index_select(0, index).flatten(0, 1)[:tokens]

    def _whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = k.shape[0] - q.shape[0]
        if self._flash is None:
            return _public_sdpa(q, k, v)
        own = self.partial(q, k[past:], v[past:], causal=True)
        if past == 0:
            return own.out
        return merge(self.partial(q, k[:past], v[:past], causal=False), own).out

    def partial(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
        assert not causal or k.shape[0] == q.shape[0], (q.shape, k.shape)
        if k.shape[0] == 0:
            return neutral(q)
        if self._flash is None:
            return _plain_partial(q, k, v, causal=causal)
        rows, heads, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        by_head = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
        if causal:
            # KV heads as the batch and their query heads as the heads, with a stride of zero for the keys.
            keys = k.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1)
            values = v.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1)
            o, lse = self._flash(by_head, keys, values, 0.0, True)
        else:
            # No mask: the query heads of a KV head are as good as further query rows, and read its keys once.
            folded = by_head.reshape(1, kv_heads, group * rows, dim)
            o, lse = self._flash(
                folded, k.permute(1, 0, 2).unsqueeze(0), v.permute(1, 0, 2).unsqueeze(0), 0.0, False
            )
        out = o.reshape(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
        return Partial(out, lse.reshape(heads, rows).t().float())


def _public_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, keys = q.shape[0], k.shape[0]
    mask = None
    if rows > 1:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _plain_partial(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
    """By the definition, in f32: where no kernel returns the log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q.float(), keys) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = torch.einsum("qhk,khd->qhd", weights, v.float().repeat_interleave(group, dim=1))
    return Partial(out.to(q.dtype), lse)
