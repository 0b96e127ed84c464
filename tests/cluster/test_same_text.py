"""The cluster says what an independent implementation says, and the same bits however the KVCache got there.

Invariant I110 of `docs/invariants.md`.
"""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from halfmoon.schemas.events import (
    DecodeStarted,
    PrefillFinished,
    RequestFinished,
    WorkerHeartbeat,
    WorkerJoined,
)
from halfmoon.workers.hold_points import DECODE_STEP
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.holding import Holds, running_with_holds
from tests.cluster.prompts import LENGTHS, MODEL, prompt
from tests.cluster.steering import draining, prefill_of
from tests.eventually import eventually

Answers = dict[int, dict[str, Any]]


class Form(NamedTuple):
    """What is asked: prompts of these lengths, and so many tokens after each. Nobody else has the salt."""

    lengths: tuple[int, ...]
    tokens: int = 12
    salt: str = "same text"


#: Of eight requests that are asked at once, at least so many are one batch.
TOGETHER = 4
#: One token more than a block, and a prompt with two whole blocks and a part of one.
SHORT = Form((257, 600), 6)
WHOLE = Form(LENGTHS)
SUBSET = Form((40, 257, 600, 2000))
#: Greedy tokens of transformers' Llama on the same weights, by length of the prompt: `reference(WHOLE)`, written down.
WRITTEN_DOWN = Path(__file__).parent / "transformers_tokens.json"


def written_down(form: Form) -> dict[int, list[int]]:
    """Transformers' tokens without transformers, whose import takes longer than all that is asked."""
    known = json.loads(WRITTEN_DOWN.read_text())
    return {length: known[str(length)][: form.tokens] for length in form.lengths}


@functools.cache
def reference(form: Form) -> dict[int, list[int]]:
    """Greedy tokens of transformers' Llama on the same weights, by length of the prompt."""
    import torch

    from halfmoon.workers.model.loading.files import load_model
    from tests.workers.reference import reference_greedy, reference_model

    # Two threads of one product wait for each other by spinning: beside a busy cluster that takes ten times as long.
    torch.set_num_threads(1)
    model = reference_model(load_model(MODEL, dtype=torch.float32))
    return {length: reference_greedy(model, prompt(length), form.tokens) for length in form.lengths}


async def ask(cluster: Cluster, nc: Any, length: int, tokens: int, **fields: Any) -> dict[str, Any]:
    return await cluster.generate(
        nc,
        prompt=prompt(length),
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        logits_digest=True,
        **fields,
    )


def other(prefill_worker: str) -> str:
    return {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[prefill_worker]


def same(answer: dict[str, Any], other: dict[str, Any]) -> bool:
    """The same tokens from the same bits of logits."""
    assert len(answer["logits_digests"]) == answer["usage"]["completion_tokens"] > 0
    assert all(answer["logits_digests"])
    return bool(
        answer["token_ids"] == other["token_ids"] and answer["logits_digests"] == other["logits_digests"]
    )


async def all_ways(cluster: Cluster, form: Form, transport: str) -> Answers:
    """Cold, then with the prefix cached on the own node, then only on another node; all with the same bits."""
    nc = await cluster.connect()
    cold: Answers = {}
    lengths, tokens, salt = form
    for length in lengths:
        cold[length] = await ask(cluster, nc, length, tokens, cache_salt=salt)
        assert cold[length]["usage"]["cached_tokens"] == 0
    for length in lengths:
        whole_blocks = (length - 1) // 256 * 256
        async with draining(cluster, other(cold[length]["prefill_worker"])):
            here = await ask(cluster, nc, length, tokens, cache_salt=salt)
        went = await prefill_of(cluster, here["id"])
        assert went.cached_local_tokens == whole_blocks, (length, went)
        assert went.cached_fetched_tokens == 0
        assert same(here, cold[length]), length
    for length in lengths:
        whole_blocks = (length - 1) // 256 * 256
        async with draining(cluster, cold[length]["prefill_worker"]):
            there = await ask(cluster, nc, length, tokens, cache_salt=salt)
        went = await prefill_of(cluster, there["id"])
        assert went.worker_id != cold[length]["prefill_worker"]
        assert went.cached_fetched_tokens == whole_blocks, (length, went)
        assert went.cached_local_tokens == 0
        assert same(there, cold[length]), length
    counted = {name for store in (await cluster.stores()).values() for name, n in store.counters.items() if n}
    assert any(name.startswith("tcp_") for name in counted) == (transport == "tcp"), counted
    await nc.close()
    return cold


async def cold_again(cluster: Cluster, cold: Answers, form: Form) -> None:
    """Under a salt of its own nothing is found, and what is computed anew has the same bits."""
    nc = await cluster.connect()
    for length in form.lengths:
        anew = await ask(cluster, nc, length, form.tokens, cache_salt=f"{form.salt} again")
        assert anew["usage"]["cached_tokens"] == 0
        assert same(anew, cold[length]), length
    await nc.close()


async def batch_of_eight(cluster: Cluster, cold: Answers, form: Form) -> None:
    """Eight at once on the one decode worker, until all lengths have been in: the same bits as alone."""
    nc = await cluster.connect()
    for lengths in dict.fromkeys((tuple(cold)[:8], tuple(cold)[-8:])):
        before = (await cluster.events())[-1].seq
        holds = Holds(cluster)
        # The first step is not made before others are there: their KV comes meanwhile, and they join after it.
        holds.arm(DECODE_STEP)
        eight = (lengths * 8)[:8]
        asked = asyncio.gather(
            *(ask(cluster, nc, length, form.tokens, cache_salt=form.salt) for length in eight)
        )
        await holds.held(DECODE_STEP)
        await eventually(lambda before=before: others_wait(cluster, before), "others wait for the first step")
        holds.go_on()
        for length, answer in zip(eight, await asked, strict=True):
            assert same(answer, cold[length]), length
        assert await most_at_once(cluster, before) >= TOGETHER
    await nc.close()


async def others_wait(cluster: Cluster, before: int) -> bool:
    """After this place in the log so many prefills have ended that with the one that runs there are TOGETHER, and the
    decode worker has said so since.
    """
    ended, waiting = 0, False
    for stamped in await cluster.events(before):
        match stamped.event:
            case PrefillFinished():
                ended, waiting = ended + 1, False
            case WorkerHeartbeat(worker_id="decode-0", queued=queued):
                waiting = queued >= TOGETHER - 1
    return ended >= TOGETHER and waiting


async def most_at_once(cluster: Cluster, before: int) -> int:
    running = most = 0
    started: set[str] = set()
    for stamped in await cluster.events(before):
        match stamped.event:
            case DecodeStarted(order_id=order_id):
                started.add(order_id)
                running += 1
                most = max(most, running)
            case RequestFinished(order_id=order_id) if order_id in started:
                running -= 1
    return most


async def says_what_transformers_says(state: Path, form: Form, *flags: str) -> None:
    """Cold, local, remote and batched: the reference's tokens, and one and the same bits."""
    transport = "tcp" if "tcp" in flags else "shm"
    with running_with_holds(state, "--decode", "1", "--dtype", "float32", *PATIENT, *flags) as cluster:
        cold = await all_ways(cluster, form, transport)
        assert {length: answer["token_ids"] for length, answer in cold.items()} == reference(form)
        await cold_again(cluster, cold, form)
        await batch_of_eight(cluster, cold, form)


async def test_f32_over_shared_memory_says_what_transformers_says(small: Cluster) -> None:
    cold = await all_ways(small, SHORT, "shm")
    assert {length: answer["token_ids"] for length, answer in cold.items()} == written_down(SHORT)
    await batch_of_eight(small, cold, SHORT)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_written_down_is_what_transformers_says() -> None:
    assert written_down(WHOLE) == reference(WHOLE)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_prompts_of_up_to_4000_tokens_say_what_transformers_says(tmp_path: Path) -> None:
    await says_what_transformers_says(tmp_path / "shm", WHOLE)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_prompts_several_times_as_long_as_the_prefill_workers_caches(tmp_path: Path) -> None:
    """Cold, cached and fetched: transformers' tokens, and the bits of workers whose caches hold them."""
    form = Form((2000, 4000), 6)
    one = ("--decode", "1", "--dtype", "float32", *PATIENT)
    with running(tmp_path / "large", "--prefill", "1", *one) as cluster:
        nc = await cluster.connect()
        large = {length: await ask(cluster, nc, length, form.tokens) for length in form.lengths}
        await nc.close()
    with running(tmp_path / "small", "--prefill-kv-blocks", "4", *one) as cluster:
        joined = [stamped.event for stamped in await cluster.events()]
        sizes = {(e.role, e.kv_blocks, e.prompt_tokens_max) for e in joined if isinstance(e, WorkerJoined)}
        assert sizes == {("prefill", 4, 8192), ("decode", 64, 0)}
        small = await all_ways(cluster, form, "shm")
        await cold_again(cluster, small, form)
    assert all(same(small[length], large[length]) for length in form.lengths)
    assert {length: answer["token_ids"] for length, answer in small.items()} == written_down(form)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_f32_over_tcp_says_what_transformers_says(tmp_path: Path) -> None:
    await says_what_transformers_says(tmp_path / "tcp", WHOLE, "--transport", "tcp", "--encryption", "always")


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_bf16_gives_the_same_bits_in_all_ways(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = ("--decode", "1", "--dtype", "bfloat16", *PATIENT)
    with running_with_holds(tmp_path_factory.mktemp("bf16"), *flags) as cluster:
        cold = await all_ways(cluster, SUBSET, "shm")
        await cold_again(cluster, cold, SUBSET)
        await batch_of_eight(cluster, cold, SUBSET)
