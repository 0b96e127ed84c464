"""HalfmoonConnector: a prompt's KV from the vLLM that computes it to the one that answers, through halfmoon's store
agents, each layer while the next one is computed. vLLM imports this module by its path.

vLLM makes it twice: in its scheduler's process, which knows requests and blocks, and in its worker's, which has the KV.
What the first one decides goes to the second with each step (`Step`). docs/vllm.md has its configuration.

Source: the interface, `KVConnectorBase_V1`, is vLLM's (0.32), which calls it experimental; `make test-vllm-tier` names
each change of another release. Mooncake (2407.00079), section 5.2 (layer-wise prefill).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from halfmoon.schemas.kv import KV_ORDER, KV_SOURCE
from halfmoon.store.adapters.kv_link import KvLink, KvOptions, KvShape
from halfmoon.store.adapters.kv_receiver import Bytes, KvLoad, KvReceiver
from halfmoon.store.adapters.kv_sender import KvSender, Sent, SentOrder

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
    )
except ImportError as problem:
    raise ImportError(
        f"{__name__} is for vLLM's own process: install halfmoon into the environment of a vLLM of 0.32 ({problem})"
    ) from problem

#: An engine whose requests all wait for KV steps again and again. Such a step lasts so long, unless a load ends: else
#: its two processes take a core each from whoever else is on the host, the engine that computes perhaps.
EMPTY_STEP_S = 0.005
#: A rank may follow it.
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def name_in(params: dict[str, Any], key: str) -> str:
    """A client chose it. "": there is none that an order or a connector may have."""
    value = params.get(key)
    return value if isinstance(value, str) and NAME.fullmatch(value) else ""


def fields_of(config: Any, caches: dict[str, torch.Tensor], weight_version: str) -> dict[str, Any]:
    """All that a block's bytes depend on beside its tokens. vLLM's release is among it: it may lay out KV anew."""
    parallel, cache = config.parallel_config, next(iter(caches.values()))
    return {
        "engine": f"vllm {vllm.__version__}",
        "model": config.model_config.model,
        "weight_version": weight_version,
        "dtype": str(cache.dtype),
        "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank],
        "block_tokens": config.cache_config.block_size,
        "layers": list(caches),
        "shape": list(cache.shape[1:]),
        "device": cache.device.type,
    }


def rows_of(name: str, cache: torch.Tensor) -> torch.Tensor:
    """u8 `[blocks, layer_bytes]`, of the same memory. Raises ValueError."""
    if not cache.is_contiguous():
        raise ValueError(f"KV of {name}: its blocks do not lie one behind the other, {tuple(cache.stride())}")
    return cache.view(cache.shape[0], -1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class SendPart:
    """Blocks of a prompt that a step completes, from `first_block` on, in `block_ids`. `sent`: it is the first step."""

    order_id: str
    first_block: int
    block_ids: Sequence[int]
    last: bool
    sent: Sent | None


@dataclass(slots=True)
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler's connector to the worker's."""

    sends: list[SendPart] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)
    #: Orders whose prompts will not be computed to their end, and requests that wait for KV no more.
    dropped: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Sending:
    order_id: str
    request: Any
    #: Blocks before this one were handed to the worker.
    next_block: int = 0
    begun: bool = False


class HalfmoonConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module. Methods in the order in which vLLM calls them, the scheduler's first."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ValueError, naming the field."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._options = KvOptions.of(dict(self._kv_transfer_config.kv_connector_extra_config))
        self._block_tokens: int = vllm_config.cache_config.block_size
        if kv_cache_config is not None and len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError("HalfmoonConnector: the model has several groups of KV, and one is moved")
        self._step = Step()
        self._sending: dict[str, _Sending] = {}
        #: Requests whose KV was asked for: it is asked for once.
        self._asked: set[str] = set()
        self._link: KvLink | None = None
        self._rows: list[torch.Tensor] = []
        self._layers: dict[str, int] = {}
        self._orders: dict[str, SentOrder] = {}
        self._failed: set[int] = set()

    # --- the scheduler's process ----------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        named = params.get("do_remote_prefill") and name_in(params, KV_ORDER) and name_in(params, KV_SOURCE)
        if not named or request.request_id in self._asked:
            return 0, False
        missing = request.num_prompt_tokens - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params, request_id = request.kv_transfer_params or {}, request.request_id
        if params.get("do_remote_decode") and request_id not in self._sending:
            order_id = name_in(params, KV_ORDER) or uuid.uuid4().hex
            # Two prompts of one name would go into the same slots.
            if not self._is_sent(order_id):
                self._sending[request_id] = _Sending(order_id, request)
        if not num_external_tokens or request_id in self._asked:
            return
        self._asked.add(request_id)
        tokens = request.num_prompt_tokens
        first = (tokens - num_external_tokens) // self._block_tokens
        ids = blocks.get_block_ids()[0][first : self._blocks(tokens)]
        self._step.loads.append(
            KvLoad(request_id, params[KV_ORDER], params[KV_SOURCE], tokens, first, list(ids))
        )

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step, self._step = self._step, Step()
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            sending = self._sending.get(request_id)
            if sending is not None and request_id in computed:
                ids = scheduler_output.kv_connector_block_state.resolve_block_ids(request_id)[0]
                part = self._part(sending, computed[request_id] + tokens, ids)
                if part is not None:
                    step.sends.append(part)
        return step

    def _part(self, sending: _Sending, computed: int, block_ids: Sequence[int]) -> SendPart | None:
        """Blocks that are whole once `computed` tokens are, and were not handed on; with the last token all are."""
        request, tokens = sending.request, sending.request.num_prompt_tokens
        last = computed >= tokens
        end = self._blocks(tokens) if last else computed // self._block_tokens
        first = sending.next_block
        if end <= first:
            return None
        sent = None
        if not sending.begun:
            # Without prefix caching blocks have no names of their own: they go to the asker, and into no store.
            keys = [bytes(key) for key in request.block_hashes[: tokens // self._block_tokens]]
            sent = Sent(sending.order_id, tokens, self._blocks(tokens), keys)
        sending.begun, sending.next_block = True, end
        return SendPart(sending.order_id, first, list(block_ids[first:end]), last, sent)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        if request_id in self._asked:
            self._asked.discard(request_id)
            # One whose KV has come is not known to the worker any more.
            self._step.aborted.append(request_id)
        sending = self._sending.pop(request_id, None)
        if sending is None:
            params = request.kv_transfer_params or {}
            order_id = name_in(params, KV_ORDER) if params.get("do_remote_decode") else ""
            if order_id and not self._is_sent(order_id):
                # It ended before it was scheduled, and its KV may be waited for.
                self._step.dropped.append(order_id)
            return False, None
        if sending.next_block < self._blocks(request.num_prompt_tokens):
            self._step.dropped.append(sending.order_id)
            return False, None
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            KV_ORDER: sending.order_id,
            KV_SOURCE: self._options.name,
        }

    def _is_sent(self, order_id: str) -> bool:
        return any(sending.order_id == order_id for sending in self._sending.values())

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    # --- the worker's process -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Waits for the store a little. Raises ValueError: its blocks, or the engine's, have another shape."""
        rows = {name: rows_of(name, cache) for name, cache in kv_caches.items()}
        sizes = {each.shape[1] for each in rows.values()}
        if len(sizes) > 1:
            raise ValueError(f"KV: layers of several sizes, {sorted(sizes)} bytes a block")
        fields = json.dumps(
            fields_of(self._config, kv_caches, self._options.weight_version), sort_keys=True
        ).encode()
        shape = KvShape(layers=len(rows), layer_bytes=sizes.pop(), name=xxhash.xxh3_128_hexdigest(fields))
        self._rows = list(rows.values())
        self._layers = {name: layer for layer, name in enumerate(rows)}
        self._link = KvLink(self._options, shape, me=self._ranked(self._options.name))
        self._sender = KvSender(self._link, namespace=fields)
        self._receiver = KvReceiver(self._link, self._copy_in)
        self._link.start()

    def bind_connector_metadata(self, connector_metadata: Step) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._link is None:
            return
        for part in connector_metadata.sends:
            if part.sent is not None:
                order = self._sender.begin(part.sent._replace(order_id=self._ranked(part.order_id)))
                if order is not None:
                    self._orders[part.order_id] = order

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step: Step = self._get_connector_metadata()
        if self._link is None:
            return
        for wanted in step.loads:
            names = self._ranked(wanted.order_id), self._ranked(wanted.source_id)
            self._receiver.want(wanted._replace(order_id=names[0], source_id=names[1]))
        for request_id in step.aborted:
            self._receiver.drop(request_id)
        if forward_context.attn_metadata is None and not (step.loads or step.aborted):
            self._receiver.rest(EMPTY_STEP_S)

    def _ranked(self, name: str) -> str:
        """The name of an order or a connector: of several ranks each sends the KV of its own heads or layers."""
        parallel = self._config.parallel_config
        return name if parallel.world_size == 1 else f"{name}-{parallel.rank}"

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded into the step that runs: a request waits for its KV before it is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._link is None or (layer := self._layers.get(layer_name)) is None:
            return
        step: Step = self._get_connector_metadata()
        rows = self._rows[layer]
        for part in step.sends:
            if (order := self._orders.get(part.order_id)) is not None:

                def fill(block: int, slot: Bytes, part: SendPart = part) -> None:
                    torch.from_numpy(slot).copy_(rows[part.block_ids[block - part.first_block]])

                self._sender.write(order, layer, part.first_block, len(part.block_ids), fill)

    def wait_for_save(self) -> None:
        """All is in the node's pool by now: `save_kv_layer` copies. So no block of the engine is kept for it."""
        step: Step = self._get_connector_metadata()
        if self._link is None:
            return
        for part in step.sends:
            if part.last and (order := self._orders.pop(part.order_id, None)) is not None:
                self._sender.end(order)
        for order_id in step.dropped:
            if (order := self._orders.pop(order_id, None)) is not None:
                self._sender.drop(order, "the request has ended")
            else:
                self._sender.refuse(self._ranked(order_id), "the request has ended")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._link is None:
            return None, None
        ended = self._receiver.ended()
        self._failed = {block for load in ended if not load.loaded for block in load.block_ids}
        return None, {load.request_id for load in ended} or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def _copy_in(self, layer: int, block_id: int, slot: Bytes) -> None:
        row = self._rows[layer][block_id]
        row.copy_(torch.from_numpy(slot))
        if row.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link, self._rows = None, []
