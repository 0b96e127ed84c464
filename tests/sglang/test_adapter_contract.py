"""The adapter against the classes of SGLang's wheel: events of its own cache over its own publisher, and its view of a
request of ours. SGLang itself does not run here: it needs a GPU.

HALFMOON_SGLANG_WHEEL names the wheel (`make test-sglang` has pip bring it).
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import importlib
import re
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from halfmoon.schemas.keys import chain_keys, split_keys
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.adapters.engine_blocks import salt_of
from halfmoon.workers.adapters.engines.completion import EngineRefused, read_line, refusal_of
from halfmoon.workers.adapters.engines.words import EngineCompletion, SglangWords
from halfmoon.workers.adapters.mirror import EngineMirror
from tests.eventually import eventually
from tests.ports import HeldPorts
from tests.sglang.wheel import WHEEL, modules_of_wheel, text_of_wheel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEEL, reason="HALFMOON_SGLANG_WHEEL names no wheel"),
]
NAMED = [
    *(f"sglang.srt.mem_cache.{name}" for name in ("base_prefix_cache", "cache_init_params", "events", "evict_policy")),
    *(f"sglang.srt.mem_cache.{name}" for name in ("radix_cache", "utils")),
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.entrypoints.openai.protocol",
    "sglang.srt.environ",
    "sglang.srt.sampling.sampling_params",
    "sglang.srt.utils.network",
]  # fmt: skip
PAGE, OURS = 16, 64
ROOT = b"r" * 16
TOKENS = list(range(1_000, 1_000 + 3 * OURS))
KEYS = split_keys(chain_keys(ROOT, TOKENS, OURS))


def page_hashes(key: Any, before: bytes | None, page_tokens: int) -> list[str]:
    """A chain of hashes, in place of SGLang's compiled one."""
    digest, found = before or b"", []
    for start in range(0, len(key), page_tokens):
        digest = hashlib.sha256(digest + key.token_ids[start : start + page_tokens].tobytes()).digest()
        found.append(digest.hex())
    return found


@pytest.fixture(scope="module", autouse=True)
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with modules_of_wheel(tmp_path_factory.mktemp("sglang"), NAMED):
        utils: Any = importlib.import_module("sglang.srt.mem_cache.utils")
        utils.get_native_hash = page_hashes
        yield


# --- its cache ----------------------------------------------------------------------------------------------


class PublishedCache:
    """SGLang's radix cache, whose events its own publisher sends. `events_format`: default or dynamo."""

    def __init__(self, port: int, events_format: str) -> None:
        from sglang.srt.disaggregation.kv_events import ZmqEventPublisher
        from sglang.srt.mem_cache.radix_cache import RadixCache

        dynamo = events_format == "dynamo"
        self.cache = RadixCache.create_simulated(
            mock_allocator=MagicMock(device=torch.device("cpu")),
            page_size=PAGE,
            enable_kv_cache_events=True,
            dynamo_kv_event_format=dynamo,
        )
        # As with --kv-events-config: it binds a wildcard alone.
        self.publisher = ZmqEventPublisher(
            0, endpoint=f"tcp://*:{port}", replay_endpoint=f"tcp://*:{port + 1}"
        )

    def compute(self, tokens: list[int], salt: str | None, extra_key: str | None = None) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", tokens), extra_key, cache_salt=salt)
        self.cache.insert(InsertParams(key=key, value=torch.arange(len(tokens))))
        self.publish()

    def evict(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens))
        self.publish()

    def reset(self) -> None:
        self.cache.reset()
        self.publish()

    def publish(self) -> None:
        """As its scheduler does after each batch."""
        from sglang.srt.disaggregation.kv_events import KVEventBatch

        if events := self.cache.take_events():
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))


@pytest.fixture(params=["default", "dynamo"])
async def published(request: pytest.FixtureRequest) -> AsyncIterator[tuple[PublishedCache, EngineMirror]]:
    with HeldPorts(count=2) as port:
        cache = PublishedCache(port, request.param)
        mirror = EngineMirror(
            block_tokens=OURS, cache_tokens=1_600, cache_blocks=100, events=f"tcp://127.0.0.1:{port}",
            replay=f"tcp://127.0.0.1:{port + 1}", topic="",
        )  # fmt: skip
        mirror.start()
        yield cache, mirror
        await mirror.stop()
        await asyncio.to_thread(cache.publisher.shutdown)
        atexit.unregister(cache.publisher.shutdown)


async def test_its_caches_events_mean_our_blocks(published: tuple[PublishedCache, EngineMirror]) -> None:
    cache, mirror = published

    async def has(*keys: bytes) -> None:
        await eventually(lambda: sorted(mirror.keys()) == sorted(keys), f"{len(keys)} blocks are there")

    cache.compute(TOKENS[: OURS + PAGE], salt_of(ROOT))
    await has(KEYS[0])
    # What is there already is not told again; a part of a page is not kept.
    cache.compute(TOKENS[:-1], salt_of(ROOT))
    await has(*KEYS[:2])
    cache.compute(TOKENS, salt_of(ROOT))
    await has(*KEYS)
    # Blocks of others: without a salt, with one of their own, with ours and another class of requests.
    cache.compute(TOKENS, None)
    cache.compute(TOKENS, "theirs")
    other = chain_keys(b"s" * 16, TOKENS, OURS)
    cache.compute(TOKENS[:OURS], salt_of(b"s" * 16))
    await has(*KEYS, other[:16])
    assert mirror.blocks.passed_over["of_others"] > 0
    assert mirror.reader.counts["malformed"] == 0
    cache.evict(10_000)
    await has()
    cache.compute(TOKENS, salt_of(ROOT))
    await has(*KEYS)
    cache.reset()
    await has()
    assert mirror.blocks.engine_block_tokens == PAGE
    # Two prompts that part within a block: the first one's node is split, which tells nothing new of it.
    parted = [*TOKENS[: OURS + PAGE], *range(5_000, 5_000 + 2 * OURS - PAGE)]
    theirs = split_keys(chain_keys(ROOT, parted, OURS))
    cache.compute(TOKENS, salt_of(ROOT))
    cache.compute(parted, salt_of(ROOT))
    await has(*{*KEYS, *theirs})
    assert mirror.reader.counts["malformed"] == 0


# --- its requests and answers -------------------------------------------------------------------------------

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(
        temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, seed=2**63 - 1, presence_penalty=-2.0, frequency_penalty=2.0,
        repetition_penalty=1.5, logprobs=0, logit_bias={5: 1.0}, min_tokens=3, stop_token_ids=[2], ignore_eos=True,
    ),
]  # fmt: skip


@pytest.mark.pure
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "all fields"])
def test_it_understands_our_requests_field_by_field(sampling: Sampling) -> None:
    from sglang.srt.entrypoints.openai.protocol import CompletionRequest
    from sglang.srt.sampling.sampling_params import SamplingParams

    body = SglangWords("m").body(EngineCompletion(salt_of(ROOT), TOKENS, [7], 4, sampling))
    # It passes over what it does not know.
    assert set(body) <= set(CompletionRequest.model_fields)
    request = CompletionRequest.model_validate(body)
    assert {name: getattr(request, name) for name in body} == body
    # As its serving code takes them over.
    params = SamplingParams(
        max_new_tokens=request.max_tokens,
        min_new_tokens=request.min_tokens,
        sampling_seed=request.seed,
        logit_bias=request.logit_bias,
        **{
            name: getattr(request, name)
            for name in (
                "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
                "stop_token_ids", "ignore_eos",
            )
        },
    )  # fmt: skip
    params.verify(49_152)


@pytest.mark.pure
def test_it_understands_both_halves_of_a_request() -> None:
    from sglang.srt.entrypoints.openai.protocol import CompletionRequest, PDRoutingFields
    from sglang.srt.utils.network import NetworkAddress

    prefill = SglangWords("m", halved=True, host="[fd00::7]", bootstrap_port=8998)
    place = prefill.kv_params(prefill.place, "o1-i")
    asked = EngineCompletion(salt_of(ROOT), TOKENS, [7], 4, SAMPLINGS[1])
    bodies = [
        prefill.prefill_body(asked, "o1-i"),
        prefill.body(asked) | (prefill.decode_fields(place) or {}),
    ]
    requests = [CompletionRequest.model_validate(body) for body in bodies]
    for body, request in zip(bodies, requests, strict=True):
        assert set(body) <= set(CompletionRequest.model_fields)
        assert {name: getattr(request, name) for name in body} == body
    routed, again = (PDRoutingFields.pd_routing_kwargs(request) for request in requests)
    assert routed == again == dict.fromkeys(PDRoutingFields.model_fields) | place
    assert requests[0].model_copy(update={"stream": True}) == requests[1]
    # Where the decode engine looks for the prefill engine's bootstrap server.
    there = NetworkAddress(requests[1].bootstrap_host, requests[1].bootstrap_port)
    assert there.to_host_port_str() == "[fd00::7]:8998"
    # Its buffers of rooms hold 64 bits, of which 0 is none.
    assert torch.tensor([place["bootstrap_room"]]).to(torch.uint64).item() == place["bootstrap_room"] > 0


@pytest.mark.pure
def test_its_two_halves_meet_as_we_expect() -> None:
    shared, prefill, decode = (
        text_of_wheel(f"disaggregation/{name}.py") for name in ("utils", "prefill", "decode")
    )
    # What a probe tells an engine that has no other one.
    host = SglangWords("m", halved=True).alone("probe")["bootstrap_host"]
    assert f'FAKE_BOOTSTRAP_HOST = "{host}"' in shared
    assert "FAKE_BOOTSTRAP_HOST" in text_of_wheel("entrypoints/warmup.py")
    # The modes that it tells of itself.
    modes = set(
        re.findall(r"^    [A-Z]+ = \"(\w+)\"", shared.partition("class DisaggregationMode")[2][:200], re.M)
    )
    assert modes == {"null", "prefill", "decode"}
    options = text_of_wheel("arg_groups/field_order.py")
    assert '"disaggregation_mode"' in options
    assert '"disaggregation_bootstrap_port"' in options
    # A prefill engine draws one token whatever the request's length is, and answers when its KV is away.
    assert "req.sampling_params.max_new_tokens = 1" in prefill
    assert re.search(r"poll == KVPoll.Success.*?FINISH_LENGTH\(length=0\)", prefill, re.S)
    assert "_bootstrap_addr(req)" in decode
    # One that decodes keeps no prompts, and computes none: without a room it refuses.
    hook = text_of_wheel("arg_groups/pd_disaggregation_hook.py")
    assert re.search(r"disable_radix_cache=True", hook)
    assert 'without "\n                        f"bootstrap room id' in text_of_wheel("managers/scheduler.py")


@pytest.mark.pure
@pytest.mark.parametrize("logprobs", [False, True])
def test_we_understand_its_answers(logprobs: bool) -> None:
    from sglang.srt.entrypoints.openai.protocol import (
        CompletionResponseStreamChoice,
        CompletionStreamResponse,
        ErrorResponse,
        LogProbs,
    )

    told = LogProbs(tokens=["a", "b"], token_logprobs=[-0.5, -1.5], text_offset=[-1, -1], top_logprobs=[])
    for token_ids, reason in (([5, 6], None), ([5, 6], "length"), ([], "stop"), ([5, 2], "stop")):
        choice = CompletionResponseStreamChoice(
            index=0, text="x", token_ids=token_ids, finish_reason=reason, matched_stop=2 if reason == "stop" else None,
            logprobs=told if logprobs and token_ids else None,
        )  # fmt: skip
        line = CompletionStreamResponse(id="i", created=1, model="m", choices=[choice]).model_dump_json()
        heard = read_line(f"data: {line}\n".encode(), 49_152)
        assert heard is not None
        assert ([one.token_id for one in heard.tokens], heard.finish_reason) == (token_ids, reason or "")
        if logprobs and token_ids:
            assert [one.logprob for one in heard.tokens] == [-0.5, -1.5]
    wrong = ErrorResponse(message="no", type="BadRequestError", param="top_k", code=400)
    refused = refusal_of(400, wrong.model_dump_json().encode())
    assert refused.refusal is not None
    assert (refused.refusal.status, refused.refusal.param, refused.retryable) == (400, "top_k", False)
    streamed = b'data: {"error": %s}\n' % wrong.model_copy(update={"code": 503}).model_dump_json().encode()
    with pytest.raises(EngineRefused, match="the engine answers 503: no") as broken:
        read_line(streamed, 49_152)
    assert broken.value.retryable


@pytest.mark.pure
def test_what_is_asked_for_is_there() -> None:
    server = text_of_wheel("entrypoints/http_server.py")
    routes = set(re.findall(r"@app\.(?:get|post|api_route)\(\s*\"([^\"]+)\"", server))
    asked = {"/model_info", "/server_info", "/flush_cache", "/tokenize", "/v1/models", "/v1/completions"}
    assert asked - routes == set()
    assert '@router.get("/v1/loads")' in text_of_wheel("entrypoints/v1_loads.py")
    assert re.search(r"^    token_usage: float", text_of_wheel("managers/load_snapshot.py"), re.M)
    assert '"max_total_num_tokens": self.max_total_num_tokens' in text_of_wheel("managers/scheduler.py")
    described = text_of_wheel("runtime_context.py")
    for field in (
        "endpoint_host",
        "endpoint_port_base",
        "replay_endpoint_port_base",
        "topic",
        "block_size",
        "dp_size",
    ):
        assert f'"{field}"' in described, field
    options = text_of_wheel("arg_groups/field_order.py")
    for field in (
        "page_size", "disable_radix_cache", "dp_size", "max_running_requests", "chunked_prefill_size",
        "enable_hierarchical_cache", "hicache_ratio", "hicache_size",
    ):  # fmt: skip
        assert f'"{field}"' in options, field
