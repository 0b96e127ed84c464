"""Requests through a real Envoy that asks halfmoon which engine they are for. The engines compute nothing.

HALFMOON_ENVOY names Envoy's program: this skips without it (`make test-gateway`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from halfmoon.schemas.events import (
    PrefillFailed,
    PrefillFinished,
    RequestCancelled,
    RequestFinished,
)
from tests.adapters.fake_fleet import FakeFleet, answer, prompt
from tests.adapters.fleet import OTHER, explained
from tests.adapters.harness import FakeEngine, fake_engines
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.eventually import eventually
from tests.gateway.envoy import envoy, no_envoy
from tests.ports import HeldPorts

pytestmark = [no_envoy, pytest.mark.slow]


@pytest.fixture(scope="module")
def engines() -> Iterator[list[FakeEngine]]:
    with fake_engines(2) as found:
        yield found


@pytest.fixture(scope="module")
def picker() -> Iterator[int]:
    with HeldPorts() as port:
        yield port


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, engines: list[FakeEngine], picker: int
) -> Iterator[Cluster]:
    flags = [word for engine in engines for word in ("--adapt-vllm", engine.url)]
    place = tmp_path_factory.mktemp("gateway")
    with running(place, *flags, "--dtype", "float32", "--ext-proc-port", f"{picker}", *PATIENT) as one:
        yield one


@pytest.fixture
async def fleet(cluster: Cluster, engines: list[FakeEngine]) -> AsyncIterator[FakeFleet]:
    nc = await cluster.connect()
    yield FakeFleet(cluster, engines, nc)
    await nc.close()


@pytest.fixture
def gateway(tmp_path: Path, cluster: Cluster, picker: int) -> Iterator[str]:
    with envoy(tmp_path, picker) as url:
        yield url


async def post(url: str, path: str = "/v1/completions", **fields: Any) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as http, http.post(url + path, json=fields) as response:
        return response.status, await response.read()


@contextlib.asynccontextmanager
async def begun(url: str, ids: list[int]) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream of which the first bytes are here. Its client leaves at the end."""
    body = {"prompt": ids, "max_tokens": 9, "stream": True, "temperature": 0}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as response:
        await response.content.readany()
        yield response


def tokens_of(said: bytes) -> list[int]:
    """Of a stream, or of a whole answer."""
    lines = [line.removeprefix(b"data: ") for line in said.split(b"\n\n") if line]
    return [
        token
        for line in lines
        if line != b"[DONE]"
        for choice in orjson.loads(line)["choices"]
        for token in choice["token_ids"]
    ]


async def test_answers_are_of_the_engine_that_has_the_blocks_and_the_log_has_them(
    gateway: str, fleet: FakeFleet
) -> None:
    after = await fleet.last_seq()
    ids = prompt(1)
    # For the client's own eyes the stream is what the engine sent.
    status, said = await post(gateway, prompt=ids, max_tokens=5, stream=True, temperature=0)
    assert status == 200
    assert said.endswith(b"data: [DONE]\n\n")
    assert tokens_of(said) == answer(ids, 5)
    status, said = await post(gateway, prompt=ids, max_tokens=5, temperature=0)
    assert (status, tokens_of(said)) == (200, answer(ids, 5))
    status, said = await post(
        gateway, "/v1/chat/completions", messages=[{"role": "user", "content": "Half moons"}], max_tokens=3
    )
    assert (status, len(tokens_of(said))) == (200, 3)

    async def told() -> list[RequestFinished]:
        return [one for at in OTHER for one in await fleet.told(after, RequestFinished, at)]

    async def enough() -> bool:
        return len(await told()) == 3

    await eventually(enough, "the log has three answers", every_s=0.05)
    assert sorted(one.completion_tokens for one in await told()) == [3, 5, 5]
    # Of an answer that is no stream the first token comes with the last.
    prefills = [one for at in OTHER for one in await fleet.told(after, PrefillFinished, at)]
    assert sorted(one.decodes for one in prefills) == [False, False, True]
    # A prompt that begins as one before goes where that one's blocks are.
    chosen = {}
    for number in (2, 3):
        after = await fleet.last_seq()
        await post(gateway, prompt=prompt(number), max_tokens=2, stream=True, temperature=0)
        at = await fleet.drawing(after)
        chosen[number] = at
        await fleet.stored(after, at, 10)
    for number, at in chosen.items():
        before = len(fleet.engines[at].asked())
        await post(gateway, prompt=[*prompt(number), 7, 8], max_tokens=2, temperature=0)
        asked = fleet.engines[at].asked()
        assert len(asked) == before + 1
        assert asked[-1]["cached"] >= 10 * 256
        # By the cluster's salt: a tenant's blocks are its own in the engine too.
        assert asked[-1]["salt"]


async def test_refusals_of_ours_and_of_the_engine_reach_the_client(
    gateway: str, fleet: FakeFleet, tmp_path: Path, picker: int
) -> None:
    with envoy(tmp_path, picker, duplex=False) as otherwise:
        status, said = await post(otherwise, prompt=prompt(1), max_tokens=2)
    assert status == 500
    assert "FULL_DUPLEX_STREAMED" in orjson.loads(said)["error"]["message"]
    status, said = await post(gateway, prompt=prompt(1), max_tokens=-1)
    assert status == 400
    assert orjson.loads(said)["error"]["param"] == "max_tokens"
    after = await fleet.last_seq()
    with fleet.refusing(429):
        status, said = await post(gateway, prompt=prompt(6), max_tokens=2, stream=True)
    assert (status, orjson.loads(said)["error"]["message"]) == (429, "later")

    async def failed() -> list[PrefillFailed]:
        return [one for at in OTHER for one in await fleet.told(after, PrefillFailed, at)]

    await eventually(failed, "the log has it", every_s=0.05)
    # It was sent once, by the gateway.
    (one,) = await failed()
    assert (one.reason, one.retryable) == ("the engine answers 429: later", False)


async def test_a_client_that_leaves_ends_its_request_everywhere(gateway: str, fleet: FakeFleet) -> None:
    after = await fleet.last_seq()
    fleet.fault("hold", after=2)
    try:
        async with begun(gateway, prompt(7)):
            at = await fleet.drawing(after)

        async def cancelled() -> bool:
            events = [one.event for one in await fleet.cluster.events(after)]
            return any(isinstance(one, RequestCancelled) for one in events)

        await eventually(cancelled, "the log has it", every_s=0.05)
        await eventually(
            lambda: fleet.engines[at].asked()[-1]["end"] == "aborted", "the engine dropped it", every_s=0.05
        )
    finally:
        fleet.fault("let go")


async def test_an_engine_that_dies_costs_its_answers_and_no_others(
    gateway: str, fleet: FakeFleet, tmp_path: Path
) -> None:
    after = await fleet.last_seq()
    fleet.fault("hold", after=2)
    try:
        async with begun(gateway, prompt(8)) as response:
            at = await fleet.drawing(after)
            fleet.engines[at].kill()
            # Its client sees the stream end: the gateway cannot go on with it elsewhere.
            with contextlib.suppress(aiohttp.ClientError):
                await response.read()
        fleet.engines[OTHER[at]].fault("let go")
        await fleet.gone(after, at)
        status, said = await post(gateway, prompt=prompt(8), max_tokens=3, temperature=0)
        assert (status, tokens_of(said)) == (200, answer(prompt(8), 3))
        assert fleet.engines[OTHER[at]].asked()[-1]["drawn"] == 3
    finally:
        fleet.engines[at].start()
        await fleet.joined(after, at)
        fleet.fault("let go")

    async def finished() -> list[RequestFinished]:
        return await fleet.told(after, RequestFinished, OTHER[at])

    await eventually(finished, "the log has its end", every_s=0.05)
    replayed(fleet.cluster, tmp_path)
    why = explained(tmp_path / "run.jsonl.zst", (await finished())[-1].request_id)
    assert f"placed on {OTHER[at]}" in why, why
