"""How likely a prompt's own tokens are, of real clusters: the same bits beside other answers, in stages, and when a
worker dies, whatever others have of the prompt.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.schemas.decisions import StartPrefill
from halfmoon.workers.hold_points import PROMPT_LAYER
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.holding import Holds, running_with_holds
from tests.cluster.prompts import prompt
from tests.cluster.steering import prefill_of
from tests.cluster.test_stages import always_together
from tests.eventually import SCENARIO_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = ("--dtype", "float32", "--pool-mib", "512", *PATIENT)
LENGTH = 600
Scored = tuple[list[Any], list[str]]


async def scored(cluster: Cluster, nc: Any) -> Scored:
    """(rows, digest of each token's logits); nothing of the prompt came from a cache."""
    answer = await cluster.generate(
        nc,
        prompt=prompt(LENGTH),
        prompt_logprobs=2,
        max_tokens=3,
        temperature=0,
        logits_digest=True,
    )
    assert answer["usage"]["cached_tokens"] == 0
    assert len(answer["prompt_logprobs"]) == LENGTH
    return answer["prompt_logprobs"], answer["logits_digests"]


async def together(cluster: Cluster, nc: Any) -> Scored:
    """By two workers; an attempt may be thought too slow for that."""

    async def by_two() -> Scored | None:
        found = await scored(cluster, nc)
        placed = [one.decision for one in await cluster.decisions()]
        newest = [one for one in placed if isinstance(one, StartPrefill)][-1]
        return found if (await prefill_of(cluster, newest.request_id)).stages == 2 else None

    found = await eventually(by_two, "two workers compute the prompt together", bound_s=SCENARIO_S)
    assert found is not None
    return found


async def killed(cluster: Cluster, nc: Any) -> Scored:
    """Its prefill worker dies in the middle of the prompt."""
    before, holds = len(await cluster.decisions()), Holds(cluster)
    holds.arm(PROMPT_LAYER, 3)
    asked = asyncio.create_task(scored(cluster, nc))
    order_id = await holds.held(PROMPT_LAYER)
    placed = [one.decision for one in (await cluster.decisions())[before:]]
    (first,) = [one for one in placed if isinstance(one, StartPrefill)]
    assert first.order_id == order_id
    cluster.kill(first.worker_id)
    found = await asked
    holds.go_on()
    placed = [one.decision for one in (await cluster.decisions())[before:]]
    assert len([one for one in placed if isinstance(one, StartPrefill)]) == 2
    return found


async def echoed(cluster: Cluster, *, stream: bool, **fields: Any) -> list[Any]:
    """The `logprobs` of each choice."""
    body = {
        "prompt": prompt(LENGTH),
        "echo": True,
        "logprobs": 2,
        "max_tokens": 1,
        "stream": stream,
        **fields,
    }
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{cluster.http}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        if not stream:
            choices = (await response.json())["choices"]
        else:
            lines = (await response.read()).decode().split("\n\n")
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
            choices = [json.loads(event)["choices"][0] for event in events]
    return [choice["logprobs"] for choice in choices]


async def test_rows_are_the_same_bits_however_the_prompt_was_computed(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    with running(mixed, "--prefill", "0", "--decode", "0", "--mixed", "1", *MODEL) as cluster:
        nc = await cluster.connect()
        beside = asyncio.create_task(cluster.generate(nc, prompt=prompt(40), max_tokens=40, ignore_eos=True))
        wanted = await scored(cluster, nc)
        await beside
        await nc.close()
    with running_with_holds(tmp_path, "--prefill", "2", "--prefill-group", "2", *MODEL) as cluster:
        nc = await cluster.connect()
        assert await killed(cluster, nc) == wanted
        await always_together(cluster)
        assert await together(cluster, nc) == wanted
        await nc.close()
        assert "identical" in replayed(cluster, tmp_path)


async def test_an_echo_has_them_and_what_others_have_is_not_read(small: Cluster) -> None:
    nc = await small.connect()
    plain = await small.generate(nc, prompt=prompt(LENGTH), max_tokens=1, temperature=0)
    assert "prompt_logprobs" not in plain
    rows, _ = await scored(small, nc)
    await nc.close()
    own = [next(iter(row.values()))["logprob"] for row in rows[1:]]
    for stream in (False, True):
        told = await echoed(small, stream=stream, n=2)
        assert [choice["token_logprobs"][:LENGTH] for choice in told] == [[None, *own]] * 2


async def test_an_echo_alone_has_those_of_an_echo_before_a_token(small: Cluster) -> None:
    for stream in (False, True):
        (longer,) = await echoed(small, stream=stream)
        (alone,) = await echoed(small, stream=stream, max_tokens=0)
        assert [len(each) for each in alone.values()] == [LENGTH] * 4
        assert {name: each[:LENGTH] for name, each in longer.items()} == alone
