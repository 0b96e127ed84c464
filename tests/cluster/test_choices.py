"""Several choices of one prompt on a real cluster: its KVCache is computed once."""

from __future__ import annotations

from typing import Any

import aiohttp
import nats
import pytest

from halfmoon.schemas.events import PrefillFinished
from tests.cluster.harness import Cluster
from tests.cluster.prompts import prompt

#: What one choice has computed lies where the next one is.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_prefill_worker")]


@pytest.fixture
def cluster(small: Cluster) -> Cluster:
    """It is left whole."""
    return small


async def asked(cluster: Cluster, body: dict[str, Any]) -> tuple[list[str], list[PrefillFinished]]:
    """The texts of the choices, not all of them the same; and their prefills."""
    before = (await cluster.events())[-1].seq
    async with (
        aiohttp.ClientSession() as http,
        http.post(cluster.http + "/v1/completions", json=body) as response,
    ):
        answer = await response.json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) > 1, texts
    return texts, [s.event for s in await cluster.events(before) if isinstance(s.event, PrefillFinished)]


async def test_a_short_prompt_is_computed_once(cluster: Cluster, nc: nats.NATS) -> None:
    body: dict[str, Any] = {"prompt": prompt(40), "n": 3, "max_tokens": 8, "seed": 3, "cache_salt": "short"}
    texts, prefills = await asked(cluster, body)
    assert [each.cached_local_tokens for each in prefills] == [0, 40, 40]
    for number, text in enumerate(texts):
        alone = {**body, "seed": 3 + number}
        del alone["n"]
        found = await cluster.generate(nc, **alone)
        assert (found["text"], found["usage"]["cached_tokens"]) == (text, 0)


async def test_further_choices_find_the_prompts_blocks(cluster: Cluster, nc: nats.NATS) -> None:
    body: dict[str, Any] = {
        "prompt": prompt(600),
        "n": 3,
        "max_tokens": 8,
        "seed": 3,
        "cache_salt": "choices",
    }
    texts, prefills = await asked(cluster, body)
    found = [each.cached_local_tokens + each.cached_fetched_tokens for each in prefills]
    assert found == [0, 512, 512]
    # Each is what a request with that seed alone gets.
    for number, text in enumerate(texts):
        alone = {**body, "seed": 3 + number, "cache_salt": f"alone {number}"}
        del alone["n"]
        assert (await cluster.generate(nc, **alone))["text"] == text
