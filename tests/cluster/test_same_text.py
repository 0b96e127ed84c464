"""The cluster says what an independent implementation says, and the same bits however the KVCache got there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Cluster, running
from tests.cluster.prompts import LENGTHS, OUTPUT_TOKENS, prompt
from tests.cluster.steering import draining, prefill_of
from tests.workers.reference import Reference

Answers = dict[int, dict[str, Any]]
SUBSET = (40, 257, 600, 2000)


@pytest.fixture(scope="module")
def f32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("f32"), "--decode", "1", "--dtype", "float32") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def reference() -> dict[int, list[int]]:
    """Greedy tokens of transformers' Llama on the same weights, by length of the prompt."""
    model = Reference.load("smollm2-135m-instruct")
    return {length: model.greedy(prompt(length), OUTPUT_TOKENS) for length in LENGTHS}


async def ask(cluster: Cluster, nc: Any, length: int, **fields: Any) -> dict[str, Any]:
    return await cluster.generate(
        nc,
        prompt=prompt(length),
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        ignore_eos=True,
        logits_digest=True,
        **fields,
    )


def same(answer: dict[str, Any], other: dict[str, Any]) -> bool:
    """The same tokens from the same bits of logits."""
    assert len(answer["logits_digests"]) == OUTPUT_TOKENS
    assert all(answer["logits_digests"])
    return bool(
        answer["token_ids"] == other["token_ids"] and answer["logits_digests"] == other["logits_digests"]
    )


async def all_ways(cluster: Cluster, lengths: tuple[int, ...], transport: str) -> Answers:
    """Cold, then with the prefix cached on the own node, then only on another node; all with the same bits."""
    nc = await cluster.connect()
    cold: Answers = {}
    for length in lengths:
        cold[length] = await ask(cluster, nc, length)
        assert cold[length]["usage"]["cached_tokens"] == 0 or length > min(lengths)
    for length in lengths:
        whole_blocks = (length - 1) // 256 * 256
        here = await ask(cluster, nc, length)
        went = await prefill_of(cluster, here["id"])
        assert went.cached_local_tokens == whole_blocks, (length, went)
        assert went.cached_fetched_tokens == 0
        assert same(here, cold[length]), length
    for length in lengths:
        whole_blocks = (length - 1) // 256 * 256
        salted = {"cache_salt": f"remote-{length}"}
        first = await ask(cluster, nc, length, **salted)
        async with draining(cluster, first["prefill_worker"]):
            there = await ask(cluster, nc, length, **salted)
        went = await prefill_of(cluster, there["id"])
        assert went.worker_id != first["prefill_worker"]
        assert went.cached_fetched_tokens == whole_blocks, (length, went)
        assert went.cached_local_tokens == 0
        assert same(there, cold[length]), length
        assert same(first, cold[length]), length
    stores = await cluster.stores()
    assert {store.transport for store in stores.values()} == {transport}
    await nc.close()
    return cold


async def batch_of_eight(cluster: Cluster, cold: Answers) -> int:
    """Eight at once on the one decode worker: the same bits. Returns how many ran together."""
    nc = await cluster.connect()
    lengths = [length for length in cold if length <= 1000][-8:]
    lengths = (lengths * 8)[:8]
    answers = await asyncio.gather(*(ask(cluster, nc, length) for length in lengths))
    for length, answer in zip(lengths, answers, strict=True):
        assert same(answer, cold[length]), length
    await nc.close()
    return 8
