"""The prompt in an answer, as vLLM has it: its text before what was written, and how likely its own tokens were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halfmoon.schemas.keys import unpack_tokens
from halfmoon.schemas.sampling import PromptLogprob, SampledToken, unpack_logprobs
from halfmoon.workers.frontend.open_request import OpenRequest
from halfmoon.workers.frontend.openai.logprobs import TextOffsets, completion_logprobs, name_of
from halfmoon.workers.model.text.control_text import ControlAsText, decode_all
from halfmoon.workers.model.text.tokenizer import IncrementalDetokenizer, Tokenizer


def echoed_text(request: OpenRequest, tokenizer: Tokenizer) -> str:
    """The prompt's; of a chat, the last message that the answer goes on with."""
    prompt = request.ask.prompt
    if prompt.messages is not None:
        return prompt.messages[-1]["content"] if prompt.rendering.continue_final else ""
    if prompt.text is not None and prompt.truncate_tokens is None:
        return prompt.text
    ids = unpack_tokens(request.packed_prompt)
    return tokenizer.decode(ids) if request.ask.answer.skip_special_tokens else decode_all(tokenizer, ids)


def prompt_logprobs(request: OpenRequest, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """By token id, of each of the prompt's tokens and the most likely ones in its place; of the first one None."""
    told: list[dict[str, Any] | None] = [None]
    for token_id, row in _rows(request):
        entries = {token_id: (row.logprob, row.rank)}
        entries |= {other: (logprob, place) for place, (other, logprob) in enumerate(row.top_logprobs, 1)}
        # Of equal ones the token itself may stand behind others: its own rank counts.
        entries[token_id] = (row.logprob, row.rank)
        told.append(
            {
                str(other): {"logprob": logprob, "rank": rank, "decoded_token": name_of(tokenizer, other)}
                for other, (logprob, rank) in entries.items()
            }
        )
    return told


def echoed_logprobs(
    request: OpenRequest, tokenizer: Tokenizer, echoed: str, top: int
) -> dict[str, list[Any]]:
    """The beginning of a completion's `logprobs`: of the prompt, of which `echoed` is shown.

    `request`: the one whose prompt was scored. Offsets are places in `echoed`; tokens that are not shown there (a mark
    that the model puts before every text) take none.
    """
    ids = unpack_tokens(request.packed_prompt)
    samples = [SampledToken(token_id=ids[0])]
    samples += [
        SampledToken(token_id=token_id, logprob=row.logprob, top_logprobs=list(row.top_logprobs))
        for token_id, row in _rows(request)
    ]
    whole = decode_all(tokenizer, ids)
    shows_control = echoed in whole
    text_tokens = ControlAsText(tokenizer) if shows_control else tokenizer
    told = completion_logprobs(tokenizer, samples, top, TextOffsets(IncrementalDetokenizer(text_tokens)))
    told["token_logprobs"][0] = told["top_logprobs"][0] = None
    before = whole.index(echoed) if shows_control else 0
    told["text_offset"] = [min(max(offset - before, 0), len(echoed)) for offset in told["text_offset"]]
    return told


def _rows(request: OpenRequest) -> Iterator[tuple[int, PromptLogprob]]:
    """Each token but the first."""
    rows = unpack_logprobs(request.prompt_logprobs, request.ask.sampling.prompt_logprobs)
    return zip(unpack_tokens(request.packed_prompt)[1:], rows, strict=True)
