"""Log probabilities of a prompt's own tokens, as they travel with the answer's first token.

A row for every token but the first, before which there is nothing: its rank (1: the most likely) and log probability,
then (token id, log probability) of the most likely ones, as many as were asked for. Little-endian u32 and f32, so that
a prompt of thousands of tokens fits in one message and no bit is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from halfmoon.schemas.types import REQUEST_AROUND_BYTES

#: Generated tokens that may stand in the same message (`workers.decode.deliveries`).
_DELIVERED_BYTES = 128 << 10


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
