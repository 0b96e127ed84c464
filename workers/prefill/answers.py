"""The messages of a prefill once its prompt is computed: to the decode worker, and to the log."""

from __future__ import annotations

from typing import Protocol

from halfmoon.schemas.decisions import LayerStage, StartPrefill
from halfmoon.schemas.events import PrefillFailed, PrefillFinished
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.similar import SimilarReuse
from halfmoon.workers.prefill.actions import EndOrder
from halfmoon.workers.prefill.stages import REASON_CHARACTERS_MAX, JobRules


class Computed(Protocol):
    """A `Job` whose prompt is computed, or never will be."""

    order: StartPrefill
    rules: JobRules
    arrived_ns: int
    started_ns: int
    compute_ns: int
    stage_wait_ns: int
    finished_at_ns: int
    put_ns: int
    cached_blocks: int
    fetched_blocks: int
    fetch_node_id: str
    fetched_bytes: int
    fetch_ns: int
    stages: list[LayerStage]
    kept: bool
    cancelled: bool
    result: PrefillResult | None
    similar: SimilarReuse | None


def cached_here(job: Computed) -> int:
    """Tokens that were not computed, because this node had their KV: all of a prompt that was kept."""
    return job.order.prompt_tokens if job.kept else job.cached_blocks * job.rules.layout.block_tokens


def result_of(job: Computed, first: SampledToken) -> PrefillResult:
    """The first token, and how the prefill went."""
    return PrefillResult(
        order_id=job.order.order_id,
        request_id=job.order.request_id,
        first=first,
        queue_ns=job.started_ns - job.arrived_ns,
        transfer_ns=job.put_ns + job.fetch_ns,
        compute_ns=job.compute_ns,
        cached_tokens=cached_here(job) + job.fetched_blocks * job.rules.layout.block_tokens,
        finished_at_ns=job.finished_at_ns,
        similar=job.similar,
    )


def finished_of(job: Computed, pushed_bytes: int, push_ns: int, *, decodes: bool) -> PrefillFinished:
    """The answer to the order."""
    block_tokens = job.rules.layout.block_tokens
    return PrefillFinished(
        order_id=job.order.order_id,
        request_id=job.order.request_id,
        worker_id=job.rules.worker_id,
        queue_ns=job.started_ns - job.arrived_ns,
        transfer_ns=job.put_ns + job.fetch_ns,
        compute_ns=job.compute_ns,
        cached_local_tokens=cached_here(job),
        cached_fetched_tokens=job.fetched_blocks * block_tokens,
        fetched_bytes=job.fetched_bytes,
        fetch_node_id=job.fetch_node_id if job.fetched_blocks else "",
        fetch_ns=job.fetch_ns,
        pushed_bytes=pushed_bytes,
        push_ns=push_ns,
        prompt_tokens=job.order.prompt_tokens,
        stages=len(job.stages),
        stage_wait_ns=job.stage_wait_ns,
        similar=job.similar,
        decodes=decodes,
    )


def failed_of(job: Computed, reason: str, *, retryable: bool, stage_id: str) -> PrefillFailed:
    """The answer to an order that comes to nothing. `stage_id`: the worker of another stage that it failed for."""
    return PrefillFailed(
        order_id=job.order.order_id,
        request_id=job.order.request_id,
        worker_id=job.rules.worker_id,
        reason=reason[:REASON_CHARACTERS_MAX],
        retryable=retryable,
        stage_id=stage_id,
    )


def end_of(job: Computed, error: str) -> EndOrder:
    """The last action of the order. `error`: "" where it has a result."""
    return EndOrder(
        order_id=job.order.order_id,
        arrived_ns=job.arrived_ns,
        cancelled=job.cancelled,
        error=error,
        result=None if error else job.result,
        cached_local_tokens=cached_here(job),
        cached_fetched_tokens=job.fetched_blocks * job.rules.layout.block_tokens,
    )
