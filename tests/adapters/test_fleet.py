"""A cluster over two engines that compute nothing, one with vLLM's wire and one with SGLang's.

`halfmoon up --adapt-vllm --adapt-sglang`, real HTTP, real ZMQ, real processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from halfmoon.conductor.replay.logfile import LogFile
from halfmoon.conductor.replay.verify import Replay
from halfmoon.conductor.replay.whatif import compare, recorded
from halfmoon.conductor.simulation.report import Workers
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartMixed
from halfmoon.schemas.events import DecodeFailed, PolicyChanged, WorkerLeft
from tests.adapters.fake_fleet import PROMPT_BLOCKS, PROMPT_TOKENS, FakeFleet, answer, prompt
from tests.adapters.fleet import explained
from tests.adapters.harness import FakeEngine, fake_engines
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.eventually import eventually, within


@pytest.fixture(scope="module")
def engines() -> Iterator[list[FakeEngine]]:
    with fake_engines(2, "--token-us", "100", "--blocks", "4096", wires=("vllm", "sglang")) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engines: list[FakeEngine]) -> Iterator[Cluster]:
    flags = [word for engine in engines for word in (f"--adapt-{engine.wire}", engine.url)]
    patient = (*PATIENT, "--worker-wait-s", "600")
    with running(tmp_path_factory.mktemp("fleet"), *flags, "--dtype", "float32", *patient) as one:
        yield one


async def test_requests_go_where_their_blocks_are(fleet: FakeFleet) -> None:
    for number in range(4):
        ids = prompt(number)
        cold = await fleet.cold(ids, blocks=PROMPT_BLOCKS)
        assert cold["token_ids"] == answer(ids, 4)
        again = await fleet.ask([*ids[:2_570], *prompt(100 + number, 10)])
        assert again["decode_worker"] == cold["decode_worker"]
        assert again["usage"]["cached_tokens"] == 2_560
        # All whole blocks of the engine's: no fewer than the conductor counts on.
        assert fleet.engines[cold["decode_worker"]].asked()[-1]["cached"] == 2_560
    asked = fleet.engines[cold["decode_worker"]].asked()
    assert len({one["connection"] for one in asked}) < len(asked), "each answer had a connection of its own"


async def test_tenants_and_salts_share_nothing(fleet: FakeFleet) -> None:
    ids = prompt(10)
    for fields in ({}, {"tenant": "one"}, {"tenant": "two"}, {"cache_salt": "s"}):
        cold = await fleet.cold(ids, blocks=PROMPT_BLOCKS, **fields)
        assert fleet.engines[cold["decode_worker"]].asked()[-1]["cached"] == 0, fields
        warm = await fleet.ask(ids, **fields)
        assert (warm["usage"]["cached_tokens"], warm["decode_worker"]) == (2_560, cold["decode_worker"]), (
            fields
        )


async def test_sampling_reaches_the_engine(fleet: FakeFleet) -> None:
    asked = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 11, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [77],
        "logit_bias": {"5": 1.5},
    }  # fmt: skip
    said = await fleet.cluster.generate(fleet.nc, prompt=prompt(11), max_tokens=3, **asked)
    body = fleet.engines[said["decode_worker"]].asked()[-1]["body"]
    assert {name: body[name] for name in asked} == asked
    assert body["max_tokens"] == 3


async def refused(
    fleet: FakeFleet, ids: list[int], **fields: Any
) -> tuple[int, Mapping[str, str], dict[str, Any]]:
    """What an HTTP client gets: status, headers, error."""
    body = {"model": "smollm2-135m-instruct", "prompt": ids, "max_tokens": 4, "temperature": 0, **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet.cluster.http}/v1/completions", json=body) as response,
    ):
        return response.status, response.headers, (await response.json())["error"]


async def test_what_an_engine_cannot_do_is_refused_by_name(fleet: FakeFleet) -> None:
    status, _, error = await refused(fleet, prompt(12), bad_words=["moon"])
    assert (status, error["param"], error["message"]) == (
        400,
        "bad_words",
        "bad_words: not over an engine behind an adapter",
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("status", [400, 413, 422])
async def test_an_engines_refusal_reaches_the_client(fleet: FakeFleet, status: int, streamed: bool) -> None:
    error = {"message": "no such thing here", "type": "BadRequestError", "param": "top_k"}
    with fleet.refusing(status, error=error, streamed=streamed):
        for stream in (False, True):
            got, _, said = await refused(fleet, prompt(13), stream=stream)
            assert (got, said["param"], said["code"]) == (status, "top_k", "engine_refused")
            assert said["message"] == f"the engine answers {status}: no such thing here"


@pytest.mark.parametrize("status", [404, 429, 503])
async def test_what_one_engine_refuses_for_now_another_one_answers(fleet: FakeFleet, status: int) -> None:
    with fleet.only("sglang-0", status):
        for number in range(14, 18):
            assert (await fleet.ask(prompt(number)))["decode_worker"] == "sglang-0"
    with fleet.refusing(status, headers={"retry-after": "7"}):
        got, headers, said = await refused(fleet, prompt(21))
    assert (got, said["param"], headers["retry-after"]) == (status, None, "7")
    assert said["message"].endswith(f"the engine answers {status}: later")


async def test_what_is_wrong_between_adapter_and_engine_is_not_the_clients_fault(fleet: FakeFleet) -> None:
    with fleet.only("sglang-0", 401):
        assert (await fleet.ask(prompt(22)))["decode_worker"] == "sglang-0"
    with fleet.refusing(401):
        got, _, said = await refused(fleet, prompt(22))
    assert (got, said["code"]) == (500, "failed")


async def placed_elsewhere(fleet: FakeFleet, ids: list[int]) -> tuple[bool, bool]:
    """Ask for what one engine alone has, while that takes nothing: whether its blocks are to be fetched, and whether an
    adapter has said that it fetches none.
    """
    at = (await fleet.cold(ids, blocks=PROMPT_BLOCKS))["decode_worker"]
    with fleet.only(fleet.other(at)):
        assert (await fleet.ask(ids))["decode_worker"] == fleet.other(at)
    orders = [one.decision for one in await fleet.cluster.decisions() if isinstance(one.decision, StartMixed)]
    assert orders[-1].worker_id == fleet.other(at)
    said = "wants the policy local_cache_aware" in fleet.cluster.output(fleet.other(at))
    return bool(orders[-1].fetches), said


async def test_no_kv_is_planned_to_move_and_an_adapter_that_is_to_fetch_some_says_so(
    fleet: FakeFleet,
) -> None:
    assert await placed_elsewhere(fleet, prompt(18)) == (False, False)
    bus = await fleet.cluster.bus()
    try:
        policy = (await fleet.cluster.all_conductors(1))[0].policy
        await bus.append(
            PolicyChanged(policy=msgspec.structs.replace(policy, name="halfmoon")),
            source_id=subjects.OPERATOR,
        )
        assert await placed_elsewhere(fleet, prompt(19)) == (True, True)
        await bus.append(PolicyChanged(policy=policy), source_id=subjects.OPERATOR)
    finally:
        await bus.close()


async def test_a_cancelled_request_ends_at_the_engine(fleet: FakeFleet) -> None:
    fleet.fault("hold", after=5)
    after = await fleet.last_seq()
    asking = asyncio.ensure_future(fleet.ask(prompt(20), 500))
    engine = fleet.engines[await fleet.drawing(after)]
    placed = [one.decision for one in await fleet.cluster.decisions() if isinstance(one.decision, StartMixed)]
    named = msgspec.json.encode({"id": placed[-1].request_id})
    await within(fleet.nc.request(f"{subjects.API}.cancel", named, timeout=100), "the cancel is answered")
    await eventually(lambda: engine.asked()[-1]["end"] == "aborted", "the engine drops it")
    assert engine.asked()[-1]["drawn"] == 5
    fleet.fault("let go")
    await within(asyncio.gather(asking, return_exceptions=True), "its client is told")


async def test_batches_that_were_lost_are_asked_for_again(fleet: FakeFleet) -> None:
    ids, after = prompt(30), await fleet.last_seq()
    fleet.fault("unsent", batches=2)
    at = (await fleet.ask(ids))["decode_worker"]
    engine = fleet.engines[at]
    assert engine.fault("unsent", batches=0)["left"] == 1
    fleet.engines[fleet.other(at)].fault("unsent", batches=0)
    # The next batch shows the gap.
    engine.fault("events", events=[{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}])
    await fleet.stored(after, at, PROMPT_BLOCKS)
    again = await fleet.ask(ids)
    assert (again["decode_worker"], again["usage"]["cached_tokens"]) == (at, 2_560)


async def test_batches_that_nobody_has_any_more_leave_nothing_certain(fleet: FakeFleet) -> None:
    ids = prompt(31)
    at = (await fleet.cold(ids, blocks=PROMPT_BLOCKS))["decode_worker"]
    engine = fleet.engines[at]
    engine.fault("unsent", batches=1)
    engine.fault("events", events=[{"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}])
    engine.fault("forget")
    engine.fault("events", events=[{"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}])
    await fleet.known(0, at)
    # The engine still has it all, and the next block that it stores behind it shows that.
    after = await fleet.last_seq()
    with fleet.only(at):
        assert (await fleet.ask([*ids, *prompt(32, 300)]))["decode_worker"] == at
    await fleet.stored(after, at, PROMPT_BLOCKS + 1)


async def test_a_cleared_cache_is_known(fleet: FakeFleet) -> None:
    at = (await fleet.cold(prompt(33), blocks=PROMPT_BLOCKS))["decode_worker"]
    fleet.engines[at].fault("clear")
    await fleet.known(0, at)
    assert (await fleet.ask(prompt(33)))["usage"]["cached_tokens"] == 0


async def test_an_engine_that_lies_costs_placements_alone(fleet: FakeFleet) -> None:
    at = (await fleet.cold(prompt(34), blocks=PROMPT_BLOCKS))["decode_worker"]
    engine, before = fleet.engines[at], await fleet.last_seq()
    engine.fault("raw", payload="c1")
    engine.fault("raw", payload=msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}, 7]]).hex())
    lie = {
        "type": "BlockStored",
        "block_hashes": [5],
        "parent_block_hash": 4,
        "token_ids": [1] * 16,
        "block_size": 16,
    }
    engine.fault("events", events=[lie])
    engine.fault("events", events=[{**lie, "parent_block_hash": None, "token_ids": [1]}])
    assert (await fleet.ask(prompt(34)))["token_ids"] == answer(prompt(34), 4)
    # What it tells next is read after the lies, and is all that was believed.
    with fleet.only(at):
        await fleet.cold(prompt(35), blocks=PROMPT_BLOCKS)
    assert await fleet.blocks_told(before, at) == PROMPT_BLOCKS


async def test_an_answer_that_breaks_off_goes_on(fleet: FakeFleet) -> None:
    ids, after = prompt(38), await fleet.last_seq()
    fleet.fault("hold", after=5)
    asking = asyncio.ensure_future(fleet.ask(ids, 300))
    at = await fleet.drawing(after)
    fleet.engines[at].fault("break", answers=1)
    fleet.fault("let go")
    said = await within(asking, "the answer goes on")
    assert said["token_ids"] == answer(ids, 300)
    (broken,) = await fleet.told(after, DecodeFailed, at)
    assert broken.retryable
    # The engine is well, and stays.
    assert await fleet.told(after, WorkerLeft, at) == []


async def test_an_engine_that_is_killed_in_mid_answer_costs_no_token(fleet: FakeFleet) -> None:
    ids, after = prompt(40), await fleet.last_seq()
    fleet.fault("hold", after=5)
    asking = asyncio.ensure_future(fleet.ask(ids, 300))
    at = await fleet.drawing(after)
    other = fleet.engines[fleet.other(at)]
    other.fault("let go")
    fleet.engines[at].kill()
    said = await within(asking, "the answer goes on elsewhere")
    assert said["token_ids"] == answer(ids, 300)
    assert said["decode_worker"] == fleet.other(at)
    # What its client had came as part of the prompt.
    assert other.asked()[-1]["prompt"] > PROMPT_TOKENS
    assert (await fleet.ask(prompt(41)))["decode_worker"] == fleet.other(at)
    # Back with an empty cache, it joins by itself.
    fleet.engines[at].start()
    await fleet.joined(after, at)


async def test_while_all_engines_are_away_requests_wait(fleet: FakeFleet) -> None:
    ids, after = prompt(45), await fleet.last_seq()
    fleet.fault("hold", after=5)
    asking = asyncio.ensure_future(fleet.ask(ids, 200))
    await fleet.drawing(after)
    for at, engine in fleet.engines.items():
        engine.kill()
        await fleet.gone(after, at)
    new = asyncio.ensure_future(fleet.ask(prompt(46)))
    fleet.engines["sglang-0"].start()
    said, other = await within(asyncio.gather(asking, new), "both are answered")
    assert said["token_ids"] == answer(ids, 200)
    assert other["token_ids"] == answer(prompt(46), 4)
    fleet.engines["vllm-0"].start()
    await fleet.joined(after, "vllm-0")


async def test_the_log_replays_and_names_both_candidates(fleet: FakeFleet, tmp_path: Path) -> None:
    """Last of the module: the log has all of the above."""
    said = await fleet.ask(prompt(50))
    replayed(fleet.cluster, tmp_path)
    text = explained(tmp_path / "run.jsonl.zst", said["id"])
    assert "vllm-0" in text, text
    assert "sglang-0" in text, text
    # What if: the same requests at two simulated mixed workers.
    run = recorded(Replay(LogFile(tmp_path / "run.jsonl.zst")))
    found = compare(run, msgspec.structs.replace(run.policy, ttft_slo_ns=1))
    assert (found.recorded.setting.workers, run.cluster.token_budget) == (Workers(0, 0, 2), 2_048)
    for simulation in (found.simulated, found.what_if):
        endings = simulation.endings
        assert endings.completed + sum(endings.rejected.values()) == len(run.arrivals)
    assert found.simulated.service.hits_by_source["local"] > 0.1
    assert found.what_if.endings.completed < found.simulated.endings.completed
