"""Which of a prompt's tokens a layer keeps the KV of, where a request asks for less than all of it.

A layer keeps the newest tokens, the first ones, and those of the others to which its last computed rows attend most.
So each layer has tokens of its own. But all layers have as many, so that a sequence has one length in its cache and one
table of blocks. In the paper deep layers keep fewer and the first ones more. That would take a table for each layer,
and at the same mean it was no better here (benchmarks/similar_retention.py).

Source: SemShareKV (arXiv 2509.24832), retention by average attention; SnapKV (arXiv 2404.14469) for the newest rows as
those that judge.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

#: Rows that judge. Earlier ones ask for other things than what comes next.
_JUDGES = 64
#: Of what is kept, so many percent are the newest tokens. In deep layers few rows are computed, from all over the
#: prompt, and judge badly.
NEWEST_PERCENT = 75
#: Every later row attends to the first tokens, whatever they are.
_FIRST = 4


def most_attended(
    q: Tensor, keys: Tensor, positions: Tensor, start: int, count: int, newest_percent: int = NEWEST_PERCENT
) -> Tensor:
    """Places, ascending, int64 `[count]`, of the tokens from `start` on that are kept, counted from `start`.

    `q` `[rows, heads, head_dim]` at ascending `positions`, `keys` `[tokens, kv_heads, head_dim]`.
    """
    q, positions = q[-_JUDGES:], positions[-_JUDGES:]
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    grouped = q.view(len(q), kv_heads, heads // kv_heads, dim).float()
    scores = torch.einsum("rkgd,tkd->rkgt", grouped, keys.float()) * dim**-0.5
    hidden = torch.arange(len(keys), device=q.device) > positions.view(-1, 1, 1, 1)
    mass = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).mean(dim=(0, 1, 2))[start:]
    # A share of attention is at most 1.
    mass[-max(1, count * newest_percent // 100) :] = 3.0
    mass[: max(0, _FIRST - start)] = 2.0
    places: Tensor = mass.topk(count).indices.sort().values
    return places
