"""Run by vLLM's Python: its own block pool and publisher's words for two prompts, and its request class on our bodies.

Prints JSON: `payloads` (hexadecimal), what of our completion its class took, and `place`: whether an answer as a whole,
and one of a stream, says where another engine gets the KV.
"""

from __future__ import annotations

import json
import sys
import time

import msgspec
from vllm.distributed.kv_events import KVEventBatch
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionStreamResponse,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

asked = json.load(sys.stdin)
size = asked["block_size"]
init_none_hash(sha256)
pool = BlockPool(64, True, size, enable_kv_cache_events=True)
payloads: list[str] = []


def publish() -> None:
    batch = KVEventBatch(ts=time.time(), events=pool.take_events(), data_parallel_rank=0)
    payloads.append(msgspec.msgpack.encode(batch).hex())


for number, salt in enumerate(asked["salts"]):
    request = Request(
        request_id=f"r{number}",
        prompt_token_ids=asked["tokens"],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt or None,
        block_hasher=get_request_block_hasher(size, sha256),
    )
    blocks = pool.get_new_blocks(len(asked["tokens"]) // size)
    half = len(blocks) // 2
    for done, whole in ((0, half), (half, len(blocks))):
        pool.cache_full_blocks(request, blocks, done, whole, size, 0)
        publish()
    pool.free_blocks(reversed(blocks))
    if number == 0:
        pool.evict_blocks({blocks[-1].block_id})
        publish()
pool.reset_prefix_cache()
publish()
taken = CompletionRequest(**asked["body"])
params = taken.to_sampling_params(16, {})
half = CompletionRequest(**asked["prefill"]).to_sampling_params(16, {})
unknown = sorted({*asked["body"], *asked["prefill"]} - set(CompletionRequest.model_fields))
found = {
    "payloads": payloads,
    "unknown": unknown,
    "top_k": params.top_k,
    "seed": params.seed,
    "asks_for_place": (half.extra_args or {}).get("kv_transfer_params"),
    "ends_by_length_alone": [half.min_tokens, half.ignore_eos, half.stop_token_ids],
    "place": [
        "kv_transfer_params" in kind.model_fields for kind in (CompletionResponse, CompletionStreamResponse)
    ],
}
print(json.dumps(found))
