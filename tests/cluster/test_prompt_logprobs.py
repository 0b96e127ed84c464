"""How likely a prompt's own tokens are, of real clusters: the same bits on every worker, cached, in stages, mixed, and
when a worker dies.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from halfmoon.schemas.decisions import StartPrefill
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.prompts import prompt
from tests.cluster.steering import draining, prefill_of
from tests.cluster.test_stages import always_together

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
MODEL = ("--dtype", "float32", "--pool-mib", "512", *PATIENT)
LENGTH = 2100


async def scored(cluster: Cluster, nc: Any) -> tuple[list[Any], list[str]]:
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


async def together(cluster: Cluster, nc: Any) -> tuple[list[Any], list[str]]:
    """By two workers; a first attempt may be thought too slow for that."""
    for _ in range(4):
        found = await scored(cluster, nc)
        newest = [
            one.decision for one in await cluster.decisions() if isinstance(one.decision, StartPrefill)
        ][-1]
        went = await prefill_of(cluster, newest.request_id)
        if went.stages == 2:
            return found
    raise AssertionError(("never computed together", went))


async def killed(cluster: Cluster, nc: Any) -> tuple[list[Any], list[str]]:
    """Its prefill worker dies in the middle; what it had committed by then is there for the second try."""
    before = len(await cluster.decisions())
    asked = asyncio.create_task(scored(cluster, nc))
    while not (new := [one.decision for one in (await cluster.decisions())[before:]]):
        await asyncio.sleep(0.02)
    await asyncio.sleep(1.0)
    first = next(one for one in new if isinstance(one, StartPrefill))
    cluster.kill(first.worker_id)
    found = await asked
    placed = [one.decision for one in (await cluster.decisions())[before:]]
    assert len([one for one in placed if isinstance(one, StartPrefill)]) == 2
    return found


async def test_rows_are_the_same_bits_however_the_prompt_was_computed(tmp_path: Path) -> None:
    (tmp_path / "pools").mkdir()
    with running(tmp_path / "pools", "--prefill", "2", "--prefill-group", "2", *MODEL) as cluster:
        nc = await cluster.connect()
        async with draining(cluster, "prefill-1"):
            wanted = await scored(cluster, nc)
        async with draining(cluster, "prefill-0"):
            assert await scored(cluster, nc) == wanted
            # What others have of it is not read.
            plain = await cluster.generate(nc, prompt=prompt(LENGTH), max_tokens=1, temperature=0)
            assert "prompt_logprobs" not in plain
            assert await scored(cluster, nc) == wanted
        assert await killed(cluster, nc) == wanted
        await always_together(cluster)
        assert await together(cluster, nc) == wanted
        await nc.close()
        assert "identical" in replayed(cluster, tmp_path)
    (tmp_path / "mixed").mkdir()
    with running(tmp_path / "mixed", "--prefill", "0", "--decode", "0", "--mixed", "1", *MODEL) as cluster:
        nc = await cluster.connect()
        beside = asyncio.create_task(cluster.generate(nc, prompt=prompt(40), max_tokens=40, ignore_eos=True))
        assert await scored(cluster, nc) == wanted
        await beside
        await nc.close()
