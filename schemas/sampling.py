"""Sampling parameters and sampled tokens, as they travel between frontend and workers.

Log probabilities of a prompt's own tokens travel with the answer's first token, packed. A row for every token but the
first, before which there is nothing: its rank (1: the most likely) and log probability, then (token id, log
probability) of the most likely ones, as many as were asked for. Little-endian u32 and f32, so that a prompt of
thousands of tokens fits in one message and no bit is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from halfmoon.schemas.types import REQUEST_AROUND_BYTES, PackedLogprobs, Part

#: Generated tokens that may stand in the same message (`workers.decode.deliveries`).
_DELIVERED_BYTES = 128 << 10


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

    @property
    def reads_prompt(self) -> bool:
        """A draw depends on the prompt's tokens, beside their KV."""
        return self.repetition_penalty != 1.0

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


class PromptLogprob(NamedTuple):
    """One token of a prompt, given all before it; `top_logprobs` are (token id, logprob), the most likely first."""

    rank: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


def pack_logprobs(rows: Iterable[tuple[int, float, Iterable[tuple[int, float]]]], top: int) -> bytes:
    """Rows as `PromptLogprob` has them. `top`: how many of the most likely tokens every row has."""
    row = _row(top)
    return b"".join(
        row.pack(rank, logprob, *(part for entry in likely for part in entry))
        for rank, logprob, likely in rows
    )


def unpack_logprobs(packed: bytes, top: int) -> Iterator[PromptLogprob]:
    """Raises `struct.error` when `packed` is no such rows."""
    for rank, logprob, *flat in _row(top).iter_unpack(packed):
        yield PromptLogprob(rank, logprob, tuple(zip(flat[::2], flat[1::2], strict=True)))


def packed_bytes(prompt_tokens: int, top: int) -> int:
    """The length of all rows of a prompt of `prompt_tokens`."""
    return (prompt_tokens - 1) * _row(top).size


def scored_tokens_max(payload_bytes_max: int, top: int) -> int:
    """Tokens of the longest prompt whose rows fit, in base64, in one message with the first tokens of its answer."""
    room = payload_bytes_max - REQUEST_AROUND_BYTES - _DELIVERED_BYTES
    return max(0, room * 3 // 4 // _row(top).size) + 1


def _row(top: int) -> struct.Struct:
    return struct.Struct("<If" + "If" * top)
