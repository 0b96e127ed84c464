"""The chunks in which a prompt is computed, and its blocks that may be shared: from an order, and its cached blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from halfmoon.schemas.decisions import LayerStage, StartPrefill
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.tokens import TakeReply
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.prefill.actions import ComputePrompt
from halfmoon.workers.prefill.reference_job import ReferenceJob
from halfmoon.workers.prefill.stages import JobRules


class Prepared(Protocol):
    """A `Job` whose turn has come."""

    order: StartPrefill
    rules: JobRules
    reply: TakeReply
    slots: list[int]
    present: list[int]
    fetched_layer: int
    fetched_blocks: int
    stages: list[LayerStage]
    reference: ReferenceJob | None

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt's tokens."""

    @property
    def prefix_blocks(self) -> int:
        """Blocks that are cached."""

    @property
    def usable_blocks(self) -> int:
        """Blocks that would be of use if they were."""


def chunk_of(layout: Layout, tokens_max: int) -> int:
    """Tokens of a chunk. In exact numerics so many whole blocks that a segment is whole chunks, one block at least."""
    if layout.numerics != "exact":
        return tokens_max
    each = max(1, layout.segment_tokens // layout.block_tokens)
    fitting = (n for n in range(each, 1, -1) if each % n == 0 and n * layout.block_tokens <= tokens_max)
    return next(fitting, 1) * layout.block_tokens


def shared_keys(order: StartPrefill, reply: TakeReply) -> bytes:
    """Keys of the blocks that others may read. Behind what was cached when a reference was chosen there are none: KV
    that a similar prompt stood in for must not be found under the keys of this one.
    """
    if order.reference is None:
        return reply.block_keys
    return reply.block_keys[: order.exact_blocks * KEY_BYTES]


def streams_layers(job: Prepared) -> bool:
    """Whether each layer goes to the decode node once it is computed.

    Where tokens are left out, no layer does before all are computed: a reference that is lost on the way has all tokens
    computed in their own places, and the decode worker does not copy a layer twice.
    """
    leaves_out = job.reference is not None and job.reference.here and job.reply.retain_percent > 0
    return job.rules.stream_layers and not leaves_out


def prompt_to_compute(job: Prepared) -> ComputePrompt:
    """All that is not cached."""
    order, block_tokens = job.order, job.rules.layout.block_tokens
    total, begin = len(job.token_ids), job.prefix_blocks * block_tokens
    chunk_tokens = order.chunk_tokens or job.rules.chunk_tokens
    reference = None
    if job.reference is not None and job.reply.sampling.prompt_logprobs < 0:
        # What was to be cached and is not has keys: it is computed whole.
        exact = min(order.exact_blocks, job.usable_blocks)
        reference = job.reference.slots(max(begin, exact * block_tokens), job.reply.retain_percent)
    cut = total if reference is None else reference.first_token
    # Exact numerics: on a grid of the prompt's, so that none lies in two segments.
    off = begin % chunk_tokens if job.rules.layout.numerics == "exact" else 0
    starts = [*range(begin - off, cut, chunk_tokens), *range(cut, total, chunk_tokens)]
    starts[0] = begin
    return ComputePrompt(
        order_id=order.order_id,
        token_ids=job.token_ids,
        chunks=[range(start, end) for start, end in zip(starts, [*starts[1:], total], strict=True)],
        prefix_blocks=job.prefix_blocks,
        fetched_layer=job.fetched_layer if job.fetched_blocks else job.rules.layout.layers - 1,
        slots=job.slots,
        present=job.present,
        stages=job.stages,
        prompt_logprobs=job.reply.sampling.prompt_logprobs,
        kept_key=kept_key(job),
        reference=reference,
    )


def kept_key(job: Prepared) -> bytes:
    """The name of a prompt of one block of which further answers are wanted; b"": it is not kept.

    The root key stands for the tenant and the salt. In stages no worker has the KV of all layers, and what a similar
    prompt stood in for is kept by none.
    """
    short = len(job.token_ids) <= job.rules.layout.block_tokens
    if job.reply.choices < 2 or not short or job.stages or job.order.reference is not None:
        return b""
    return job.reply.root_key + job.reply.token_ids
