"""Mixed workers of a real cluster: a pair's bits and transformers' tokens, cached or not, and whoever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from halfmoon.schemas.decisions import StartDecode, StartMixed, StartPrefill
from halfmoon.schemas.events import PrefillFinished
from halfmoon.workers.hold_points import DECODE_STEP
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster
from tests.cluster.holding import Holds, running_with_holds
from tests.cluster.prompts import prompt
from tests.cluster.steering import blocks_told, draining, last_seq, prefill_of
from tests.cluster.test_choices import asked
from tests.cluster.test_same_text import Answers, Form, ask, same, written_down

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FORM = Form((40, 257, 600), 6)
MODEL = ("--dtype", "float32", "--pool-mib", "256", *PATIENT)
OTHER = {"mixed-0": "mixed-1", "mixed-1": "mixed-0"}


async def three_ways(cluster: Cluster) -> Answers:
    """Cold, cached on the own node, and fetched from the other mixed worker's node."""
    nc = await cluster.connect()
    cold: Answers = {}
    for length in FORM.lengths:
        cold[length] = await ask(cluster, nc, length, FORM.tokens)
        assert cold[length]["prefill_worker"] == cold[length]["decode_worker"]
        whole_blocks = (length - 1) // 256 * 256
        for away in (OTHER[cold[length]["prefill_worker"]], cold[length]["prefill_worker"]):
            async with draining(cluster, away):
                again = await ask(cluster, nc, length, FORM.tokens)
            went = await prefill_of(cluster, again["id"])
            found = {went.cached_local_tokens, went.cached_fetched_tokens}
            assert (went.worker_id, found) == (OTHER[away], {0, whole_blocks}), (length, went)
            assert same(again, cold[length]), (length, away)
    await nc.close()
    return cold


async def partly_cached(cluster: Cluster, cold: Answers) -> None:
    """A prompt of which the beginning alone is known, and then several at once: chunks beside decodes."""
    nc = await cluster.connect()
    salted, before = {"cache_salt": "begun"}, await last_seq(cluster)
    some = await cluster.generate(nc, prompt=prompt(600)[:300], max_tokens=1, temperature=0, **salted)
    await blocks_told(cluster, some["prefill_worker"], before, 1)
    begun = await ask(cluster, nc, 600, FORM.tokens, **salted)
    assert begun["usage"]["cached_tokens"] == 256
    assert same(begun, cold[600])
    before = await last_seq(cluster)
    lengths = FORM.lengths * 2
    salts = [{"cache_salt": f"alone-{place}"} if place % 2 else {} for place in range(len(lengths))]
    answers = await asyncio.gather(
        *(ask(cluster, nc, length, FORM.tokens, **salt) for length, salt in zip(lengths, salts, strict=True))
    )
    for length, answer in zip(lengths, answers, strict=True):
        assert same(answer, cold[length]), length
    decoding: set[str] = set()
    beside = False
    for stamped in await cluster.events(before):
        match stamped.event:
            case PrefillFinished(worker_id=worker_id, decodes=decodes):
                beside = beside or worker_id in decoding
                if decodes:
                    decoding.add(worker_id)
            case _:
                pass
    assert beside, "no prompt was computed by a worker that decoded"
    await nc.close()


async def choices_of_a_short_prompt(cluster: Cluster) -> None:
    """One mixed worker alone: the prompt is computed for the first choice, whatever it computes beside."""
    nc = await cluster.connect()
    body: dict[str, Any] = {"prompt": prompt(40), "n": 3, "max_tokens": 8, "seed": 3, "cache_salt": "choices"}
    async with draining(cluster, "mixed-1"):
        texts, prefills = await asked(cluster, body)
        assert sorted(each.cached_local_tokens for each in prefills) == [0, 40, 40]
        assert {each.worker_id for each in prefills} == {"mixed-0"}
        del body["n"]
        for number, text in enumerate(texts):
            alone = await cluster.generate(nc, **{**body, "seed": 3 + number})
            assert (alone["text"], alone["usage"]["cached_tokens"]) == (text, 0)
    await nc.close()


async def killed_in_mid_answer(cluster: Cluster, tokens: int) -> None:
    """The text of one that nobody disturbs, without a token twice."""
    nc = await cluster.connect()
    whole = await ask(cluster, nc, 600, tokens)
    holds = Holds(cluster)
    holds.arm(DECODE_STEP, tokens // 2)
    asked = asyncio.create_task(ask(cluster, nc, 600, tokens))
    order_id = await holds.held(DECODE_STEP)
    placed = [one.decision for one in await cluster.decisions() if isinstance(one.decision, StartMixed)]
    (order,) = [one for one in placed if one.order_id == order_id]
    cluster.kill(order.worker_id)
    answer = await asked
    assert same(answer, whole)
    placed = [one.decision for one in await cluster.decisions() if isinstance(one.decision, StartMixed)]
    assert [one.placement for one in placed if one.request_id == order.request_id] == [1, 2]
    await nc.close()


async def test_mixed_workers_give_a_pairs_bits_in_all_ways(tmp_path: Path) -> None:
    """Beside a pair, which takes what no mixed worker is there for."""
    roles = ("--mixed", "2", "--mixed-choice", "preferred", "--prefill", "1", "--decode", "1")
    with running_with_holds(tmp_path, *roles, *MODEL) as cluster:
        cold = await three_ways(cluster)
        assert {length: answer["token_ids"] for length, answer in cold.items()} == written_down(FORM)
        await partly_cached(cluster, cold)
        given = [one.decision for one in await cluster.decisions()]
        assert not any(isinstance(one, StartPrefill | StartDecode) for one in given)
        nc = await cluster.connect()
        async with draining(cluster, "mixed-0"), draining(cluster, "mixed-1"):
            for length in FORM.lengths:
                answer = await ask(cluster, nc, length, FORM.tokens, cache_salt="of a pair")
                assert answer["prefill_worker"] == "prefill-0"
                assert same(answer, cold[length]), length
        await nc.close()
        await choices_of_a_short_prompt(cluster)
        await killed_in_mid_answer(cluster, 32)
        assert "identical" in replayed(cluster, tmp_path)
