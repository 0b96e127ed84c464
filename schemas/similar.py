"""Prompts that are alike but not equal: how alike two are, what of one stood in for another, and documents in them.

A prompt's *sketch* is a sample of its shingles (runs of a few tokens): the share of samples that two sketches have in
common is about the share of shingles that the prompts have in common. The root of the prompt's block keys goes into
every sample, so prompts of two tenants, models or salts have none in common.

Source: Broder, On the resemblance of documents (1997); Li, Owen, Zhang, One Permutation Hashing (2012); SemShareKV
(arXiv 2509.24832) for reuse between such prompts.
"""

from __future__ import annotations

from math import isqrt
from typing import Annotated

from msgspec import Meta

from halfmoon.schemas.keys import chain_keys_packed
from halfmoon.schemas.types import KEY_BYTES, BlockKeys, Blocks, Id, Part, Tokens

SAMPLES = 64
_SAMPLE_BYTES = 4
#: The mean over 30 layers of `halfmoon.workers.model.similar.selective.Schedule`, where a reference has all tokens.
_COMPUTED_PERCENT = 16
#: Of a sample that no shingle fell into.
NO_SAMPLE = 0xFFFF_FFFF

#: `SAMPLES` samples of four bytes; b"": none was made.
Sketch = Annotated[
    bytes, Meta(max_length=SAMPLES * _SAMPLE_BYTES, description="a sample of the runs of a prompt's tokens")
]


#: That a request may name, and the least tokens of one: what is trimmed of its ends must leave most of it.
DOCUMENTS_MAX, DOCUMENT_TOKENS_MIN = 32, 32
#: A text's first and last tokens may be others where other text is beside it.
_END_TOKENS = 4


class NamedDocument(Part, frozen=True):
    """A part of a prompt that others may have too. `name`: its key as if it were the first block of a prompt."""

    name: Annotated[bytes, Meta(max_length=KEY_BYTES)]
    first_token: Tokens
    tokens: Tokens


NamedDocuments = Annotated[
    list[NamedDocument],
    Meta(
        max_length=DOCUMENTS_MAX,
        description="parts of the prompt for which KV of other prompts that have them may stand in",
    ),
]


class ReferencePart(Part, frozen=True, kw_only=True):
    """Blocks of another prompt, from `first_block` of it on: `node_id` has them."""

    node_id: Id
    block_keys: BlockKeys
    #: Other nodes that have all of them, for the case that this one fails.
    replicas: list[Id] = []
    first_block: Blocks = 0


class Reference(ReferencePart, frozen=True, kw_only=True):
    """A prompt whose KV may stand in for another's.

    `resemblance`: percent of shingles in common, as the sketches tell; of documents, percent of the tokens behind the
    exact prefix.
    """

    resemblance: Annotated[int, Meta(ge=0, le=100)]
    #: It is of a document that the request names; `others`: of further ones. No block is in two of them.
    named: bool = False
    others: list[ReferencePart] = []

    @property
    def parts(self) -> list[ReferencePart]:
        """Its own blocks, and those of further documents."""
        return [self, *self.others]


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
    """Where the share r of all shingles is common to both, `2r / (1 + r)` of these tokens are in the reference."""
    return reuse_of(tokens, tokens * 200 * resemblance // (100 * (100 + resemblance)), resemblance)


def reuse_of(tokens: int, found: int, resemblance: int) -> SimilarReuse:
    """`found` of these tokens are in a reference.

    The others are computed in every layer, and are the first ones of the schedule's. So few of them cost nothing, and
    many their own time. The root of both squares goes from one to the other, and is within three percent of all
    tokens of what the schedule comes to.
    """
    computed = isqrt((tokens * _COMPUTED_PERCENT // 100) ** 2 + (tokens - found) ** 2)
    return SimilarReuse(
        tokens=found,
        computed_tokens=min(tokens, computed),
        resemblance=resemblance,
    )


def kept_tokens(tokens: int, percent: int) -> int:
    """Of so many tokens, those whose KV a layer keeps; 0 percent: all."""
    return max(1, tokens * percent // 100) if percent else tokens


def named_document(root_key: bytes, prompt: bytes, document: bytes) -> NamedDocument | None:
    """The document, both as packed tokens, in the prompt; None where it is too short, or is not there.

    A tokenizer may join its ends with what is beside it in the prompt. So without these it is there too.
    """
    if len(document) < 4 * DOCUMENT_TOKENS_MIN:
        return None
    name = chain_keys_packed(root_key, document, len(document) // 4)
    for ends in (0, 4 * _END_TOKENS):
        inner = document[ends : len(document) - ends]
        at = prompt.find(inner)
        while at % 4 and at >= 0:
            at = prompt.find(inner, at + 1)
        if at >= 0:
            return NamedDocument(name=name, first_token=at // 4, tokens=len(inner) // 4)
    return None


def resemblance_percent(sketch: bytes, other: bytes) -> int:
    """Samples that both have, of those that either has; 0 where one of the two is no sketch."""
    if not len(sketch) == len(other) == SAMPLES * _SAMPLE_BYTES:
        return 0
    pairs = zip(memoryview(sketch).cast("I"), memoryview(other).cast("I"), strict=True)
    found = [one == two for one, two in pairs if not one == two == NO_SAMPLE]
    return 100 * sum(found) // len(found) if found else 0


def bands_of(sketch: bytes) -> list[bytes]:
    """Pieces of two samples, each with its place: prompts whose resemblance is 40 % share one in 99 of 100 cases."""
    each = 2 * _SAMPLE_BYTES
    if len(sketch) != SAMPLES * _SAMPLE_BYTES:
        return []
    return [bytes((at // each,)) + sketch[at : at + each] for at in range(0, len(sketch), each)]
