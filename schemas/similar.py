"""Prompts that are alike but not equal: how alike two are, and what of one stood in for another.

A prompt's *sketch* is a sample of its shingles (runs of a few tokens): the share of samples that two sketches have in
common is about the share of shingles that the prompts have in common. The root of the prompt's block keys goes into
every sample, so prompts of two tenants, models or salts have none in common.

Source: Broder, On the resemblance of documents (1997); Li, Owen, Zhang, One Permutation Hashing (2012); SemShareKV
(arXiv 2509.24832) for reuse between such prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta

from halfmoon.schemas.types import BlockKeys, Id, Part, Tokens

#: Tokens of a shingle: fewer and unrelated texts share some; more and every edit costs many.
SHINGLE_TOKENS = 4
SAMPLES = 64
_SAMPLE_BYTES = 4
#: The mean over 30 layers of `halfmoon.workers.model.similar.selective.Schedule`.
_FOUND_PERCENT = 24
#: Of a sample that no shingle fell into.
_NONE = 0xFFFF_FFFF
#: Odd, with bits all over: one for each token of a shingle, then for the end.
_MIXERS = tuple(
    np.uint64(one)
    for one in (
        0x9E37_79B9_7F4A_7C15,
        0xC2B2_AE3D_27D4_EB4F,
        0x1656_67B1_9E37_79F9,
        0x2748_F5A1_27B3_C0D3,
        0xD6E8_FEB8_6659_FD93,
    )
)
_SHIFT, _HALF = np.uint64(29), np.uint64(32)

#: `SAMPLES` samples of four bytes; b"": none was made.
Sketch = Annotated[
    bytes, Meta(max_length=SAMPLES * _SAMPLE_BYTES, description="a sample of the runs of a prompt's tokens")
]


class Reference(Part, frozen=True):
    """A prompt whose KV may stand in for another's: `node_id` has these blocks of it, from the first on.

    `resemblance`: percent of shingles in common, as the sketches tell.
    """

    node_id: Id
    block_keys: BlockKeys
    resemblance: Annotated[int, Meta(ge=0, le=100)]
    #: Other nodes that have all of them, for the case that this one fails.
    replicas: list[Id] = []


class SimilarReuse(Part, frozen=True):
    """What KV of a reference spared: it stood in for `tokens` of the prompt, which were not computed in every layer.

    `computed_tokens`: token-layers that were computed, cached tokens aside, over the number of layers.
    `retained_tokens`: each layer keeps the KV of so many tokens of the prompt; 0: of all.
    """

    tokens: Tokens
    computed_tokens: Tokens
    resemblance: Annotated[int, Meta(ge=0, le=100)]
    retained_tokens: Tokens = 0


def expected_reuse(tokens: int, resemblance: int) -> SimilarReuse:
    """The share `2r / (1 + r)` of these tokens is in a reference where the share r of all shingles is common to both.
    The others are computed in every layer, and those to `_FOUND_PERCENT`, since they stand behind other tokens.
    """
    found = tokens * 200 * resemblance // (100 * (100 + resemblance))
    return SimilarReuse(
        tokens=found,
        computed_tokens=tokens - found + found * _FOUND_PERCENT // 100,
        resemblance=resemblance,
    )


def kept_tokens(tokens: int, percent: int) -> int:
    """Of so many tokens, those whose KV a layer keeps; 0 percent: all."""
    return max(1, tokens * percent // 100) if percent else tokens


def sketch_of(root_key: bytes, token_ids: Sequence[int] | np.ndarray) -> bytes:
    """The sketch of a prompt under a root key; b"" for a prompt shorter than a shingle."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    count = len(ids) - SHINGLE_TOKENS + 1
    if count < 1:
        return b""
    hashes = np.full(count, int.from_bytes(root_key[:8], "little"), dtype=np.uint64)
    for place in range(SHINGLE_TOKENS):
        hashes ^= ids[place : place + count] + np.uint64(1)
        hashes *= _MIXERS[place]
        hashes ^= hashes >> _SHIFT
    hashes *= _MIXERS[-1]
    samples = np.full(SAMPLES, _NONE, dtype="<u4")
    np.minimum.at(samples, (hashes % np.uint64(SAMPLES)).astype(np.int64), (hashes >> _HALF).astype("<u4"))
    return samples.tobytes()


def resemblance_percent(sketch: bytes, other: bytes) -> int:
    """Samples that both have, of those that either has; 0 where one of the two is no sketch."""
    if not len(sketch) == len(other) == SAMPLES * _SAMPLE_BYTES:
        return 0
    pairs = zip(memoryview(sketch).cast("I"), memoryview(other).cast("I"), strict=True)
    found = [one == two for one, two in pairs if not one == two == _NONE]
    return 100 * sum(found) // len(found) if found else 0


def bands_of(sketch: bytes) -> list[bytes]:
    """Pieces of two samples, each with its place: prompts whose resemblance is 40 % share one in 99 of 100 cases."""
    each = 2 * _SAMPLE_BYTES
    if len(sketch) != SAMPLES * _SAMPLE_BYTES:
        return []
    return [bytes((at // each,)) + sketch[at : at + each] for at in range(0, len(sketch), each)]
