"""A cluster over two engines that compute nothing: `halfmoon up --adapt-vllm`, real HTTP, real ZMQ, real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartMixed
from halfmoon.schemas.events import BlocksStored
from halfmoon.schemas.types import KEY_BYTES
from tests.adapters.fake_engine import next_token
from tests.adapters.harness import FakeEngine, fake_engines
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running

OTHER = {"vllm-0": "vllm-1", "vllm-1": "vllm-0"}


class Fleet:
    """The cluster and its engines, by the names of their workers."""

    def __init__(self, cluster: Cluster, engines: list[FakeEngine], nc: nats.NATS) -> None:
        self.cluster, self.nc = cluster, nc
        self.engines = {f"vllm-{number}": engine for number, engine in enumerate(engines)}

    async def ask(self, ids: list[int], tokens: int = 4, **fields: Any) -> dict[str, Any]:
        return await self.cluster.generate(self.nc, prompt=ids, max_tokens=tokens, temperature=0, **fields)

    async def last_seq(self) -> int:
        return (await self.cluster.events())[-1].seq

    async def stored(self, after: int, at: str) -> int:
        """Blocks of a node that the log has been told of since."""
        events = [one.event for one in await self.cluster.events(after)]
        told = [one for one in events if isinstance(one, BlocksStored) and one.node_id == at]
        return sum(len(one.block_keys) // KEY_BYTES for one in told)

    async def known(self, blocks: int, at: str) -> None:
        """Returns when the conductor knows so many blocks of a node."""
        async with asyncio.timeout(20):
            while await self.blocks(at) != blocks:
                await asyncio.sleep(0.05)

    async def blocks(self, at: str) -> int:
        """By the store's heartbeats."""
        nodes = (await self.cluster.status())["nodes"]
        return next(
            (node.get("kv_used", 0) for node in nodes if (node["id"], node["role"]) == (at, "store")), -1
        )


@pytest.fixture(scope="module")
def engines() -> Iterator[list[FakeEngine]]:
    with fake_engines(2, "--step-ms", "5") as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engines: list[FakeEngine]) -> Iterator[Cluster]:
    flags = [word for engine in engines for word in ("--adapt-vllm", engine.url)]
    with running(tmp_path_factory.mktemp("fleet"), *flags, "--dtype", "float32", *PATIENT) as one:
        yield one


@pytest.fixture
async def fleet(cluster: Cluster, engines: list[FakeEngine]) -> AsyncIterator[Fleet]:
    nc = await cluster.connect()
    yield Fleet(cluster, engines, nc)
    await nc.close()


def prompt(number: int, tokens: int = 700) -> list[int]:
    return [200 + (number * 6007 + place * 17) % 40_000 for place in range(tokens)]


def answer(ids: list[int], tokens: int) -> list[int]:
    """What one engine alone says."""
    text = list(ids)
    for _ in range(tokens):
        text.append(next_token(text))
    return text[len(ids) :]


async def test_requests_go_where_their_blocks_are(fleet: Fleet) -> None:
    for number in range(4):
        ids = prompt(number)
        cold = await fleet.ask(ids)
        assert cold["token_ids"] == answer(ids, 4)
        assert cold["usage"]["cached_tokens"] == 0
        await asyncio.sleep(0.1)  # the answer does not wait for the conductor to hear of the blocks
        # All but the last whole block of the engine's: more than the conductor counts on.
        again = await fleet.ask([*ids[:600], *prompt(100 + number, 100)])
        assert again["decode_worker"] == cold["decode_worker"]
        assert again["usage"]["cached_tokens"] == 512
        assert fleet.engines[cold["decode_worker"]].asked()[-1]["cached"] == 592


async def test_tenants_and_salts_share_nothing(fleet: Fleet) -> None:
    ids = prompt(10)
    for fields in ({}, {"tenant": "one"}, {"tenant": "two"}, {"cache_salt": "s"}):
        cold = await fleet.ask(ids, **fields)
        assert cold["usage"]["cached_tokens"] == 0, fields
        assert fleet.engines[cold["decode_worker"]].asked()[-1]["cached"] == 0, fields
        await asyncio.sleep(0.1)
        warm = await fleet.ask(ids, **fields)
        assert (warm["usage"]["cached_tokens"], warm["decode_worker"]) == (512, cold["decode_worker"]), fields


async def test_sampling_reaches_the_engine(fleet: Fleet) -> None:
    asked = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 11, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [77],
        "logit_bias": {"5": 1.5},
    }  # fmt: skip
    said = await fleet.cluster.generate(fleet.nc, prompt=prompt(11), max_tokens=3, **asked)
    body = fleet.engines[said["decode_worker"]].asked()[-1]["body"]
    assert {name: body[name] for name in asked} == asked
    assert body["max_tokens"] == 3


async def test_what_an_engine_cannot_do_is_refused_by_name(fleet: Fleet) -> None:
    with pytest.raises(AssertionError, match="bad_words: not over an engine behind an adapter"):
        await fleet.ask(prompt(12), bad_words=["moon"])


async def test_an_engines_refusal_reaches_the_client(fleet: Fleet) -> None:
    for engine in fleet.engines.values():
        engine.fault("refuse", status=400, message="no such thing here")
    with pytest.raises(AssertionError, match="the engine answers 400: no such thing here"):
        await fleet.ask(prompt(13))
    for engine in fleet.engines.values():
        engine.fault("refuse", status=0, message="")
    one = fleet.engines["vllm-0"]
    one.fault("refuse", status=503, message="later")
    for number in range(14, 18):  # another engine does better
        assert (await fleet.ask(prompt(number)))["decode_worker"] == "vllm-1"
    one.fault("refuse", status=0, message="")


async def test_a_cancelled_request_ends_at_the_engine(fleet: Fleet) -> None:
    ids = prompt(20)
    asking = asyncio.ensure_future(fleet.ask(ids, 3_000))
    async with asyncio.timeout(20):
        while not (there := [each for each in fleet.engines.values() if _drawing(each)]):
            await asyncio.sleep(0.02)
    placed = [one.decision for one in await fleet.cluster.decisions() if isinstance(one.decision, StartMixed)]
    named = msgspec.json.encode({"id": placed[-1].request_id})
    await fleet.nc.request(f"{subjects.API}.cancel", named, timeout=5)
    async with asyncio.timeout(20):
        while there[0].asked()[-1]["end"] != "aborted":
            await asyncio.sleep(0.02)
    assert there[0].asked()[-1]["drawn"] < 3_000
    await asyncio.gather(asking, return_exceptions=True)


def _drawing(engine: FakeEngine) -> bool:
    asked = engine.asked()
    return bool(asked) and not asked[-1]["end"] and asked[-1]["drawn"] > 3


async def test_batches_that_were_lost_are_asked_for_again(fleet: Fleet) -> None:
    ids, after = prompt(30), await fleet.last_seq()
    for engine in fleet.engines.values():
        engine.fault("unsent", batches=2)
    at = (await fleet.ask(ids))["decode_worker"]
    engine = fleet.engines[at]
    engine.fault("unsent", batches=0)
    await asyncio.sleep(0.3)
    assert await fleet.stored(after, at) == 0
    # The next batch shows the gap.
    engine.fault("events", events=[{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}])
    async with asyncio.timeout(20):
        while await fleet.stored(after, at) < 2:
            await asyncio.sleep(0.05)
    again = await fleet.ask(ids)
    assert (again["decode_worker"], again["usage"]["cached_tokens"]) == (at, 512)
    fleet.engines[OTHER[at]].fault("unsent", batches=0)


async def test_batches_that_nobody_has_any_more_leave_nothing_certain(fleet: Fleet) -> None:
    first = await fleet.ask(prompt(31))
    at = first["decode_worker"]
    await asyncio.sleep(0.1)
    engine = fleet.engines[at]
    engine.fault("unsent", batches=1)
    engine.fault("events", events=[{"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}])
    engine.fault("forget")
    engine.fault("events", events=[{"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}])
    await fleet.known(0, at)
    # The engine still has it all, and the next block that it stores behind it shows that.
    asked = (await fleet.ask([*prompt(31), *prompt(32, 300)]))["decode_worker"]
    assert asked in OTHER


async def test_a_cleared_cache_is_known(fleet: Fleet) -> None:
    first = await fleet.ask(prompt(33))
    at = first["decode_worker"]
    fleet.engines[at].fault("clear")
    await fleet.known(0, at)
    assert (await fleet.ask(prompt(33)))["usage"]["cached_tokens"] == 0


async def test_an_engine_that_lies_costs_placements_alone(fleet: Fleet) -> None:
    at = (await fleet.ask(prompt(34)))["decode_worker"]
    await asyncio.sleep(1.2)  # the store's heartbeat
    before = await fleet.blocks(at)
    engine = fleet.engines[at]
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
    await asyncio.sleep(1.2)
    assert await fleet.blocks(at) == before


async def test_an_engine_that_is_killed_in_mid_answer_costs_no_token(fleet: Fleet) -> None:
    ids = prompt(40)
    asking = asyncio.ensure_future(fleet.ask(ids, 300))
    async with asyncio.timeout(20):
        while not (there := [name for name, each in fleet.engines.items() if _drawing(each)]):
            await asyncio.sleep(0.02)
    at = there[0]
    fleet.engines[at].kill()
    said = await asyncio.wait_for(asking, 30)
    assert said["token_ids"] == answer(ids, 300)
    assert said["decode_worker"] == OTHER[at]
    # What its client had came as part of the prompt.
    assert fleet.engines[OTHER[at]].asked()[-1]["prompt"] > 700
    started = time.monotonic()
    assert (await fleet.ask(prompt(41)))["decode_worker"] == OTHER[at]
    assert time.monotonic() - started < 5
    # Back with an empty cache, it joins by itself.
    fleet.engines[at].start()
    async with asyncio.timeout(30):
        while await fleet.blocks(at) < 0:
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_while_all_engines_are_away_requests_wait(fleet: Fleet) -> None:
    ids = prompt(45)
    asking = asyncio.ensure_future(fleet.ask(ids, 200))
    async with asyncio.timeout(20):
        while not any(_drawing(each) for each in fleet.engines.values()):
            await asyncio.sleep(0.02)
    for each in fleet.engines.values():
        each.kill()
    new = asyncio.ensure_future(fleet.ask(prompt(46)))
    await asyncio.sleep(1.0)
    fleet.engines["vllm-1"].start()
    said, other = await asyncio.wait_for(asyncio.gather(asking, new), 40)
    assert said["token_ids"] == answer(ids, 200)
    assert other["token_ids"] == answer(prompt(46), 4)
    fleet.engines["vllm-0"].start()
    async with asyncio.timeout(30):
        while await fleet.blocks("vllm-0") < 0:
            await asyncio.sleep(0.1)


def explained(log: Path, request_id: str) -> str:
    words = ["replay", str(log), "--explain", request_id]
    return subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.main", *words], capture_output=True, text=True, check=True
    ).stdout


async def test_the_log_replays_and_names_both_candidates(fleet: Fleet, tmp_path: Path) -> None:
    """Last of the module: the log has all of the above."""
    said = await fleet.ask(prompt(50))
    replayed(fleet.cluster, tmp_path)
    text = explained(tmp_path / "run.jsonl.zst", said["id"])
    assert "vllm-0" in text, text
    assert "vllm-1" in text, text
