"""Streams of a live cluster are deleted, emptied, or take nothing: requests wait or are refused, and then all is well
again without a hand's help.

The server is the test's own, where it may do what nobody of a cluster may.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from nats.aio.msg import Msg

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.bus.streams import LOG_GAP, StreamLimits
from halfmoon.schemas import subjects
from halfmoon.schemas.events import DecodeStarted
from tests.cluster.harness import Cluster, running
from tests.cluster.steering import last_seq, told
from tests.eventually import BOUND_S, eventually

pytestmark = pytest.mark.slow

FLAGS = ("--prefill", "1", "--decode", "1", "--conductors", "2", "--engine", "null")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("streams")
    server = EmbeddedServer.start(place / "nats")
    try:
        with running(place, *FLAGS, "--nats", server.url) as one:
            yield one
    finally:
        server.stop()


@pytest.fixture
async def bus(cluster: Cluster) -> AsyncIterator[Bus]:
    made = await Bus.connect(BusConfig(url=cluster.nats), name="test", limits=StreamLimits(replicas=0))
    yield made
    await made.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=BOUND_S)) as session:
        yield session


async def ask(http: aiohttp.ClientSession, cluster: Cluster, tokens: int = 5) -> tuple[int, dict[str, Any]]:
    body = {"prompt": "Once", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with http.post(f"{cluster.http}/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


def clear(status: int, answer: dict[str, Any]) -> bool:
    """The text, or an error that says why."""
    return status == 200 or (status in (429, 503) and bool(answer["error"]["code"]))


async def served_through(http: aiohttp.ClientSession, cluster: Cluster, harm: Any) -> None:
    """Requests before, while and after `harm()`: each ends with its text or a clear error, and at last ten in a row are
    served.
    """
    after = await last_seq(cluster)
    before = [asyncio.ensure_future(ask(http, cluster, 20_000)) for _ in range(3)]
    await told(cluster, after, DecodeStarted, len(before))
    await harm()
    during = [asyncio.ensure_future(ask(http, cluster)) for _ in range(10)]
    in_a_row = 0

    async def whole() -> bool:
        nonlocal in_a_row
        status, answer = await ask(http, cluster)
        assert clear(status, answer), answer
        in_a_row = in_a_row + 1 if status == 200 else 0
        return in_a_row == 10

    await eventually(whole, "ten requests in a row are served", every_s=0.05)
    for status, answer in await asyncio.gather(*before, *during):
        assert clear(status, answer), answer


@pytest.mark.parametrize(
    "streams",
    [
        (subjects.EVENTS_STREAM,),
        (subjects.DECISIONS_STREAM,),
        subjects.STREAMS,
    ],
    ids=["events", "decisions", "all"],
)
async def test_a_stream_is_deleted(
    cluster: Cluster, bus: Bus, http: aiohttp.ClientSession, streams: tuple[str, ...]
) -> None:
    before = await bus.last_seq()

    async def harm() -> None:
        for stream in streams:
            await bus.jetstream.ask(f"STREAM.DELETE.{stream}")

    await served_through(http, cluster, harm)
    for stream in subjects.STREAMS:
        await bus.jetstream.info(stream)
    if subjects.EVENTS_STREAM in streams:
        # A decision's identity begins with its cause: none of the new log may look like one of the old.
        assert await bus.last_seq() > before + LOG_GAP


async def test_the_log_cannot_be_emptied_through_nats(cluster: Cluster, bus: Bus) -> None:
    for stream in (subjects.EVENTS_STREAM, subjects.DECISIONS_STREAM, subjects.KV_STREAM):
        config = (await bus.jetstream.ask(f"STREAM.INFO.{stream}"))["config"]
        assert (config["deny_delete"], config["deny_purge"]) == (True, True)


async def test_a_log_that_was_emptied_goes_on(
    cluster: Cluster, bus: Bus, http: aiohttp.ClientSession
) -> None:
    """By an operator's own limits: all but the newest message of each goes."""

    async def harm() -> None:
        for stream in (subjects.EVENTS_STREAM, subjects.DECISIONS_STREAM):
            config = (await bus.jetstream.ask(f"STREAM.INFO.{stream}"))["config"]
            for most in (1, -1):
                await bus.jetstream.ask(f"STREAM.UPDATE.{stream}", {**config, "max_msgs": most})

    await served_through(http, cluster, harm)


async def test_a_log_that_takes_nothing_is_told_and_new_requests_are_refused(
    cluster: Cluster, bus: Bus, http: aiohttp.ClientSession
) -> None:
    """As a server with a full disk does it: every message is accepted, none is stored, and nothing is answered."""

    async def deaf(_: Msg) -> None:
        return

    listening = await bus.nc.subscribe(subjects.EVENTS_ALL, cb=deaf)
    config = (await bus.jetstream.ask(f"STREAM.INFO.{subjects.EVENTS_STREAM}"))["config"]
    await bus.jetstream.ask(
        f"STREAM.UPDATE.{subjects.EVENTS_STREAM}", {**config, "subjects": ["halfmoon.nowhere"]}
    )
    waiting = [asyncio.ensure_future(ask(http, cluster)) for _ in range(5)]

    async def not_ready() -> tuple[str, str] | None:
        async with http.get(f"{cluster.http}/ready") as answer:
            told = await answer.json()
        return (told["error"]["code"], answer.headers["retry-after"]) if answer.status == 503 else None

    assert await eventually(not_ready, "the frontend is not ready", every_s=0.2) == ("log_not_stored", "1")
    status, refused = await ask(http, cluster)
    assert (status, refused["error"]["code"]) == (503, "log_not_stored")
    assert "the event log has stored nothing for" in refused["error"]["message"]
    assert not any(task.done() for task in waiting)
    await bus.jetstream.ask(f"STREAM.UPDATE.{subjects.EVENTS_STREAM}", config)
    await listening.unsubscribe()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 5
    assert (await ask(http, cluster))[0] == 200
