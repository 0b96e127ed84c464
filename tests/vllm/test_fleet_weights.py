"""Two real vLLMs behind the conductor whose weights change in place, twice, with requests under way. What is said from
then on is what a vLLM with those weights says, and no block of the weights before is hit, also where caches are kept.

HALFMOON_VLLM names vLLM's program, and HALFMOON_VLLM_MODEL a model's directory (`make_model.py`): this skips
without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from halfmoon.schemas.events import RequestArrived, RequestFinished
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.adapters.fleet import OTHER, AdaptedFleet
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.prompts import MODEL as NAME
from tests.eventually import eventually
from tests.vllm.engines import MODEL, START_S, RealEngine, counted, no_model, real_engine, told
from tests.vllm.test_fleet import HITS, OURS, THEIRS

pytestmark = [no_model, pytest.mark.slow, pytest.mark.timeout(3_600)]
#: Tokens of streams that are under way at a pause, at least so many when it is ordered; and of all other answers.
LONG, BEGUN, SHORT = 160, 16, 24
_drawn = random.Random(3)
#: Of tokens in no order: what follows rests on each token's KV, more than where a text repeats itself.
CACHED, WAITING = (
    [[_drawn.randrange(100, 40_000) for _ in range(tokens)] for tokens in lengths]
    for lengths in ([300, 540, 580], [530, 560])
)
#: What follows these goes apart for long by the two weights.
STREAMED = [
    Tokenizer.load(NAME).encode(text)
    for text in (
        "The history of the printing press begins in",
        "In the year 1873 a ship left the harbour of Lisbon, and",
        "List all countries of Europe with their capitals:",
    )
]


class Answers(NamedTuple):
    """To these prompts."""

    cached: list[list[int]]
    waiting: list[list[int]]
    streamed: list[list[int]]


def alone(engine: RealEngine) -> Answers:
    """What it says by itself."""
    asked = ((CACHED, SHORT), (WAITING, SHORT), (STREAMED, LONG))
    with ThreadPoolExecutor() as pool:
        return Answers(
            *(
                list(pool.map(told, itertools.repeat(engine.url), prompts, itertools.repeat(tokens)))
                for prompts, tokens in asked
            )
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of the model with other weights: a tenth of noise in each matrix of its layers."""
    directory = tmp_path_factory.mktemp("trained")
    for file in Path(MODEL).iterdir():
        (directory / file.name).symlink_to(file)
    weights = directory / "model.safetensors"
    state = load_file(weights)
    noise = torch.Generator().manual_seed(5)
    for name in sorted(state):
        if name.startswith("model.layers.") and state[name].dim() == 2:
            state[name] += 0.1 * state[name].std() * torch.randn(state[name].shape, generator=noise)
    weights.unlink()
    save_file(state, weights, metadata={"format": "pt"})
    yield directory
    weights.unlink()


@pytest.fixture(scope="module")
def after(trained: Path) -> Answers:
    """Of a vLLM that was started with the other weights."""
    with real_engine(trained / "vllm.log", 0, model=str(trained)) as engine:
        return alone(engine)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealEngine]]:
    place = tmp_path_factory.mktemp("engines")
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(real_engine(place / f"{name}.log", core, VLLM_SERVER_DEV_MODE="1"))
            for core, name in enumerate(OTHER)
        }


@pytest.fixture(scope="module")
def before(engines: dict[str, RealEngine]) -> Answers:
    """Of one that was started with the model's own weights. What it caches of them has no salt."""
    return alone(engines["vllm-0"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engines: dict[str, RealEngine]) -> Iterator[Cluster]:
    flags = [word for engine in engines.values() for word in ("--adapt-vllm", engine.url)]
    patient = (*PATIENT, "--worker-wait-s", "600")
    with running(tmp_path_factory.mktemp("weights"), *flags, "--dtype", "float32", *patient) as one:
        yield one


@pytest.fixture
async def loop(cluster: Cluster, engines: dict[str, RealEngine]) -> AsyncIterator[WeightsLoop]:
    nc = await cluster.connect()
    yield WeightsLoop(AdaptedFleet(cluster, OTHER, nc), engines)
    await nc.close()


class WeightsLoop:
    """What a trainer does with a fleet, and what its engines count."""

    def __init__(self, fleet: AdaptedFleet, engines: dict[str, RealEngine]) -> None:
        self.fleet, self.engines = fleet, engines

    def hits(self) -> dict[str, float]:
        """Tokens, by vLLM's own count."""
        return {name: counted(engine.url, HITS) for name, engine in self.engines.items()}

    async def said(self, prompts: list[list[int]]) -> list[list[int]]:
        asking = (self.fleet.ask(ids, SHORT, bound_s=START_S) for ids in prompts)
        return [one["token_ids"] for one in await asyncio.gather(*asking)]

    async def stream(self, ids: list[int], came: list[int]) -> None:
        """`came`: what the client has of it so far."""
        body = {
            "model": NAME, "prompt": ids, "max_tokens": LONG, "temperature": 0, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=START_S)) as session,
            session.post(f"{self.fleet.cluster.http}/v1/completions", json=body) as answer,
        ):
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    came += json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]

    async def change(
        self, directory: str, version: str, *pause: str, reset: bool
    ) -> tuple[Answers, list[int]]:
        """With streams under way, and requests that come in the pause. Second: how much of each stream came before."""
        streams: list[list[int]] = [[] for _ in STREAMED]
        streaming = asyncio.gather(*map(self.stream, STREAMED, streams))
        await eventually(lambda: min(map(len, streams)) >= BEGUN, "all streams are under way")
        pausing = asyncio.ensure_future(self.fleet.operated("pause", *pause))
        await self.fleet.paused()
        waiting = asyncio.ensure_future(self.said(WAITING))
        print(f"\n{version}: {await pausing}", end="")
        if reset:
            dropped = await self.fleet.operated("reset-prefix-cache")
            assert [line.partition(":")[0] for line in dropped.splitlines()] == list(OTHER)
            print(dropped, end="")
        hits, came = self.hits(), [len(tokens) for tokens in streams]
        for engine in self.engines.values():
            load_weights(engine, directory)
        print(await self.fleet.operated("resume", "--weight-version", version), end="")
        await streaming
        print(f"{came} tokens of {[len(tokens) for tokens in streams]} came before")
        waited = await waiting
        assert self.hits() == hits, "a block of other weights is hit"
        return Answers(await self.cold_and_found(), waited, streams), came

    async def cold_and_found(self) -> list[list[int]]:
        """What is said to prompts that are computed whole, and then found."""
        hits = self.hits()
        cold = [
            await self.fleet.cold(ids, SHORT, blocks=(len(ids) - 1) // OURS, bound_s=START_S)
            for ids in CACHED
        ]
        assert self.hits() == hits
        found = [await self.found(ids, said) for ids, said in zip(CACHED, cold, strict=True)]
        print(f"of {[len(ids) for ids in CACHED]} tokens none are hit, the second time {found}")
        return [one["token_ids"] for one in cold]

    async def found(self, ids: list[int], cold: dict[str, Any]) -> int:
        """Tokens that are hit where the prompt was computed: all whole blocks of the engine's own."""
        computed_at = {cold["decode_worker"]}
        while True:
            hits = self.hits()
            warm = await self.fleet.ask(ids, SHORT, bound_s=START_S)
            assert warm["token_ids"] == cold["token_ids"]
            if (at := warm["decode_worker"]) in computed_at:
                whole = (len(ids) - 1) // THEIRS * THEIRS
                assert self.hits() == hits | {at: hits[at] + whole}
                return whole
            computed_at.add(at)  # it was taken for so much faster


def load_weights(engine: RealEngine, directory: str) -> None:
    """A trainer's own step, in place."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{engine.url}/collective_rpc", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=START_S).close()


async def test_after_a_change_all_is_of_the_new_weights_and_no_old_block_is_hit(
    trained: Path, after: Answers, before: Answers, loop: WeightsLoop, tmp_path: Path
) -> None:
    old, new = ({tuple(one) for part in of for one in part} for of in (before, after))
    assert not old & new, "an answer that is the same by both weights shows nothing"
    assert await loop.cold_and_found() == before.cached
    assert await loop.said(WAITING) == before.waiting
    # Caches are kept; what runs ends first.
    said, _ = await loop.change(str(trained), "step-1", reset=False)
    assert said == Answers(after.cached, after.waiting, before.streamed)
    # As docs/vllm.md does it, back to the weights that both engines were started with.
    said, came = await loop.change(MODEL, "step-2", "--abort", reset=True)
    assert said[:2] == before[:2]
    went_on = 0
    for ids, tokens, stream, whole in zip(STREAMED, came, said.streamed, after.streamed, strict=True):
        assert stream[:tokens] == whole[:tokens]
        if stream != whole:
            at = loop.engines["vllm-0"].url
            assert stream[tokens:] == told(at, [*ids, *stream[:tokens]], LONG - tokens)
            went_on += 1
    assert went_on, "each stream had ended, or both weights go on alike"
    events = [one.event for one in await loop.fleet.cluster.events()]
    arrived, finished = (
        sorted(one.request_id for one in events if isinstance(one, kind))
        for kind in (RequestArrived, RequestFinished)
    )
    assert arrived == finished
    print(replayed(loop.fleet.cluster, tmp_path))
