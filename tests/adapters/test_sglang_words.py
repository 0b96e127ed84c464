"""A request in SGLang's words, and its word on its cache."""

from __future__ import annotations

from typing import Any

import pytest

from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.adapters.engines.api import EngineUnfit
from halfmoon.workers.adapters.engines.sglang import SglangApi
from halfmoon.workers.adapters.engines.words import EngineCompletion, SglangWords, Unanswerable, VllmWords

pytestmark = pytest.mark.pure
TOKENS = [7, 8, 9]


def body(sampling: Sampling, known: tuple[int, ...] = ()) -> dict[str, Any]:
    return SglangWords("m").body(EngineCompletion("salt", TOKENS, known, 5, sampling))


def test_what_differs_from_vllms_is_all_that_differs() -> None:
    sampling = Sampling(seed=3, top_k=4, logprobs=0, logit_bias={5: 1.5}, min_tokens=3, stop_token_ids=[2])
    vllms = VllmWords("m").body(EngineCompletion("salt", TOKENS, [1], 5, sampling))
    assert vllms.pop("return_tokens_as_token_ids")
    assert body(sampling, (1,)) == vllms


def test_all_tokens_are_minus_one() -> None:
    assert body(Sampling(top_k=0))["top_k"] == -1
    assert body(Sampling(top_k=1))["top_k"] == 1


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(allowed_token_ids=[1]), "allowed_token_ids"),
        (Sampling(logprobs=1), "logprobs"),
        (Sampling(bad_words=[[1]]), "bad_words"),
        (Sampling(grammar="{}"), ""),
    ],
)
def test_what_it_lacks_is_refused_by_name(sampling: Sampling, field: str) -> None:
    with pytest.raises(Unanswerable, match=r"not over an engine behind an adapter$") as refused:
        body(sampling)
    assert refused.value.param == field


class Said(SglangApi):
    """It answers what the test says."""

    def __init__(self, **info: Any) -> None:
        super().__init__("http://[::1]:30000")
        self.info: Any = {"page_size": 16, "max_total_num_tokens": 1_600, **info}

    async def _json(self, path: str, body: Any = None) -> Any:
        if path == "/server_info":
            return self.info
        if path.startswith("/v1/loads"):
            return self.info.get("loads")
        return {"data": [{"id": "m", "max_model_len": 4096}, {"id": "adapter", "max_model_len": None}]}


async def test_how_full_it_is() -> None:
    ranks = [{"token_usage": 0.25}, {"token_usage": 0.5}]
    assert await Said(loads={"loads": ranks}).cache_percent() == 50.0
    with pytest.raises(EngineUnfit, match="/v1/loads tells no token_usage"):
        await Said(loads={"loads": []}).cache_percent()


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ([1], "is no JSON object"),
        ({"page_size": 0, "max_total_num_tokens": 1}, "tells no page_size and max_total_num_tokens"),
        ({"page_size": "16"}, "tells no page_size and max_total_num_tokens"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_refused(info: Any, text: str) -> None:
    engine = Said()
    engine.info = info
    with pytest.raises(EngineUnfit, match=f"/server_info {text}$"):
        await engine.facts("")


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"disaggregation_mode": "encode"}, "the engine runs with --disaggregation-mode encode"),
        ({"disaggregation_mode": "prefill"}, "/server_info tells no disaggregation_bootstrap_port"),
        (
            {"disaggregation_mode": "prefill", "disable_radix_cache": True},
            "the engine runs with --disable-radix-cache",
        ),
        ({"disable_radix_cache": True}, "the engine runs with --disable-radix-cache"),
    ],
)
async def test_an_engine_that_cannot_serve_is_refused(info: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineUnfit, match=f"{text}$"):
        await Said(**info).facts("")


@pytest.mark.parametrize(
    ("info", "role", "caches", "place"),
    [
        ({}, "mixed", True, {}),
        ({"disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998}, "mixed", True, {}),
        (
            {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998},
            "prefill",
            True,
            {"bootstrap_host": "[::1]", "bootstrap_port": 8998},
        ),
        ({"disaggregation_mode": "decode", "disable_radix_cache": True}, "decode", False, {}),
        # An experimental option: its blocks are nothing that prompts are placed by.
        ({"disaggregation_mode": "decode", "kv_events": {"endpoint_port_base": 5557}}, "decode", False, {}),
    ],
)
async def test_its_word_on_its_role(
    info: dict[str, Any], role: str, caches: bool, place: dict[str, Any]
) -> None:
    engine = Said(**info)
    await engine.open()
    facts = await engine.facts("")
    assert (facts.role, facts.caches, facts.events) == (role, caches, "")
    words = engine.words_of(facts)
    assert words.place == place
    # A probe has no engine for the other half.
    alone = words.alone("a")
    assert alone.get("bootstrap_host", "") == ("" if role == "mixed" else "2.2.2.2")
    assert words.alone("b") != alone or role == "mixed"
    await engine.close()


def published(**fields: Any) -> dict[str, Any]:
    return {"kv_events": {"endpoint_host": "*", "endpoint_port_base": 5557, "block_size": 16, **fields}}


@pytest.mark.parametrize(
    ("info", "facts"),
    [
        ({}, {"events": "", "replay": "", "block_tokens": 16, "cache_blocks": 100, "blocks_kept": 100}),
        (published(), {"events": "tcp://[::1]:5557", "replay": "", "topic": ""}),
        (
            published(endpoint_host="10.0.0.7", replay_endpoint_port_base=5558, topic="kv"),
            {"events": "tcp://10.0.0.7:5557", "replay": "tcp://10.0.0.7:5558", "topic": "kv"},
        ),
        # Decode context parallelism: an event's block is a page of each rank.
        (published(block_size=32), {"block_tokens": 32, "cache_blocks": 50, "cache_tokens": 1_600}),
        ({"chunked_prefill_size": -1, "max_running_requests": None}, {"token_budget": 0, "batch_max": 0}),
        ({"chunked_prefill_size": 8_192, "max_running_requests": 48}, {"token_budget": 8_192, "batch_max": 48}),
        ({"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_size": 0}, {"blocks_kept": 300}),
        ({"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_size": 64}, {"blocks_kept": 1_600}),
        ({"enable_hierarchical_cache": False, "hicache_ratio": 2.0}, {"blocks_kept": 100}),
    ],
)  # fmt: skip
async def test_its_word_on_its_cache(info: dict[str, Any], facts: dict[str, Any]) -> None:
    found = await Said(**info).facts("")
    assert (found.model, found.context_tokens) == ("m", 4096)
    assert {name: getattr(found, name) for name in facts} == facts
