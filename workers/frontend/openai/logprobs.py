"""Log probabilities as OpenAI's chats and completions have them: tokens shown one by one.

A token alone may be a part of a character. In a completion, where tokens are told by their text only, it is then
`bytes:\\xf0\\x9f`, as OpenAI wrote it: every alternative has a key of its own, from which its bytes can be read.
"""

from __future__ import annotations

from typing import Any

from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.model.text.detokenizer import TokenBytes
from halfmoon.workers.model.text.tokenizer import IncrementalDetokenizer, Tokenizer

#: Stands for what is smaller, which JSON may not be able to write.
_LEAST = -9999.0


class TextOffsets:
    """Where the tokens of an answer begin in its text, in characters, in their order.

    A token that goes on with a character begins where the character does.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, begin: int = 0) -> None:
        """`detokenizer`: of this answer, and of nobody else. `begin`: characters before it."""
        self._detokenizer = detokenizer
        self._characters = begin

    def of_next(self, token_id: int) -> int:
        begin = self._characters
        self._characters += len(self._detokenizer.push([token_id]))
        return begin


def chat_logprobs(
    tokenizer: Tokenizer, samples: list[SampledToken], top: int, text_tokens: TokenBytes
) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat choice. The `bytes` are what its tokens add to its text."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = text_tokens.token_bytes(token_id)
        token = raw.decode(errors="replace") or _name(tokenizer, token_id)
        return {"token": token, "logprob": max(logprob, _LEAST), "bytes": list(raw)}

    return {
        "content": [
            {
                **entry(sampled.token_id, sampled.logprob),
                "top_logprobs": [entry(*other) for other in sampled.top_logprobs[:top]],
            }
            for sampled in samples
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer, samples: list[SampledToken], top: int, offsets: TextOffsets
) -> dict[str, Any]:
    """OpenAI's `logprobs` of a completion choice; `offsets`: behind the tokens before these."""
    return {
        "tokens": [_shown(tokenizer, sampled.token_id) for sampled in samples],
        "token_logprobs": [max(sampled.logprob, _LEAST) for sampled in samples],
        "top_logprobs": [_alternatives(tokenizer, sampled, top) for sampled in samples],
        "text_offset": [offsets.of_next(sampled.token_id) for sampled in samples],
    }


def name_of(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a reader sees it: its text, or the name of a control token."""
    return tokenizer.token_bytes(token_id).decode(errors="replace") or _name(tokenizer, token_id)


def _alternatives(tokenizer: Tokenizer, sampled: SampledToken, top: int) -> dict[str, float]:
    """The `top` likeliest tokens, and the one that was drawn, as in vLLM, however likely others were."""
    found = {_shown(tokenizer, sampled.token_id): max(sampled.logprob, _LEAST)}
    for token_id, logprob in sampled.top_logprobs[:top]:
        if token_id == sampled.token_id:
            continue
        key = _shown(tokenizer, token_id)
        # A vocabulary may have one text twice (SentencePiece: <0x41> and A); the likelier one has the plain key.
        found[f"token_id:{token_id}" if key in found else key] = max(logprob, _LEAST)
    return found


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; what is no text of its own by its bytes, or its name."""
    raw = tokenizer.token_bytes(token_id)
    if not raw:
        return _name(tokenizer, token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """A control token, as the vocabulary writes it; "" for ids beyond it."""
    return tokenizer.names([token_id])[0]
