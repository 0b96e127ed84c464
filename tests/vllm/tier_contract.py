"""Runs in vLLM's environment: what of its interfaces is not as `HalfmoonTier` and `HalfmoonConnector` were written for,
by name.

`tier_contract.py NATS_URL NODE`: prints one JSON object, `differences` (none, while the two fit) and `story`: what
vLLM's own manager of tiers, with ours over a real store agent, did with real rows.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingSpec,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from halfmoon.store.adapters.vllm_connector import HalfmoonConnector
from halfmoon.store.adapters.vllm_tier import EVENTS, HalfmoonTier

sys.path.append(str(Path(__file__).parents[2]))

from tests.eventually import BOUND_S, eventually_here

ROW_BYTES, CHUNKS = 8192, 8
#: Parameters and result of each method that vLLM calls; those marked are abstract.
METHODS = {
    "__init__": "offloading_spec primary_kv_view tier_type backpressure_detector -> None",
    "lookup*": "key req_context -> LookupResult",
    "submit_store*": "job_metadata -> None",
    "submit_load*": "job_metadata -> None",
    "get_finished_jobs*": " -> Iterable[JobResult]",
    "has_pending_work": " -> bool",
    "take_events": " -> Iterable[OffloadingEvent]",
    "touch": "keys req_context -> _empty",
    "on_new_request*": "req_context -> RequestOffloadingContext",
    "on_request_finished": "req_context -> None",
    "serve_external_requests": "parent -> None",
    "on_schedule_end": "context -> None",
    "drain_jobs*": " -> None",
    "shutdown": " -> None",
    "build_metric_definitions": "extra_config -> dict[str, OffloadingMetricMetadata]",
    "get_stats": " -> OffloadingConnectorStats | None",
}
#: Of connectors, likewise.
CONNECTOR_METHODS = {
    "__init__": "vllm_config role kv_cache_config -> _empty",
    "get_num_new_matched_tokens*": "request num_computed_tokens -> tuple[int | None, bool]",
    "update_state_after_alloc*": "request blocks num_external_tokens -> _empty",
    "build_connector_meta*": "scheduler_output -> KVConnectorMetadata",
    "request_finished": "request block_ids -> tuple[bool, dict[str, typing.Any] | None]",
    "register_kv_caches": "kv_caches -> _empty",
    "bind_connector_metadata": "connector_metadata -> None",
    "start_load_kv*": "forward_context kwargs -> None",
    "wait_for_layer_load*": "layer_name -> None",
    "save_kv_layer*": "layer_name kv_layer attn_metadata kwargs -> None",
    "wait_for_save*": " -> _empty",
    "get_finished": "finished_req_ids -> tuple[set[str] | None, set[str] | None]",
    "get_block_ids_with_load_errors": " -> set[int]",
    "shutdown": " -> _empty",
}
INTERFACES: list[tuple[type, type, dict[str, str]]] = [
    (SecondaryTierManager, HalfmoonTier, METHODS),
    (KVConnectorBase_V1, HalfmoonConnector, CONNECTOR_METHODS),
]
#: What the connector reads of vLLM's own objects, which have more.
READ: dict[type, str] = {
    SchedulerOutput: "num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs kv_connector_block_state",
    KVConnectorBlockState: "resolve_block_ids",
    NewRequestData: "req_id num_computed_tokens",
    CachedRequestData: "req_ids num_computed_tokens",
    KVTransferConfig: "kv_connector_extra_config kv_connector_module_path",
    ParallelConfig: "tensor_parallel_size pipeline_parallel_size rank world_size",
}
FIELDS: dict[type, str] = {
    TransferJob: "job_id keys chunk_ids is_promotion req_context submit_time",
    JobResult: "job_id success successful_keys transfer_time transfer_bytes",
    ReqContext: "req_id kv_transfer_params kv_hints load_tier_filter _state _offload_key_positions",
    RequestOffloadingContext: "policy",
    OffloadingModelConfig: "name dtype",
    OffloadingCacheConfig: "tokens_per_hash blocks_per_chunk",
    OffloadingGroupConfig: "tokens_per_block layer_names group_id",
    OffloadingParallelConfig: "rank world_size tp_size pp_size pcp_size dcp_size data_parallel_index"
    " data_parallel_size data_parallel_rank_local is_parallelism_agnostic",
    OffloadingConfig: "groups worker_kv_bytes_per_block enable_kv_cache_events extra_config engine_id model cache"
    " parallel replicated_layout canonical_layout kv_cache_layout",
}
MEMBERS: dict[type, str] = {
    LookupResult: "MISS HIT HIT_PENDING RETRY",
    OffloadPolicy: "CHUNK_LEVEL REQUEST_LEVEL",
}


def shape(method: Any) -> str:
    """Its parameters by name, without `self`, and what it returns."""
    signature = inspect.signature(method)
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    result = signature.return_annotation
    text = result if isinstance(result, str) else getattr(result, "__name__", str(result))
    if not isinstance(result, str | type) and result is not None:  # an alias like Iterable[JobResult]
        text = str(result).replace(f"{result.__module__}.", "")
        for argument in getattr(result, "__args__", ()):
            text = text.replace(f"{argument.__module__}.", "")
    return f"{' '.join(names)} -> {text}"


def differences() -> list[str]:
    found = [fault for interface in INTERFACES for fault in of_interface(*interface)]
    for kind, names in READ.items():
        there = {field.name for field in dataclasses.fields(kind)}
        found += [f"{kind.__name__}.{name} is gone" for name in names.split() if name not in there]
    for kind, fields in FIELDS.items():
        if (there := " ".join(field.name for field in dataclasses.fields(kind))) != fields:
            found.append(f"{kind.__name__} has {there!r}, had {fields!r}")
    for kind, members in MEMBERS.items():
        if (there := " ".join(kind.__members__)) != members:  # type: ignore[attr-defined]
            found.append(f"{kind.__name__} has {there!r}, had {members!r}")
    return found


def of_interface(theirs: type, ours: type, methods: dict[str, str]) -> list[str]:
    found, abstract = [], getattr(theirs, "__abstractmethods__", frozenset())
    for marked, expected in methods.items():
        name = marked.rstrip("*")
        method = getattr(theirs, name, None)
        if method is None:
            found.append(f"{theirs.__name__}.{name} is gone")
            continue
        if (there := shape(method)) != expected:
            found.append(f"{theirs.__name__}.{name} is {there!r}, was {expected!r}")
        if (name in abstract) != marked.endswith("*"):
            found.append(f"{theirs.__name__}.{name}: abstract or not has changed")
        taken = inspect.signature(getattr(ours, name)).parameters
        wants = [word for word in expected.split(" -> ")[0].split() if word]
        if not set(wants) <= set(taken):
            found.append(f"{ours.__name__}.{name} takes {list(taken)}, not {wants}")
    more = abstract - {name.rstrip("*") for name in methods}
    return found + [f"{theirs.__name__}.{name} is new and abstract" for name in sorted(more)]


class Spec(OffloadingSpec):
    """A configuration of one worker; the tier reads no more of a spec."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def spec(engine_id: str) -> Spec:
    return Spec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=32, layer_names=("layer.0",), group_id=0),),
            worker_kv_bytes_per_block=ROW_BYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id=engine_id,
            model=OffloadingModelConfig(name="m", dtype="float32"),
            cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
                data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
            ),
        )
    )  # fmt: skip


class Engine:
    """vLLM's manager of tiers over one of ours, driven as its scheduler drives it."""

    def __init__(self, url: str, node: str) -> None:
        self.name = f"t{uuid.uuid4().hex[:8]}"
        region = SharedOffloadRegion(self.name, CHUNKS, None, ROW_BYTES, ROW_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(num_chunks=CHUNKS, mmap_region=region)
        config = {"type": "HalfmoonTier", "module_path": HalfmoonTier.__module__, "nats": url, "node": node}
        config |= {"connect_s": BOUND_S, "lookup_s": BOUND_S, "transfer_s": BOUND_S}
        view = self.primary.get_kv_memoryview()
        self.rows = np.asarray(view).view(np.uint8)
        tier = SecondaryTierFactory.create_secondary_tier(config, view, spec(self.name))
        self.manager = TieringOffloadingManager(self.primary, [tier])

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def store(self, keys: list[Any], values: list[int]) -> None:
        request = ReqContext(req_id="writer")
        self.manager.on_new_request(request)
        prepared = self.manager.prepare_store(keys, request)
        assert prepared is not None
        for row, value in zip(prepared.store_spec.chunk_ids, values, strict=True):  # type: ignore[attr-defined]
            self.rows[row] = value
        self.manager.complete_store(keys, request)
        self.manager.on_request_finished(request)
        self.settle()

    def settle(self) -> None:
        def idle() -> bool:
            self.manager._maybe_process_finished_jobs()
            self.step()
            return not self.manager.has_pending_work()

        self.step()
        eventually_here(idle, "vLLM's manager has no work", every_s=0.005)

    def load(self, key: Any) -> tuple[list[str], int | None]:
        """The answers in their order, without repetitions; and the byte that the row is full of, if it was a hit."""
        request, told = ReqContext(req_id="reader"), []
        self.manager.on_new_request(request)

        def known() -> bool:
            result = self.manager.lookup(key, request).name
            told.extend([result] if told[-1:] != [result] else [])
            self.step()
            return told[-1] not in ("RETRY", "HIT_PENDING")

        eventually_here(known, "the tier has a verdict", every_s=0.005)
        value = None
        if told[-1] == "HIT":
            (row,) = self.manager.prepare_load([key], request).chunk_ids  # type: ignore[attr-defined]
            (value,) = {int(byte) for byte in self.rows[row]}
            self.manager.complete_load([key], request)
        self.manager.on_request_finished(request)
        return told, value

    def close(self) -> dict[str, Any]:
        stats = self.manager.get_stats()
        counted = {} if stats is None else stats.data["data"].get(EVENTS, {})
        del self.rows
        self.manager.shutdown()
        return {event: count for (event,), count in counted.items()}


def story(url: str, node: str) -> dict[str, Any]:
    keys = [make_offload_key(uuid.uuid4().bytes * 2, 0) for _ in range(3)]
    first = Engine(url, node)
    told: dict[str, Any] = {"cold": first.load(keys[0])}
    first.store(keys[:2], [41, 42])
    told["first"] = first.close()
    second = Engine(url, node)
    told["warm"] = [second.load(key) for key in keys]
    told["second"] = second.close()
    return told


if __name__ == "__main__":
    print(json.dumps({"differences": differences(), "story": story(*sys.argv[1:])}))
