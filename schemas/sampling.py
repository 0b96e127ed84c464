"""Sampling parameters and sampled tokens, as they travel between frontend and workers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon.schemas.types import PackedLogprobs, Part


class Sampling(Part, frozen=True):
    """How tokens are drawn; the frontend has checked it. `temperature` 0 is greedy.

    A draw depends only on (seed, index of the token), so a request that moves to another worker draws the same tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    logprobs: Annotated[int, Meta(ge=-1, le=20)] = -1
    #: The prompt's own tokens, too: as `logprobs`.
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=20)] = -1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    ignore_eos: bool = False
    #: Token ids that end the text, beside the model's own.
    stop_token_ids: list[int] = []
    #: Only these may be drawn; []: all.
    allowed_token_ids: list[int] = []
    #: Sequences of token ids that may not be completed.
    bad_words: list[list[int]] = []
    #: Structure that the text must have, as llguidance writes a grammar; "": any.
    grammar: str = ""
    #: Report xxh3_64 of each token's f32 logits (tests of bit equality).
    logits_digest: bool = False

    def reseeded(self, number: int) -> Sampling:
        """The same, for another choice of one request."""
        return msgspec.structs.replace(self, seed=(self.seed + number) & (2**63 - 1))


class SampledToken(Part, frozen=True):
    """One token, and the requested facts about its draw."""

    token_id: int
    logprob: float = 0.0
    #: (token id, logprob), largest first.
    top_logprobs: list[tuple[int, float]] = []
    logits_digest: str = ""
    #: The first token's: those of the prompt, where they were asked for.
    prompt_logprobs: PackedLogprobs = b""
    #: The text ends here, unfinished: its grammar ran into the bound of what a mask may cost.
    cut: bool = False
