"""Similar prompts on real clusters: what stands in and is told, what stays exact, and what a lost store costs."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from halfmoon.schemas.decisions import StartPrefill
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.prompts import text_ids
from tests.cluster.steering import blocks_told, draining, last_seq, prefill_of
from tests.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
#: Four blocks.
LENGTH, BLOCKS = 1_024, 4
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


async def known(cluster: Cluster, nc: Any, ids: list[int], **fields: Any) -> str:
    """The prompt is computed, and the conductors know where; the worker."""
    after = await last_seq(cluster)
    answer = await ask(cluster, nc, ids, **fields)
    assert answer["usage"]["similar_tokens"] == 0
    order = await last_order(cluster)
    await prefill_of(cluster, order.request_id)
    await blocks_told(cluster, order.worker_id, after, BLOCKS)
    return order.worker_id


async def nothing_held(cluster: Cluster) -> None:
    async def none() -> bool:
        stores = await cluster.stores()
        return len(stores) >= 3 and not any(status.holds + status.leases for status in stores.values())

    await eventually(none, "stores hold something")


async def test_a_similar_prompt_stands_in_is_told_and_leaves_nothing_under_its_keys(
    cluster: Cluster, nc: Any, tmp_path: Path
) -> None:
    ids = document(1)
    await known(cluster, nc, ids)
    answer = await ask(cluster, nc, near(ids, 1))
    order, usage = await last_order(cluster), answer["usage"]
    went = await prefill_of(cluster, order.request_id)
    assert order.reference is not None
    assert went.similar is not None
    assert usage["similar_tokens"] == went.similar.tokens > 0.8 * LENGTH
    assert usage["similar_computed_tokens"] == went.similar.computed_tokens < 0.45 * LENGTH
    assert usage["similar_resemblance"] == order.reference.resemblance > 70
    whole = await ask(cluster, nc, near(ids, 1), similar=False)
    assert whole["usage"]["cached_tokens"] == 0, "what stood in was found under the prompt's own keys"
    assert "similar_tokens" not in whole["usage"]
    # The first token is that of a prompt that is computed.
    assert whole["token_ids"][0] == answer["token_ids"][0]
    assert "identical" in replayed(cluster, tmp_path)
    told = explained(cluster, tmp_path, order.request_id)
    assert f"KV of a similar prompt stands in: {BLOCKS} blocks at {order.reference.node_id}" in told
    (conductor,) = await cluster.conductors(1)
    assert conductor.counts.similar_tokens >= usage["similar_tokens"]
    await nothing_held(cluster)


def explained(cluster: Cluster, directory: Path, request_id: str) -> str:
    """Of the log that `replayed` saved."""
    words = [sys.executable, "-m", "halfmoon.cli.main", "replay", str(directory / "run.jsonl.zst")]
    explain = [*words, "--explain", request_id]
    done = subprocess.run(explain, env=cluster.environment, capture_output=True, text=True, check=True)
    return done.stdout


async def test_what_is_generated_behind_it_is_not_shared(cluster: Cluster, nc: Any) -> None:
    ids = document(4)
    await known(cluster, nc, ids)
    # With the answer the last block is whole.
    prompt = near(ids, 4) + document(7)[:200]
    stood_in = await cluster.generate(
        nc, prompt=prompt, max_tokens=64, temperature=0, ignore_eos=True, kv={"similar": True}
    )
    assert stood_in["usage"]["similar_tokens"] > 0
    after = await ask(cluster, nc, prompt + stood_in["token_ids"], similar=False)
    assert after["usage"]["cached_tokens"] == 0


async def test_tenants_and_salts_are_apart(cluster: Cluster, nc: Any) -> None:
    ids = document(3)
    await known(cluster, nc, ids, tenant="one")
    for other in ({"tenant": "two"}, {"tenant": "one", "cache_salt": "s"}, {}):
        answer = await ask(cluster, nc, near(ids, 3), **other)
        assert answer["usage"]["similar_tokens"] == 0, other
    again = await ask(cluster, nc, near(ids, 5), tenant="one")
    assert again["usage"]["similar_tokens"] > 0


async def test_documents_of_other_prompts_stand_in_from_any_node(
    cluster: Cluster, nc: Any, tmp_path: Path
) -> None:
    one, two = document(11)[:640], document(12)[:640]
    first = ""
    for number, ids in enumerate((one, two)):
        # The second by the other worker, so that one of the two is read from elsewhere.
        async with draining(cluster, first) if first else contextlib.AsyncExitStack():
            after = await last_seq(cluster)
            prompt = [*document(20 + number)[:100], *ids, *document(25 + number)[:284]]
            answer = await cluster.generate(nc, prompt=prompt, max_tokens=1, kv={"documents": [ids]})
            assert answer["usage"]["similar_tokens"] == 0
            order = await last_order(cluster)
            await prefill_of(cluster, order.request_id)
            await blocks_told(cluster, order.worker_id, after, len(prompt) // 256)
            first = order.worker_id
    prompt = [*two, *one, *document(30)[:50]]
    answer = await cluster.generate(
        nc, prompt=prompt, max_tokens=2, temperature=0, kv={"documents": [one, two]}
    )
    order = await last_order(cluster)
    assert order.reference is not None
    assert len(order.reference.parts) == 2
    assert any(part.node_id != order.worker_id for part in order.reference.parts)
    assert answer["usage"]["similar_tokens"] > 0.75 * len(prompt)
    assert answer["usage"]["similar_computed_tokens"] < 0.45 * len(prompt)
    whole = await cluster.generate(nc, prompt=prompt, max_tokens=2, temperature=0)
    assert whole["usage"]["cached_tokens"] == 0, "what stood in was found under the prompt's own keys"
    assert "identical" in replayed(cluster, tmp_path)
    assert "KV of documents stands in" in explained(cluster, tmp_path, order.request_id)
    await nothing_held(cluster)


async def test_another_node_gives_it_and_fewer_tokens_go_to_the_decode_worker(
    cluster: Cluster, nc: Any, tmp_path: Path
) -> None:
    ids = document(6)
    there = await known(cluster, nc, ids)
    went = {}
    async with draining(cluster, there):
        for retain in (1, 0.5):
            kv = {"similar": True, "retain": retain}
            answer = await cluster.generate(
                nc, prompt=near(ids, 6), max_tokens=20, temperature=0, ignore_eos=True, kv=kv
            )
            order = await last_order(cluster)
            assert order.worker_id != there
            assert order.reference is not None
            assert retain < 1 or order.reference.node_id != order.worker_id, "it was on the worker's own node"
            assert answer["usage"]["similar_tokens"] > 0.8 * LENGTH
            went[retain] = await prefill_of(cluster, order.request_id), answer
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
    worker = await known(cluster, nc, ids)
    cluster.kill(f"store-{worker}")
    answer = await ask(cluster, nc, near(ids, 5))
    assert len(answer["token_ids"]) == 6
    assert "identical" in replayed(cluster, tmp_path)
    await nothing_held(cluster)
