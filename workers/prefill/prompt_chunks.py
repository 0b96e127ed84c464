"""The chunks in which a prompt is computed: from an order, and its cached blocks."""

from __future__ import annotations

from typing import Protocol

from halfmoon.schemas.decisions import LayerStage, StartPrefill
from halfmoon.schemas.tokens import TakeReply
from halfmoon.workers.prefill.actions import ComputePrompt
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

    @property
    def prefix_blocks(self) -> int:
        """Blocks that are cached."""


def prompt_to_compute(job: Prepared) -> ComputePrompt:
    """All that is not cached."""
    order = job.order
    total, begin = len(job.token_ids), job.prefix_blocks * job.rules.layout.block_tokens
    chunk_tokens = order.chunk_tokens or job.rules.chunk_tokens
    starts = range(begin, total, chunk_tokens)
    return ComputePrompt(
        order_id=order.order_id,
        token_ids=job.token_ids,
        chunks=[range(start, min(start + chunk_tokens, total)) for start in starts],
        prefix_blocks=job.prefix_blocks,
        fetched_layer=job.fetched_layer if job.fetched_blocks else job.rules.layout.layers - 1,
        slots=job.slots,
        present=job.present,
        stages=job.stages,
        prompt_logprobs=job.reply.sampling.prompt_logprobs,
        kept_key=kept_key(job),
    )


def kept_key(job: Prepared) -> bytes:
    """The name of a prompt of one block of which further answers are wanted; b"": it is not kept.

    The root key stands for the tenant and the salt. In stages no worker has the KV of all layers.
    """
    short = len(job.token_ids) <= job.rules.layout.block_tokens
    if job.reply.choices < 2 or not short or job.stages:
        return b""
    return job.reply.root_key + job.reply.token_ids
