"""The choice of a token from logits: a request's parameters, and the result. Imports no torch.

Source: the fields and their meaning are those of the OpenAI API and, beyond it, of vLLM's `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class SamplingInvalid(ValueError):
    """A sampling parameter is outside of its range; `field` names it."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        super().__init__(f"{field} is {found!r}; allowed: {allowed}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`temperature` 0 means greedy. The defaults switch every filter and penalty off.

    `seed` with the index of the token decides every draw. Without a seed each draw is fresh, so a caller that may
    resume a request elsewhere gives it one. `logprobs` asks for the chosen token's and that many of the top ones; 0
    for the chosen token's alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        """Raises `SamplingInvalid`. The comparisons are written so that NaN fails them."""
        if not 0.0 <= self.temperature < float("inf"):
            raise SamplingInvalid("temperature", self.temperature, "0 or more")
        if self.top_k < -1:
            raise SamplingInvalid("top_k", self.top_k, "-1 or 0 (off), or more")
        if not 0.0 < self.top_p <= 1.0:
            raise SamplingInvalid("top_p", self.top_p, "above 0, up to 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise SamplingInvalid("min_p", self.min_p, "0 to 1")
        if self.logprobs is not None and self.logprobs < 0:
            raise SamplingInvalid("logprobs", self.logprobs, "0 or more")
        if not -2.0 <= self.presence_penalty <= 2.0:
            raise SamplingInvalid("presence_penalty", self.presence_penalty, "-2 to 2")
        if not -2.0 <= self.frequency_penalty <= 2.0:
            raise SamplingInvalid("frequency_penalty", self.frequency_penalty, "-2 to 2")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise SamplingInvalid("repetition_penalty", self.repetition_penalty, "above 0")
        for token, bias in (self.logit_bias or {}).items():
            if not -100.0 <= bias <= 100.0:
                raise SamplingInvalid(f"logit_bias[{token}]", bias, "-100 to 100")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adjusts_logits(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or bool(self.logit_bias)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One row of logits to choose from. `index` counts the request's generated tokens from 0.

    `banned_ids` cannot be chosen: the end tokens before `min_tokens`, and tokens that would complete a bad word.
    """

    params: SamplingParams
    index: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    banned_ids: Sequence[int] = ()
    #: No other can be chosen; (): any can.
    allowed_ids: Sequence[int] = ()
    #: The text's grammar (`halfmoon.workers.model.grammar_masks`), and the name under which its state is kept.
    grammar: str = ""
    name: str = ""

    @property
    def plain_greedy(self) -> bool:
        """Nothing but the largest logit is asked for."""
        params = self.params
        plain = params.greedy and params.logprobs is None and not params.adjusts_logits
        return plain and not (self.banned_ids or self.allowed_ids or self.grammar)


@dataclass(frozen=True, slots=True)
class Sampled:
    """`logprob` is None unless asked for; `top_logprobs` are (token id, logprob), the most likely first. `cut`: the
    grammar ran into the bound of its cost, and could allow nothing but the end.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    cut: bool = False
