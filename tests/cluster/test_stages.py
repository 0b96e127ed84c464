"""Two prefill workers compute one prompt of a real cluster: one worker's bits, cached or not, and one of them dies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartPrefill, StartStage
from halfmoon.schemas.events import ClusterConfigured, PolicyChanged, StageFinished
from halfmoon.workers.hold_points import PROMPT_LAYER, STAGE_LAYER
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.holding import Holds, running_with_holds
from tests.cluster.prompts import prompt
from tests.cluster.steering import blocks_told, draining, last_seq, prefill_of
from tests.cluster.test_same_text import ask, same
from tests.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = ("--dtype", "float32", "--pool-mib", "512", *PATIENT)
TOKENS = 4
LENGTHS = (500, 1100, 2500, 6000)
#: Those whose second half pays on two workers.
PARTLY = (1100, 2500)


async def always_together(cluster: Cluster) -> None:
    """From now on also where it hardly pays, as with two blocks; predictions stay those of the first start."""
    configured = next(s.event for s in await cluster.events() if isinstance(s.event, ClusterConfigured))
    policy = msgspec.structs.replace(configured.policy, group_gain_percent=1, correction_window=0)
    bus = await cluster.bus()
    await bus.append(PolicyChanged(policy=policy), source_id=subjects.OPERATOR)
    await bus.close()


def explained(cluster: Cluster, directory: Path, request_id: str) -> str:
    """`halfmoon replay --explain` of the log that `replayed` saved."""
    words = [sys.executable, "-m", "halfmoon.cli.main", "replay", str(directory / "run.jsonl.zst")]
    return subprocess.run(
        [*words, "--explain", request_id],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


async def together(cluster: Cluster, nc: Any, length: int, begun: int) -> tuple[dict[str, Any], str]:
    """An answer to a prompt of which `begun` tokens' blocks are cached, from two workers; and its salt.

    On a busy machine one of the two may be thought to be far slower than the other, and is left out. The other one
    learns what it takes then, so the next prompt is priced better.
    """
    for attempt in range(4):
        salt = f"{length} {begun} {attempt}"
        if begun:
            some, before = prompt(length)[:begun], await last_seq(cluster)
            first = await cluster.generate(nc, prompt=some, max_tokens=1, temperature=0, cache_salt=salt)
            await blocks_told(cluster, first["prefill_worker"], before, begun // 256)
        answer = await ask(cluster, nc, length, TOKENS, cache_salt=salt)
        went = await prefill_of(cluster, answer["id"])
        assert went.cached_local_tokens + went.cached_fetched_tokens == begun // 256 * 256, (length, went)
        if went.stages == 2:
            return answer, salt
        assert went.stages == 0, went
    raise AssertionError((length, begun, "never computed together", went))


async def alike(cluster: Cluster, length: int) -> None:
    """On each alone, on both together, and what both left in the pools."""
    nc = await cluster.connect()
    for other in ("prefill-1", "prefill-0"):
        async with draining(cluster, other):
            alone = await ask(cluster, nc, length, TOKENS, cache_salt=f"without {other}")
        assert (await prefill_of(cluster, alone["id"])).stages == 0
    both, salt = await together(cluster, nc, length, 0)
    assert same(both, alone), length
    cached = await ask(cluster, nc, length, TOKENS, cache_salt=salt)
    assert cached["usage"]["cached_tokens"] == (length - 1) // 256 * 256
    assert same(cached, alone), length
    if length in PARTLY:
        partly, _ = await together(cluster, nc, length, length // 2)
        assert same(partly, alone), length
    await nc.close()


async def killed_in_mid_prompt(cluster: Cluster, length: int, *, last: bool) -> None:
    """One of the two dies while both compute; the client sees a pause, and the same text."""
    nc = await cluster.connect()
    whole = await ask(cluster, nc, length, TOKENS, cache_salt="alone")
    before, holds, point = (
        len(await cluster.decisions()),
        Holds(cluster),
        PROMPT_LAYER if last else STAGE_LAYER,
    )
    holds.arm(point, 3)
    asked = asyncio.create_task(ask(cluster, nc, length, TOKENS, cache_salt=f"killed-{last}"))
    order_id = await holds.held(point)
    placed = [one.decision for one in (await cluster.decisions())[before:]]
    (first,) = [one for one in placed if isinstance(one, StartPrefill)]
    assert (first.order_id, len(first.stages)) == (order_id, 2)
    cluster.kill(first.stages[-1 if last else 0].worker_id)
    answer = await asked
    holds.go_on()
    assert same(answer, whole)
    placed = [one.decision for one in (await cluster.decisions())[before:]]
    starts = [one for one in placed if isinstance(one, StartPrefill)]
    assert [len(one.stages) for one in starts] == [2, 0]
    await nc.close()


async def all_back(cluster: Cluster) -> None:
    """Both prefill workers take orders again."""

    async def ready() -> bool:
        nodes = (await cluster.status())["nodes"]
        return sum(node["role"] == "prefill" and node["state"] == "ready" for node in nodes) == 2

    await eventually(ready, "both prefill workers are ready", every_s=0.1)


async def test_two_stages_give_one_workers_bits(tmp_path: Path) -> None:
    with running(tmp_path, "--prefill", "2", "--prefill-group", "2", *MODEL) as cluster:
        await always_together(cluster)
        for length in LENGTHS:
            await alike(cluster, length)
        decided = [one.decision for one in await cluster.decisions()]
        parts = {one.order_id for one in decided if isinstance(one, StartStage)}
        over = [s.event for s in await cluster.events() if isinstance(s.event, StageFinished)]
        assert {one.order_id for one in over if not one.reason} == parts
        assert "identical" in replayed(cluster, tmp_path)
        newest = [one for one in decided if isinstance(one, StartStage)][-1]
        said = explained(cluster, tmp_path, newest.request_id)
        assert "computed together, in chunks of 256 tokens: prefill-" in said, said


async def test_a_stage_that_dies_costs_a_pause(tmp_path: Path) -> None:
    with running_with_holds(tmp_path, "--prefill", "2", "--prefill-group", "2", *MODEL) as cluster:
        await always_together(cluster)
        await killed_in_mid_prompt(cluster, 3000, last=False)
        await all_back(cluster)
        await killed_in_mid_prompt(cluster, 3000, last=True)
        assert "identical" in replayed(cluster, tmp_path)
