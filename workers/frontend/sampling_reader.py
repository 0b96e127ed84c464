"""From what a request says about its tokens to what workers draw by: the part that needs the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest
from halfmoon.schemas.codec import encode
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.frontend.grammars import GrammarReader
from halfmoon.workers.model.text.tokenizer import TextNotEncoded, Tokenizer

#: It travels beside the prompt, where messages have 64 KiB for all that is neither tokens nor blocks.
SAMPLING_BYTES_MAX = 56 << 10


class SamplingReader:
    """`read` raises ApiError."""

    def __init__(self, tokenizer: Tokenizer, defaults: Mapping[str, float]) -> None:
        """`defaults`: of fields that a request does not say, by name."""
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._grammars = GrammarReader(tokenizer)

    def close(self) -> None:
        self._grammars.close()

    async def read(self, ask: ApiRequest) -> Sampling:
        """The request's sampling, with the model's defaults, its grammar, and its bad words as tokens."""
        sampling = ask.sampling
        if defaults := {name: value for name, value in self._defaults.items() if name in ask.unsaid}:
            sampling = msgspec.structs.replace(sampling, **defaults)
            if ask.n > 1 and not sampling.temperature:
                message = f"n: {ask.n} greedy choices would be the same one; the model's temperature is 0"
                raise ApiError(400, message, param="n", code="contradiction")
        if sampling.allowed_token_ids and max(sampling.allowed_token_ids) >= self._tokenizer.vocab_size:
            message = f"allowed_token_ids: beyond the vocabulary of {self._tokenizer.vocab_size}"
            raise ApiError(400, message, param="allowed_token_ids", code="invalid")
        if ask.structure is not None:
            grammar = await self._grammars.read(ask.structure)
            sampling = msgspec.structs.replace(sampling, grammar=grammar)
        if ask.bad_words:
            words = [ids for word in ask.bad_words for ids in self._spellings(word)]
            sampling = msgspec.structs.replace(sampling, bad_words=words)
        if (size := len(encode(sampling))) > SAMPLING_BYTES_MAX:
            param = ask.structure.param if ask.structure is not None else "bad_words"
            message = (
                f"{param}: {size} bytes with all else that tokens are drawn by; at most {SAMPLING_BYTES_MAX}"
            )
            raise ApiError(400, message, param=param, code="too_long")
        return sampling

    def _spellings(self, word: str) -> list[list[int]]:
        """As tokens: at the start of a text, and behind a space where that is another token (as vLLM has it)."""
        try:
            plain, spaced = (self._tokenizer.encode(before + word.lstrip()) for before in ("", " "))
        except TextNotEncoded as problem:
            raise ApiError(400, f"bad_words: {problem}", param="bad_words", code="not_encoded") from None
        another = plain and spaced and plain[0] != spaced[0] and len(plain) == len(spaced)
        return [ids for ids in (plain, spaced if another else []) if ids]
