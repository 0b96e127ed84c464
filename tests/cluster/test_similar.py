"""Similar prompts on real clusters: what stands in and is told, what stays exact, and what a lost store costs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import orjson
import pytest

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartPrefill
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.prompts import text_ids
from tests.cluster.steering import draining, prefill_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LENGTH = 1_536
FLAGS = ("--prefill", "2", "--numerics", "fast", "--dtype", "float32", "--pool-mib", "512", *PATIENT)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("similar"), *FLAGS) as one:
        yield one


@pytest.fixture
async def nc(cluster: Cluster) -> AsyncIterator[nats.NATS]:
    connection = await cluster.connect("client")
    yield connection
    await connection.close()


def document(seed: int) -> list[int]:
    """Prompts of two seeds have no block, and hardly a run, in common."""
    draw = random.Random(seed)
    ids = list(text_ids())
    pieces = [ids[at : at + 3] for at in range(0, 2_400, 3)]
    draw.shuffle(pieces)
    return [token for piece in pieces for token in piece][:LENGTH]


def near(ids: list[int], seed: int) -> list[int]:
    """A few tokens at its head, and a run in its middle, are others; so no block is the same."""
    other = document(1_000 + seed)
    return [*other[:9], *ids[:600], *other[100:140], *ids[640 : LENGTH - 9]]


async def ask(cluster: Cluster, nc: Any, ids: list[int], *, similar: bool = True, **fields: Any) -> Any:
    given = {"kv": {"similar": True}} if similar else {}
    return await cluster.generate(nc, prompt=ids, max_tokens=6, temperature=0, **given, **fields)


async def last_order(cluster: Cluster) -> StartPrefill:
    return [one.decision for one in await cluster.decisions() if isinstance(one.decision, StartPrefill)][-1]


async def nothing_held(cluster: Cluster) -> None:
    for _ in range(100):
        held = {node: status.holds + status.leases for node, status in (await cluster.stores()).items()}
        if len(held) == 4 and not any(held.values()):
            return
        await asyncio.sleep(0.2)
    raise AssertionError(held)


async def test_a_similar_prompt_stands_in_is_told_and_replayed(
    cluster: Cluster, nc: Any, tmp_path: Path
) -> None:
    ids = document(1)
    first = await ask(cluster, nc, ids)
    assert first["usage"]["similar_tokens"] == 0
    answer = await ask(cluster, nc, near(ids, 1))
    order, usage = await last_order(cluster), answer["usage"]
    went = await prefill_of(cluster, order.request_id)
    assert order.reference is not None
    assert went.similar is not None
    assert usage["similar_tokens"] == went.similar.tokens > 0.8 * LENGTH
    assert usage["similar_computed_tokens"] == went.similar.computed_tokens < 0.45 * LENGTH
    assert usage["similar_resemblance"] == order.reference.resemblance > 80
    # The first token is that of a prompt that is computed.
    whole = await ask(cluster, nc, near(ids, 1), similar=False)
    assert whole["usage"]["cached_tokens"] == 0, "what stood in was found under the prompt's own keys"
    assert whole["token_ids"][0] == answer["token_ids"][0]
    assert "identical" in replayed(cluster, tmp_path)


async def test_another_node_gives_it(cluster: Cluster, nc: Any) -> None:
    ids = document(2)
    await ask(cluster, nc, ids)
    there = (await last_order(cluster)).worker_id
    async with draining(cluster, there):
        answer = await ask(cluster, nc, near(ids, 2))
    order = await last_order(cluster)
    assert order.worker_id != there
    assert order.reference is not None
    assert order.reference.node_id != order.worker_id, "it was on the worker's own node"
    assert answer["usage"]["similar_tokens"] > 0.8 * LENGTH


async def test_tenants_and_salts_are_apart(cluster: Cluster, nc: Any) -> None:
    ids = document(3)
    await ask(cluster, nc, ids, tenant="one")
    for other in ({"tenant": "two"}, {"tenant": "one", "cache_salt": "s"}, {}):
        answer = await ask(cluster, nc, near(ids, 3), **other)
        assert answer["usage"]["similar_tokens"] == 0, other
    assert (await ask(cluster, nc, near(ids, 3), tenant="one"))["usage"]["similar_tokens"] > 0


async def test_a_later_request_for_the_same_prompt_has_the_logits_of_computing_it(
    cluster: Cluster, nc: Any
) -> None:
    """Neither the prompt's blocks nor those of the answer are found by it."""
    ids = document(4)
    await ask(cluster, nc, ids)
    prompt = near(ids, 4)
    alone = {"temperature": 0, "logprobs": 5, "max_tokens": 20, "prompt": prompt}
    wanted = await cluster.generate(nc, **alone, cache_salt="alone")
    stood_in = await cluster.generate(nc, **alone | {"max_tokens": 300}, kv={"similar": True})
    assert stood_in["usage"]["similar_tokens"] > 0
    longer = prompt + stood_in["token_ids"]
    again = await cluster.generate(nc, **alone)
    assert again["usage"]["cached_tokens"] == 0
    assert again["token_ids"] == wanted["token_ids"]
    after = await cluster.generate(nc, **alone | {"prompt": longer})
    # The exact prompt's whole blocks, and nothing that was generated behind what stood in.
    assert after["usage"]["cached_tokens"] <= len(prompt)


async def test_fewer_tokens_go_to_the_decode_worker_and_it_goes_on(
    cluster: Cluster, nc: Any, tmp_path: Path
) -> None:
    ids = document(6)
    await ask(cluster, nc, ids)
    went = {}
    for retain in (1, 0.5):
        kv = {"similar": True, "retain": retain}
        answer = await cluster.generate(
            nc, prompt=near(ids, 6), max_tokens=20, temperature=0, ignore_eos=True, kv=kv
        )
        went[retain] = await prefill_of(cluster, (await last_order(cluster)).request_id), answer
    (all_of_it, whole), (half, fewer) = went[1], went[0.5]
    assert whole["usage"]["similar_retained_tokens"] == 0
    assert fewer["usage"]["similar_retained_tokens"] == LENGTH // 2
    assert half.pushed_bytes * 2 == all_of_it.pushed_bytes
    assert len(fewer["token_ids"]) == 20, "another block was taken on the way"
    assert fewer["token_ids"][0] == whole["token_ids"][0]
    assert "identical" in replayed(cluster, tmp_path)
    await nothing_held(cluster)


async def test_a_store_that_dies_costs_computing(cluster: Cluster, nc: Any, tmp_path: Path) -> None:
    ids = document(5)
    await ask(cluster, nc, ids)
    order = await last_order(cluster)
    cluster.kill(f"store-{order.worker_id}")
    answer = await ask(cluster, nc, near(ids, 5))
    assert len(answer["token_ids"]) == 6
    assert "identical" in replayed(cluster, tmp_path)
    await nothing_held(cluster)


async def test_exact_numerics_refuse_it_by_name(tmp_path: Path) -> None:
    with running(tmp_path, "--prefill", "1", "--engine", "null", "--numerics", "exact") as exact:
        nc = await exact.connect("client")
        payload = orjson.dumps({"prompt": "x", "kv": {"similar": True}})
        reply = await nc.request(f"{subjects.API}.generate", payload, timeout=20)
        error = orjson.loads(reply.data)["error"]
        assert error["param"] == "kv"
        assert "exact numerics" in error["message"]
        await nc.close()
