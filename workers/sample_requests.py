"""From a row of logits and a request's parameters to the token that travels back. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from halfmoon.schemas.sampling import SampledToken, Sampling, pack_logprobs
from halfmoon.workers.model.prompt_rows import PromptScores
from halfmoon.workers.model.sampling_params import Sampled, SampleRequest, SamplingParams

#: As vLLM writes the log probability of an impossible token.
LOGPROB_MIN = -9999.0


def params_of(sampling: Sampling) -> SamplingParams:
    """The engine's parameters for the frontend's."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        logprobs=None if sampling.logprobs < 0 else sampling.logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias or None,
    )


def end_ids(eos_ids: frozenset[int], sampling: Sampling) -> frozenset[int]:
    """Tokens that end this request's text; `eos_ids` are the model's own."""
    own = frozenset() if sampling.ignore_eos else eos_ids
    return own | frozenset(sampling.stop_token_ids)


def banned_ids(engine: Any, sampling: Sampling, output: Sequence[int]) -> Sequence[int]:
    """Tokens that may not be drawn after `output`: every end before `min_tokens`, and the last of a bad word."""
    banned: set[int] = set()
    if len(output) < sampling.min_tokens:
        banned.update(engine.config.eos_token_ids, sampling.stop_token_ids)
    for word in sampling.bad_words:
        before = len(word) - 1
        if before <= len(output) and list(output[len(output) - before :]) == word[:-1]:
            banned.add(word[-1])
    return sorted(banned)


def request_of(
    engine: Any,
    params: SamplingParams,
    sampling: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    name: str = "",
) -> SampleRequest:
    """The engine's question for token number `len(output)`. `name`: of the order whose tokens they are."""
    return SampleRequest(
        params=params,
        index=len(output),
        prompt_ids=prompt,
        output_ids=output,
        banned_ids=banned_ids(engine, sampling, output),
        allowed_ids=sampling.allowed_token_ids,
        grammar=sampling.grammar,
        name=name,
    )


def token_of(engine: Any, sampled: Sampled, sampling: Sampling, logits_row: Any) -> SampledToken:
    """The drawn token as it travels."""
    return SampledToken(
        token_id=sampled.token_id,
        logprob=sampled.logprob or 0.0,
        # JSON has no infinity: a token that a grammar forbids has this.
        top_logprobs=[(token, max(logprob, LOGPROB_MIN)) for token, logprob in sampled.top_logprobs],
        logits_digest=engine.logits_digest(logits_row) if sampling.logits_digest else "",
        cut=sampled.cut,
    )


def scores_of(prompt: Sequence[int], top: int) -> PromptScores | None:
    """Where a prompt's own log probabilities are to go; -1: none are wanted."""
    return PromptScores(prompt, top) if top >= 0 else None


def next_token(
    engine: Any,
    logits: Any,
    sampling: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    scores: PromptScores | None = None,
) -> SampledToken:
    """One token of one request from its row of logits (in prefill, the last prompt token's); the first takes along the
    scores of the prompt.
    """
    request = request_of(engine, params_of(sampling), sampling, prompt, output)
    token = token_of(engine, engine.sample_rows(logits, [request])[0], sampling, logits)
    if scores is None:
        return token
    rows = (
        (rank, max(logprob, LOGPROB_MIN), [(other, max(each, LOGPROB_MIN)) for other, each in top])
        for rank, logprob, top in scores.rows
    )
    return msgspec.structs.replace(token, prompt_logprobs=pack_logprobs(rows, scores.top))
