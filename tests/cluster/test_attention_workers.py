"""KV lies at attention workers and is attended to there: the text is what it always is, whoever dies."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.cli.status import describe
from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.events import RequestFinished
from halfmoon.workers.hold_points import DECODE_STEP
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.holding import Holds, running_with_holds
from tests.cluster.prompts import prompt
from tests.cluster.steering import patient_with_restarts
from tests.cluster.test_same_text import Form, written_down
from tests.eventually import BOUND_S, eventually
from tests.lengths import by_make_test_attention

#: Less than a block, a whole one, one token more.
LENGTHS, TOKENS = (40, 256, 257), 6
#: Also a segment with a part of the next.
MORE_LENGTHS = (*LENGTHS, 1100, 2000)
ONE_MODEL = ("--dtype", "float32", "--prefill", "1", "--decode", "1", "--worker-wait-s", "120", *PATIENT)


async def ask(cluster: Cluster, nc: Any, length: int, tokens: int = TOKENS) -> list[int]:
    request = {"prompt": prompt(length), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    # A worker's restart may be part of it.
    answer = await cluster.generate(nc, timeout=2 * BOUND_S, **request)
    found: list[int] = answer["token_ids"]
    return found


async def orders(cluster: Cluster) -> list[StartDecode]:
    ordered = [one.decision for one in await cluster.decisions()]
    return [one for one in ordered if isinstance(one, StartDecode)]


async def nothing_is_held(cluster: Cluster) -> None:
    """Attention workers have given back what they held, and decode workers hold nothing."""

    async def none() -> bool:
        nodes = (await cluster.status())["nodes"]
        return not any(node.get("kv_used") for node in nodes if node["role"] in ("attention", "decode"))

    await eventually(none, "nothing is held", every_s=0.1)


async def decode_nodes(cluster: Cluster) -> list[dict[str, Any]]:
    return [node for node in (await cluster.status())["nodes"] if node["role"] == "decode"]


@pytest.mark.slow
async def test_answers_are_the_same_and_lie_at_both_attention_workers(tmp_path: Path) -> None:
    with running(tmp_path, "--attention", "2", *ONE_MODEL) as cluster:
        nc = await cluster.connect()
        found = await asyncio.gather(*(ask(cluster, nc, length) for length in LENGTHS))
        assert dict(zip(LENGTHS, found, strict=True)) == written_down(Form(LENGTHS, TOKENS))
        places = [[one.worker_id for one in order.cache] for order in await orders(cluster)]
        assert sorted(map(len, places)) == [1] * len(LENGTHS)
        assert {place for (place,) in places} == {"attention-0", "attention-1"}
        await nothing_is_held(cluster)
        await nc.close()


@pytest.mark.slow
async def test_by_heads_each_of_three_attention_workers_has_a_third_of_all(tmp_path: Path) -> None:
    split = ("--attention", "3", "--attention-split", "heads", "--decode-groups", "3")
    with running(tmp_path, *split, *ONE_MODEL) as cluster:
        nc = await cluster.connect()
        found = await asyncio.gather(*(ask(cluster, nc, length) for length in MORE_LENGTHS))
        assert dict(zip(MORE_LENGTHS, found, strict=True)) == written_down(Form(MORE_LENGTHS, TOKENS))
        for order in await orders(cluster):
            heads = [(one.worker_id, one.first_kv_head, one.kv_heads) for one in order.cache]
            assert heads == [(f"attention-{n}", n, 1) for n in range(3)]

        async def groups() -> int:
            (node,) = await decode_nodes(cluster)
            return int(node["groups"])

        assert await eventually(groups, "heartbeats tell the newest step's groups", every_s=0.1) <= 3
        await nothing_is_held(cluster)
        await nc.close()


@pytest.mark.slow
async def test_a_context_that_no_attention_worker_has_room_for_lies_at_two_by_sequence(
    tmp_path: Path,
) -> None:
    # Blocks of 256 tokens: five at each, and prompt and answer take eight, of which the first four are a segment.
    split = ("--attention", "2", "--attention-split", "sequence", "--attention-kv-blocks", "5")
    with running(tmp_path, *split, *ONE_MODEL) as cluster:
        nc = await cluster.connect()
        found = [await ask(cluster, nc, length) for length in (2000, 257)]
        expected = written_down(Form(MORE_LENGTHS, TOKENS))
        assert found == [expected[2000], expected[257]]
        long, short = await orders(cluster)
        parts = [(one.worker_id, one.first_segment, one.segments) for one in long.cache]
        assert sorted(parts) in (
            [("attention-0", 0, 1), ("attention-1", 1, 0)],
            [("attention-0", 1, 0), ("attention-1", 0, 1)],
        )
        assert len(short.cache) == 1
        await nothing_is_held(cluster)
        await nc.close()


@pytest.mark.slow
async def test_while_every_attention_worker_is_away_the_cluster_is_not_ready_and_says_why(
    tmp_path: Path,
) -> None:
    why = "decode workers keep no KV, and no attention worker is ready"

    async def ready() -> tuple[int, str]:
        async with http.get(f"{cluster.http}/ready") as response:
            body = await response.json()
            return response.status, body["error"]["message"] if response.status != 200 else ""

    async def until(found: tuple[int, str]) -> None:
        async def there() -> bool:
            return await ready() == found

        await eventually(there, f"/ready answers {found}", every_s=0.1)

    with running(tmp_path, "--attention", "2", *ONE_MODEL) as cluster:
        async with aiohttp.ClientSession() as http:
            assert await ready() == (200, "")
            cluster.kill("attention-0", signal.SIGSTOP)
            cluster.kill("attention-1", signal.SIGSTOP)
            await until((503, why))
            async with http.get(f"{cluster.http}/status") as response:
                status = await response.json()
            assert f"not ready ({why})" in describe(status)
            cluster.kill("attention-1", signal.SIGCONT)
            await until((200, ""))
            cluster.kill("attention-0", signal.SIGCONT)


@pytest.mark.slow
@by_make_test_attention
@pytest.mark.parametrize("of", ["attention", "decode"])
async def test_a_worker_that_dies_under_load_costs_no_text(tmp_path: Path, of: str) -> None:
    lengths, tokens = (40, 256, 257, 1100), 12
    flags = ("--attention", "2", *ONE_MODEL, "--decode", "2")
    with running_with_holds(tmp_path, *flags) as cluster:
        nc, holds = await cluster.connect(), Holds(cluster)
        await patient_with_restarts(cluster)
        holds.arm(DECODE_STEP, tokens // 2)
        asked = [asyncio.create_task(ask(cluster, nc, length, tokens)) for length in lengths]
        order_id = await holds.held(DECODE_STEP)
        (first,) = [order for order in await orders(cluster) if order.order_id == order_id]
        cluster.kill(first.cache[0].worker_id if of == "attention" else first.worker_id)
        holds.go_on()
        found = dict(zip(lengths, await asyncio.gather(*asked), strict=True))
        assert found == written_down(Form(lengths, tokens))
        finished = [one.event for one in await cluster.events() if isinstance(one.event, RequestFinished)]
        assert len(finished) == len(lengths)
        # What was decoded goes on elsewhere without a prefill; what was not is placed with one.
        resumed = {order.order_id for order in await orders(cluster) if order.resumes}
        assert bool(resumed & {one.order_id for one in finished}) == (of == "decode")
        await nothing_is_held(cluster)
        await nc.close()
