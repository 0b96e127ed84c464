"""Which of a prompt's tokens a layer keeps the KV of, where a request asks for less than all of it.

Each layer keeps the newest tokens, the first ones, and of the others its own: those that its computed rows attend to
most. All layers keep as many, so that a sequence has one length in its cache, and one table of blocks. In the paper
deep layers keep fewer and the first ones more, which would take a table for each layer; both are measured at the same
mean by benchmarks/similar_retention.py.

Source: SemShareKV (arXiv 2509.24832), retention by average attention; SnapKV (arXiv 2404.14469) for the newest rows as
the ones that judge.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

#: Rows that judge: those before them ask for other things than what comes next.
_JUDGES = 64
#: Of what is kept, so many percent are the newest tokens. In deep layers few rows judge, from all over the prompt: by
#: attention alone, what follows one of three documents was 0.18 nats off, and is 0.01 with these.
_NEWEST_PERCENT = 75
#: What every later row attends to, whatever it is.
_FIRST = 4


def most_attended(q: Tensor, keys: Tensor, positions: Tensor, start: int, count: int) -> Tensor:
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
    # More than any share of attention.
    mass[-max(1, count * _NEWEST_PERCENT // 100) :] = 2.0
    mass[: max(0, _FIRST - start)] = 1.5
    places: Tensor = mass.topk(count).indices.sort().values
    return places
