"""The prompt in an answer, as vLLM has it: its text before what was written, and how likely its own tokens were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from halfmoon.schemas.keys import unpack_tokens
from halfmoon.schemas.prompt_logprobs import PromptLogprob, unpack_logprobs
from halfmoon.workers.frontend.open_request import OpenRequest
from halfmoon.workers.model.text.detokenizer import IncrementalDetokenizer
from halfmoon.workers.model.text.tokenizer import Tokenizer


def echoed_text(request: OpenRequest, tokenizer: Tokenizer) -> str:
    """The prompt's; of a chat, the last message that the answer goes on with."""
    ask = request.ask
    if ask.chat:
        assert ask.messages is not None
        return ask.messages[-1]["content"] if ask.rendering.continue_final else ""
    if ask.return_token_ids:  # which are the prompt
        return ""
    if ask.text is not None and ask.truncate_prompt_tokens is None:
        return ask.text
    return tokenizer.decode(unpack_tokens(request.packed_prompt))


def prompt_logprobs(request: OpenRequest, tokenizer: Tokenizer) -> list[dict[str, Any] | None] | None:
    """By token id, of each of the prompt's tokens and the most likely ones in its place; None: nobody asked."""
    if request.ask.sampling.prompt_logprobs < 0:
        return None
    name = _names(tokenizer)
    told: list[dict[str, Any] | None] = [None]
    for token_id, row in _rows(request):
        entries = {token_id: (row.logprob, row.rank)}
        entries |= {other: (logprob, place) for place, (other, logprob) in enumerate(row.top_logprobs, 1)}
        told.append(
            {
                str(other): {"logprob": logprob, "rank": rank, "decoded_token": name(other)}
                for other, (logprob, rank) in entries.items()
            }
        )
    return told


def echoed_logprobs(request: OpenRequest, tokenizer: Tokenizer) -> dict[str, list[Any]]:
    """The beginning of a completion's `logprobs`: of the prompt that is echoed."""
    name = name_of_id if request.ask.tokens_as_ids else _names(tokenizer)
    top = request.ask.sampling.logprobs
    tokens = [name(token_id) for token_id in unpack_tokens(request.packed_prompt)]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    logprobs: list[float | None] = [None]
    likely: list[dict[str, float] | None] = [None]
    for token_id, row in _rows(request):
        logprobs.append(row.logprob)
        # The token itself comes first, and counts, as in vLLM.
        entries = list(dict([(token_id, row.logprob), *row.top_logprobs]).items())[: top + 1]
        likely.append({name(other): logprob for other, logprob in entries})
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likely, "text_offset": offsets}


def name_of_id(token_id: int) -> str:
    """vLLM's, of a token that is told by its id."""
    return f"token_id:{token_id}"


def _rows(request: OpenRequest) -> Iterator[tuple[int, PromptLogprob]]:
    """Each token but the first."""
    rows = unpack_logprobs(request.prompt_logprobs, request.ask.sampling.prompt_logprobs)
    return zip(unpack_tokens(request.packed_prompt)[1:], rows, strict=True)


def _names(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A token's text, of a control token too."""

    @functools.cache
    def name(token_id: int) -> str:
        text = IncrementalDetokenizer(tokenizer, tokenizer.control_bytes)
        return text.push([token_id]) + text.flush()

    return name
