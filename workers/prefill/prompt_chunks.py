"""The chunks in which a prompt is computed, and the blocks that may be shared: from an order and what is cached."""

from __future__ import annotations

from typing import Protocol

from halfmoon.schemas.decisions import LayerStage, StartPrefill
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
    token_ids: list[int]
    slots: list[int]
    present: list[int]
    fetched_layer: int
    fetched_blocks: int
    stages: list[LayerStage]
    reference: ReferenceJob | None

    @property
    def prefix_blocks(self) -> int:
        """Blocks that are cached."""


def shared_keys(order: StartPrefill, reply: TakeReply) -> bytes:
    """Keys of the blocks that others may read. Behind what was cached when a reference was chosen there are none: KV
    that a similar prompt stood in for must not be found under the keys of this one.
    """
    if order.reference is None:
        return reply.block_keys
    return reply.block_keys[: order.cached_blocks * KEY_BYTES]


def streams_layers(job: Prepared) -> bool:
    """Whether each layer goes to the decode node once it is computed. Where tokens are left out, not before all
    are: when a reference is lost on the way all are computed in their own places, and others may have been copied.
    """
    leaves_out = job.reference is not None and job.reply.retain_percent > 0
    return job.rules.stream_layers and not leaves_out


def prompt_to_compute(job: Prepared) -> ComputePrompt:
    """All that is not cached."""
    order, block_tokens = job.order, job.rules.layout.block_tokens
    total, begin = len(job.token_ids), job.prefix_blocks * block_tokens
    chunk_tokens = order.chunk_tokens or job.rules.chunk_tokens
    reference = None
    if job.reference is not None:
        reference = job.reference.slots(
            max(begin, order.cached_blocks * block_tokens), job.reply.retain_percent
        )
    # What was to be cached and is not has keys: it is computed whole.
    cut = total if reference is None else reference.first_token
    starts = [*range(begin, cut, chunk_tokens), *range(cut, total, chunk_tokens)]
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
        reference=reference,
    )
