"""Two prefill workers compute one prompt of a real cluster: one worker's bits, cached or not, and one of them dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from halfmoon.schemas.decisions import StartPrefill, StartStage
from halfmoon.schemas.events import StageFinished
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.prompts import prompt
from tests.cluster.steering import draining, prefill_of
from tests.cluster.test_same_text import ask, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = ("--dtype", "float32", "--pool-mib", "512", *PATIENT)
TOKENS = 4
LENGTHS = (500, 1100, 2500)
#: Cold alone: it takes long.
LONGEST = 6000


async def given(cluster: Cluster, request_id: str) -> StartPrefill:
    """The request's newest placement."""
    decided = [one.decision for one in await cluster.decisions()]
    return [one for one in decided if isinstance(one, StartPrefill) and one.request_id.endswith(request_id)][
        -1
    ]


async def alike(cluster: Cluster, length: int) -> None:
    """On one worker, on two, and what two left in the pools."""
    nc = await cluster.connect()
    async with draining(cluster, "prefill-1"):
        alone = await ask(cluster, nc, length, TOKENS, cache_salt="alone")
    assert (await prefill_of(cluster, alone["id"])).stages == 0
    salted = {"cache_salt": "together"}
    both = await ask(cluster, nc, length, TOKENS, **salted)
    went = await prefill_of(cluster, both["id"])
    assert (went.stages, went.cached_local_tokens + went.cached_fetched_tokens) == (2, 0), (length, went)
    assert same(both, alone), length
    if length == LONGEST:
        await nc.close()
        return
    cached = await ask(cluster, nc, length, TOKENS, **salted)
    assert cached["usage"]["cached_tokens"] == (length - 1) // 256 * 256
    assert same(cached, alone), length
    if length >= 1100:
        salted = {"cache_salt": "begun"}
        some = length // 2
        await cluster.generate(nc, prompt=prompt(length)[:some], max_tokens=1, temperature=0, **salted)
        await asyncio.sleep(0.5)  # the answer does not wait for the conductor to hear of the blocks
        partly = await ask(cluster, nc, length, TOKENS, **salted)
        went = await prefill_of(cluster, partly["id"])
        found = went.cached_local_tokens + went.cached_fetched_tokens
        assert (went.stages, found) == (2, some // 256 * 256), (length, went)
        assert same(partly, alone), length
    await nc.close()


async def killed_in_mid_prompt(cluster: Cluster, length: int, *, last: bool) -> None:
    """One of the two dies while both compute; the client sees a pause, and the same text."""
    nc = await cluster.connect()
    whole = await ask(cluster, nc, length, TOKENS, cache_salt="alone")
    before = len(await cluster.decisions())
    asked = asyncio.create_task(ask(cluster, nc, length, TOKENS, cache_salt=f"killed-{last}"))
    while not (new := [one.decision for one in (await cluster.decisions())[before:]]):
        await asyncio.sleep(0.02)
    first = next(one for one in new if isinstance(one, StartPrefill))
    assert len(first.stages) == 2
    await asyncio.sleep(0.5)
    cluster.kill(first.stages[-1 if last else 0].worker_id)
    answer = await asked
    assert same(answer, whole)
    placed = [one.decision for one in (await cluster.decisions())[before:]]
    starts = [one for one in placed if isinstance(one, StartPrefill)]
    assert [len(one.stages) for one in starts] == [2, 0]
    await nc.close()


async def all_back(cluster: Cluster) -> None:
    """Both prefill workers take orders again."""
    for _ in range(600):
        nodes = (await cluster.status())["nodes"]
        if sum(node["role"] == "prefill" and node["state"] == "ready" for node in nodes) == 2:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(nodes)


async def test_two_stages_give_one_workers_bits(tmp_path: Path) -> None:
    with running(tmp_path, "--prefill", "2", "--prefill-group", "2", *MODEL) as cluster:
        for length in (*LENGTHS, LONGEST):
            await alike(cluster, length)
        decided = [one.decision for one in await cluster.decisions()]
        parts = {one.order_id for one in decided if isinstance(one, StartStage)}
        over = [s.event for s in await cluster.events() if isinstance(s.event, StageFinished)]
        assert {one.order_id for one in over if not one.reason} == parts
        assert "identical" in replayed(cluster, tmp_path)


async def test_a_stage_that_dies_costs_a_pause(tmp_path: Path) -> None:
    with running(tmp_path, "--prefill", "2", "--prefill-group", "2", *MODEL) as cluster:
        await killed_in_mid_prompt(cluster, 3000, last=False)
        await all_back(cluster)
        await killed_in_mid_prompt(cluster, 3000, last=True)
        assert "identical" in replayed(cluster, tmp_path)
