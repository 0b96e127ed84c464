"""HalfmoonTier: halfmoon's store as a secondary tier of vLLM's KV offloading. vLLM imports this module by its path.

It runs in the process of vLLM's scheduler. vLLM moves KV between the device and rows of host memory (its primary tier);
the tier moves those rows between host memory and the store, whole, as bytes. docs/vllm.md has its configuration.

Source: the interface, `SecondaryTierManager`, is vLLM's (0.32), which calls it experimental; `make test-vllm-tier`
names each change of another release.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from halfmoon.store.adapters.tier import StoreTier, TierOptions

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        OffloadingCounterMetadata,
        OffloadingMetricMetadata,
        OffloadingSpec,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as problem:
    raise ImportError(
        f"{__name__} is for vLLM's own process: install halfmoon into the environment of a vLLM of 0.32 ({problem})"
    ) from problem

EVENTS = "vllm:kv_offload_halfmoon_events"


def namespace_of(spec: OffloadingSpec, *, row_bytes: int, weight_version: str) -> bytes:
    """All that a block's bytes depend on beside its tokens. vLLM's release is among it: it may lay out KV anew."""
    config = spec.config
    parallel = config.parallel
    fields = {
        "engine": f"vllm {vllm.__version__}",
        "model": config.model.name,
        "weight_version": weight_version,
        "dtype": config.model.dtype,
        "rank": parallel.rank,
        "world": [
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ],
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        "row_bytes": row_bytes,
    }
    return json.dumps(fields, sort_keys=True).encode()


class HalfmoonTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module. vLLM makes it, and calls it from its scheduler's thread."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of `TierOptions`. Raises ValueError, naming the field; waits for the store a little."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        wanted = TierOptions.of(options)
        rows = np.asarray(primary_kv_view).view(np.uint8)
        namespace = namespace_of(
            offloading_spec, row_bytes=self.block_size_bytes, weight_version=wanted.weight_version
        )
        self._store = StoreTier(rows, wanted, namespace=namespace)
        self._store.start()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        match self._store.lookup(key, req_context.req_id):
            case None:
                return LookupResult.RETRY
            case found:
                return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=True)

    def _submit(self, job: TransferJob, *, load: bool) -> None:
        self._store.submit(job.job_id, list(job.keys), [int(row) for row in job.chunk_ids], load=load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [
            JobResult(
                job_id=job.job_id,
                success=len(job.moved) == len(job.keys),
                # A store job has no part that counts: vLLM asks for the keys of loads alone.
                successful_keys=job.moved if job.load and len(job.moved) < len(job.keys) else None,
                transfer_time=job.seconds,
                transfer_bytes=len(job.moved) * self.block_size_bytes,
            )
            for job in self._store.finished()
        ]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._store.forget(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._store.flush()

    def drain_jobs(self) -> None:
        self._store.drain()

    def shutdown(self) -> None:
        self._store.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        told = (
            "Blocks that moved, or did not, and lookups that came too late, of the halfmoon tier, by event."
        )
        return {EVENTS: OffloadingCounterMetadata(documentation=told, labelnames=("event",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        counts = self._store.counts()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for event, count in sorted(counts.items()):
            stats.increase_counter(EVENTS, count, (event,))
        return stats
