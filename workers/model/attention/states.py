"""Attention over some of a sequence's keys, and how such states become attention over all of them.

A *partial attention state* is the normalised `out` and the f32 log-sum-exp of its scores. States over disjoint keys
merge to the state over their union; that of no keys is the neutral element. Chunked prefill uses it (keys before the
chunk, keys of the chunk), exact mode's canonical split, and attention to parts of a sequence that are elsewhere.
Source: FlashAttention-2, section 3.1; Infinite-LLM (arXiv 2401.02669), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfmoon.workers.model.kernels.attention import merge_kernel

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


class StateStack:
    """States of the same rows over disjoint keys: over each row's own keys, and over parts of its past, one upon the
    other in the order in which they are added.

    `out` is f32 `[parts, rows, heads, head_dim]`, `lse` f32 `[parts, rows, heads]`. Each attention writes its part
    there. A part that is not written stays neutral, so rows may have fewer parts than others: the bits of a row do not
    depend on the rows beside it.
    """

    def __init__(self, parts: int, rows: int, heads: int, head_dim: int, device: torch.device) -> None:
        self.out = torch.zeros(parts, rows, heads, head_dim, device=device)
        self._lses = torch.full((parts + 1, rows, heads), float("-inf"), device=device)
        self.lse = self._lses[:-1]
        self.own_lse = self._lses[-1]
        """Over the own keys, of which every row has one: f32 `[rows, heads]`."""
        self.own_out: Tensor | None = None
        """`[rows, groups, 1, head_dim]`: one result for all query heads of a group, which may be one head."""
        self._own_tokens: tuple[Tensor, Tensor, Tensor] | None = None
        self._merge = merge_kernel(head_dim) if device.type == "cpu" else None

    def write(self, places: Tensor, out: Tensor, lse: Tensor) -> None:
        """One state a place, which is part * rows + row: `out` `[places, heads, head_dim]`, `lse` `[places, heads]`.
        The heads may lie in groups.
        """
        self.out.view(-1, *out.shape[1:]).index_copy_(0, places, out.float())
        self.lse.view(-1, *lse.shape[1:]).index_copy_(0, places, lse.float())

    def own_token(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The state of each row over its own token alone: its value, and the one score. `q` is
        `[rows, heads, head_dim]`, `k` and `v` are `[rows, kv_heads, head_dim]`: `merged` reads them.
        """
        if self._merge is not None:
            self._own_tokens = q, k, v
            return
        rows, heads, dim = q.shape
        kv_heads = k.shape[1]
        products = q.view(rows, kv_heads, heads // kv_heads, dim).float() * k.float().unsqueeze(2)
        torch.sum(products, -1, out=self.own_lse.view(products.shape[:-1])).mul_(dim**-0.5)
        self.own_out = v.unsqueeze(2)

    def merged(self) -> Tensor:
        """f32 `[rows, heads, head_dim]`. Uses up the content of `out`."""
        if self._merge is not None and self._own_tokens is not None:
            return self._merge.with_tokens(*self._own_tokens, self.out, self.lse)
        assert self.own_out is not None, "no state over the own keys"
        if self._merge is not None:
            own = self.own_out.squeeze(2).float().contiguous()
            return self._merge.with_states(own, self.own_lse, self.out, self.lse)
        exps = (self._lses - self._lses.amax(0)).exp_()
        # One addition after the other, in order: how a sum over a dimension is grouped is the library's affair. And
        # none that multiplies as well: whether it rounds once or twice may depend on where a value stands.
        *parts, total = exps.unbind()
        for part in parts:
            total = total + part
        weights = exps / total
        rows, groups, _, head_dim = self.own_out.shape
        own = self.own_out.float() * weights[-1].view(rows, groups, -1, 1)
        # Zero is added because that turns -0 into 0, which a neutral part would do to some batches only.
        out = own.view(rows, -1, head_dim).add_(0.0)
        for weighted in self.out.mul_(weights[:-1].unsqueeze(-1)).unbind():
            out.add_(weighted)
        return out
