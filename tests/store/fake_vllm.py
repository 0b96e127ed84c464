"""Stands where vLLM's classes of a tier and of a connector would: those that `HalfmoonTier` and `HalfmoonConnector`
name, with the fields that they use.

`tests/vllm/tier_contract.py` compares the real ones with what the two were written for.
"""

from __future__ import annotations

import enum
import importlib
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

LookupResult = enum.Enum("LookupResult", "MISS HIT HIT_PENDING RETRY")
Locality = enum.Enum("Locality", {"LOCAL": "LOCAL", "REMOTE": "REMOTE"})


@dataclass
class TransferJob:
    job_id: int
    keys: tuple[bytes, ...]
    chunk_ids: np.ndarray


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.counts = Counter[tuple[str, ...]]()

    def increase_counter(self, name: str, count: int, labels: tuple[str, ...]) -> None:
        self.counts[name, *labels] += count


class SecondaryTierManager(ABC):
    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, bp: Any) -> None:
        self.block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type

    @abstractmethod
    def lookup(self, key: bytes, req_context: Any) -> LookupResult: ...

    @abstractmethod
    def submit_store(self, job_metadata: TransferJob) -> None: ...

    @abstractmethod
    def submit_load(self, job_metadata: TransferJob) -> None: ...

    @abstractmethod
    def get_finished_jobs(self) -> list[JobResult]: ...

    @abstractmethod
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext: ...

    @abstractmethod
    def drain_jobs(self) -> None: ...


class KVConnectorMetadata:
    pass


class KVConnectorBase_V1:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self.metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.metadata = connector_metadata

    def _get_connector_metadata(self) -> Any:
        return self.metadata


BASE = "vllm.v1.kv_offload"
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
        "OffloadingConnectorStats": OffloadingConnectorStats
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": KVConnectorBase_V1, "KVConnectorMetadata": KVConnectorMetadata,
    },
    f"{BASE}.base": {
        "Locality": Locality, "LookupResult": LookupResult, "OffloadingCounterMetadata": OffloadingCounterMetadata,
        "OffloadingMetricMetadata": OffloadingCounterMetadata, "OffloadingSpec": object, "ReqContext": SimpleNamespace,
        "RequestOffloadingContext": RequestOffloadingContext, "ScheduleEndContext": object,
    },
    f"{BASE}.tiering.base": {
        "JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager, "TransferJob": TransferJob,
    },
}  # fmt: skip


@contextmanager
def installed(adapter: str = "halfmoon.store.adapters.vllm_tier") -> Iterator[ModuleType]:
    """The adapter's module, imported over these classes; neither is there afterwards."""
    paths = {".".join(path.split(".")[:depth]) for path in MODULES for depth in range(1, path.count(".") + 2)}
    before = {name: sys.modules.pop(name, None) for name in (*paths, adapter)}
    sys.modules.update({name: ModuleType(name) for name in paths})
    for path, members in MODULES.items():
        sys.modules[path].__dict__.update(members)
    try:
        yield importlib.import_module(adapter)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def spec(**changes: Any) -> Any:
    """A configuration of one worker."""
    config: dict[str, Any] = {
        "model": SimpleNamespace(name="m", dtype="float32"),
        "parallel": SimpleNamespace(rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        "groups": [SimpleNamespace(tokens_per_block=32, layer_names=("layer.0",))],
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        "kv_cache_layout": "", "canonical_layout": True, "replicated_layout": False,
    }  # fmt: skip
    return SimpleNamespace(config=SimpleNamespace(**{**config, **changes}))
