"""CpuTieringSpec: vLLM's tiers on a CPU. vLLM refuses that in one place, `get_worker`; the rest is its own.

For tests alone: the copies between the device's blocks and the rows of host memory are made at once, with one thread.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemoryCopies(OffloadingWorker):
    """One KV cache group, one block a row: block `i` of every tensor lies in its own part of a row."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        assert len(kv_caches.group_data_refs) == 1
        self._region = region
        self._pairs = []
        for each in kv_caches.tensors:
            blocks = each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            self._pairs.append((blocks, region.create_next_worker_view(each.page_size_bytes)))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, rows in self._pairs:
            rows[self._index(dst_spec)] = blocks[self._index(src_spec)]
        return self._end(job_id, src_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, rows in self._pairs:
            blocks[self._index(dst_spec)] = rows[self._index(src_spec)]
        return self._end(job_id, src_spec)

    @staticmethod
    def _index(spec: Any) -> torch.Tensor:
        return torch.from_numpy(spec.block_ids).long()

    def _end(self, job_id: int, spec: Any) -> bool:
        size = len(spec.block_ids) * sum(rows.shape[1] for _, rows in self._pairs)
        self._finished.append(
            TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=1e-9)
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemoryCopies(kv_caches, region)
        return self._worker
