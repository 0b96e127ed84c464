"""Chooses tokens from logits.

Order, as in vLLM: the text's grammar, then banned tokens and logit bias, repetition, frequency and presence
penalties, temperature, min_p, top_k, top_p, draw. Log-probabilities are of the model's own distribution, before all of
that (vLLM's `raw_logprobs`), but within the grammar.

A draw is a function of (seed, index of the token) alone: no state is kept between tokens, so a request that goes on
elsewhere at token `index` draws the same token as here. It inverts the cumulative distribution over token ids in their
order, which also makes it robust: logits a rounding error apart draw the same token almost always.
"""

from __future__ import annotations

import secrets
import struct
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import xxhash

from halfmoon.workers.model.prompt_rows import ScoredToken
from halfmoon.workers.model.sampling_params import Sampled, SampleRequest, SamplingParams

__all__ = ["SampleRequest", "Sampled", "SamplingParams", "sample", "sample_batch", "score", "uniform"]

Tensor = torch.Tensor


def uniform(seed: int, index: int) -> float:
    """In [0, 1), 53 bits. Any integer is a seed: it is taken modulo 2**64."""
    message = struct.pack("<QQ", seed & (2**64 - 1), index)
    return float(xxhash.xxh3_64_intdigest(message) >> 11) / float(1 << 53)


def sample(
    logits: Tensor,
    params: SamplingParams,
    request: SampleRequest,
    forbidden: Tensor | None = None,
) -> Sampled:
    """One token from f32 `logits` `[vocab]`, which are left as they were. `params` stand in for those of `request`.

    `forbidden` `[vocab]`: tokens that the text's grammar does not allow. The grammar stands above all: bans that would
    leave none of its tokens are passed over.
    """
    if forbidden is not None:
        logits = logits.masked_fill(forbidden.to(logits.device), float("-inf"))
    raw = logits
    if params.adjusts_logits or request.banned_ids or request.allowed_ids:
        adjusted = _adjust(logits.clone(), params, request)
        logits = adjusted if float(adjusted.max()) > float("-inf") else raw
    token = int(logits.argmax()) if params.greedy else _draw(logits, params, request.index)
    if params.logprobs is None:
        return Sampled(token)
    logprobs = torch.log_softmax(raw, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if params.logprobs:
        values, ids = logprobs.topk(min(params.logprobs, logprobs.numel()))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), top)


def sample_batch(
    logits: Tensor,
    requests: Sequence[SampleRequest],
    draw: Callable[[Tensor, SamplingParams, SampleRequest], Sampled] = sample,
) -> list[Sampled]:
    """One token for each row of f32 `[rows, vocab]`; those that ask for the largest logit alone share one
    call. `draw`: for each of the others, from its row `[vocab]`.
    """
    assert len(requests) <= logits.shape[0], (len(requests), logits.shape)
    largest: list[int] = []
    if any(request.plain_greedy for request in requests):
        largest = logits.argmax(dim=-1).tolist()
    return [
        Sampled(largest[row]) if request.plain_greedy else draw(logits[row], request.params, request)
        for row, request in enumerate(requests)
    ]


def score(logits: Tensor, token_ids: Sequence[int], top: int) -> list[ScoredToken]:
    """How likely each of `token_ids` is by its row of f32 `logits` `[rows, vocab]`; rows without one are padding.

    As in vLLM, a token's rank counts those of equal log probability before it.
    """
    logprobs = torch.log_softmax(logits, dim=-1)[: len(token_ids)]
    own = logprobs.gather(1, _index(list(token_ids), logits)[:, None])
    ranks = (logprobs >= own).sum(-1).tolist()
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return [
        ScoredToken(rank, logprob, tuple(zip(row_ids, row, strict=True)))
        for rank, logprob, row_ids, row in zip(
            ranks, own[:, 0].tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]


def _adjust(logits: Tensor, params: SamplingParams, request: SampleRequest) -> Tensor:
    """In place. Repetition counts the prompt too; presence and frequency count generated tokens only
    (OpenAI).
    """
    vocab, output_ids = logits.numel(), request.output_ids
    for token, bias in (params.logit_bias or {}).items():
        if 0 <= token < vocab:
            logits[token] += bias
    if params.repetition_penalty != 1.0:
        ids = _index(sorted({*request.prompt_ids, *output_ids}), logits)
        values = logits[ids]
        logits[ids] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if output_ids and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output_ids)
        ids = _index(list(counts), logits)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.frequency_penalty * times + params.presence_penalty
    if request.allowed_ids:
        ids = _index([token for token in request.allowed_ids if 0 <= token < vocab], logits)
        others = torch.ones_like(logits, dtype=torch.bool)
        others[ids] = False
        logits[others] = float("-inf")
    if request.banned_ids:
        logits[_index(list(request.banned_ids), logits)] = float("-inf")
    return logits


def _index(ids: list[int], logits: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """f64 probabilities `[vocab]` after temperature, min_p, top_k and top_p; filtered tokens have exactly 0.

    Of equal probabilities at the edge of top_k or top_p the smaller token ids stay.
    """
    # Shifted before the division, so that a temperature near 0 overflows to -inf and not to NaN.
    scaled = (logits.double() - logits.max()) / params.temperature
    probabilities = torch.softmax(scaled, dim=-1)
    if params.min_p > 0.0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    limit = params.top_k if 0 < params.top_k < probabilities.numel() else 0
    if limit or params.top_p < 1.0:
        ordered, ids = probabilities.sort(descending=True, stable=True)
        if limit:
            ordered[limit:] = 0.0
        if params.top_p < 1.0:
            # A token stays while those before it have not reached top_p, so the first always stays.
            before = ordered.cumsum(-1) - ordered
            ordered[before >= params.top_p * ordered.sum()] = 0.0
        probabilities = torch.zeros_like(probabilities).scatter_(0, ids, ordered)
    return probabilities / probabilities.sum()


def _draw(logits: Tensor, params: SamplingParams, index: int) -> int:
    seed = params.seed if params.seed is not None else secrets.randbits(64)
    probabilities = filtered(logits, params)
    cumulative = probabilities.cumsum(-1)
    target = uniform(seed, index) * float(cumulative[-1])
    token = int(torch.searchsorted(cumulative, target, right=True))
    # Rounding may leave the target at the very end, beyond the last token that has any probability.
    return token if token < probabilities.numel() else int(probabilities.nonzero()[-1])
