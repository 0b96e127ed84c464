"""Attention over some of a sequence's keys, and how such states become attention over all of them.

A *partial attention state* is the normalised `out` and the f32 log-sum-exp of its scores. States over disjoint keys
merge to the state over their union; that of no keys is the neutral element. Chunked prefill uses it (keys before the
chunk, keys of the chunk), exact mode's canonical split, and attention to parts of a sequence that are elsewhere.
Source: FlashAttention-2, section 3.1; Infinite-LLM (arXiv 2401.02669), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

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


class StateStack:
    """States of the same rows over disjoint keys, one upon the other in the order in which they merge.

    `out` is f32 `[parts, rows, heads, head_dim]`, `lse` f32 `[parts, rows, heads]`. Each attention writes its part
    there. A part that is not written stays neutral, so rows may have fewer parts than others: the bits of a row do not
    depend on the rows beside it.
    """

    def __init__(self, parts: int, rows: int, heads: int, head_dim: int, device: torch.device) -> None:
        self.out = torch.zeros(parts, rows, heads, head_dim, device=device)
        self.lse = torch.full((parts, rows, heads), float("-inf"), device=device)

    def merged(self) -> Tensor:
        """f32 `[rows, heads, head_dim]`. Every row has a key in some part. Uses up the content of `out`."""
        weights = (self.lse - self.lse.amax(0)).exp_()
        weighted = self.out.mul_(weights.unsqueeze(-1))
        # One addition after the other, in order: how a sum over a dimension is grouped is the library's affair. The
        # zero comes first because adding it turns -0 into 0, which a neutral part would do to some batches only.
        total, out = weights[0], weighted[0].add_(0.0)
        for part in range(1, weights.shape[0]):
            total.add_(weights[part])
            out.add_(weighted[part])
        return out.div_(total.unsqueeze(-1))
