"""A client that goes away, at any stage, leaves no lease, no reserved slot and no running work."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.events import (
    DecodeStarted,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    WorkerHeartbeat,
)
from tests.cluster.harness import Cluster
from tests.cluster.prompts import prompt

#: Not a measure of speed: a lease that only its own end would take lives a minute.
RELEASED_S = 20.0


@pytest.fixture
def cluster(small: Cluster) -> Cluster:
    return small


class OverHttp:
    """A streaming request on a socket of its own; `leave` closes it without a word."""

    async def ask(self, cluster: Cluster, nc: nats.NATS, fields: dict[str, Any]) -> None:
        parts = urlsplit(cluster.http)
        self.reader, self.writer = await asyncio.open_connection(parts.hostname, parts.port)
        body = json.dumps({**fields, "model": "smollm2-135m-instruct", "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self.writer.drain()

    async def leave(self, cluster: Cluster, nc: nats.NATS, request_id: str) -> None:
        self.writer.transport.abort()


class OverNats:
    """A streaming request over NATS; `leave` cancels it by its id."""

    async def ask(self, cluster: Cluster, nc: nats.NATS, fields: dict[str, Any]) -> None:
        self.inbox = nc.new_inbox()
        self.subscription = await nc.subscribe(self.inbox)
        body = json.dumps({**fields, "stream": True}).encode()
        await nc.publish(f"{subjects.API}.generate", body, reply=self.inbox)

    async def leave(self, cluster: Cluster, nc: nats.NATS, request_id: str) -> None:
        await nc.request(f"{subjects.API}.cancel", json.dumps({"id": request_id}).encode(), timeout=5)


class SilentOnNats(OverNats):
    """The same, but `leave` only stops listening."""

    async def leave(self, cluster: Cluster, nc: nats.NATS, request_id: str) -> None:
        await self.subscription.unsubscribe()
        await nc.flush()


async def holds_nothing(cluster: Cluster) -> bool:
    return all(
        (s.holds, s.slots_reserved, s.slots_leased, s.slots_condemned, s.pushes_open) == (0, 0, 0, 0, 0)
        for s in (await cluster.stores()).values()
    )


async def until(true: Callable[[], Awaitable[bool]], seconds: float, what: str) -> float:
    started = time.monotonic()
    while not await true():
        assert time.monotonic() - started < seconds, what
        await asyncio.sleep(0.05)
    return time.monotonic() - started


#: Two stages in the default suite, each by another way.
DEFAULT = [(SilentOnNats, "prefill"), (OverHttp, "decode")]


@pytest.mark.parametrize(
    ("way", "stage"),
    [
        pytest.param(way, stage, marks=() if (way, stage) in DEFAULT else pytest.mark.slow)
        for stage in ("queued", "prefill", "decode")
        for way in (OverHttp, OverNats, SilentOnNats)
    ],
)
async def test_who_goes_away_leaves_nothing(
    cluster: Cluster, nc: nats.NATS, way: type[Any], stage: str
) -> None:
    before = (await cluster.events())[-1].seq
    salt = f"{way.__name__} {stage}"
    fields = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
    first = None
    if stage == "queued":  # behind a prompt that computes for a second
        first = asyncio.ensure_future(
            cluster.generate(nc, prompt=prompt(400), max_tokens=1, cache_salt=salt + "first")
        )
        await asyncio.sleep(0.2)
    client = way()
    await client.ask(cluster, nc, {**fields, "prompt": prompt(40 if stage == "decode" else 2000)})

    async def placed() -> bool:
        mine.extend(
            s.event.request_id
            for s in await cluster.events(before)
            if isinstance(s.event, RequestArrived) and s.event.max_tokens == 200
        )
        return bool(mine)

    mine: list[str] = []
    await until(placed, 30, "no RequestArrived")
    request_id = mine[0]

    async def ordered() -> bool:
        orders = [o.decision for o in await cluster.decisions()]
        return any(isinstance(o, StartPrefill | StartDecode) and o.request_id == request_id for o in orders)

    await until(ordered, 30, "no order")

    async def decoding() -> bool:
        """And its prefill has ended: the two halves tell it apart from each other."""
        seen = [s.event for s in await cluster.events(before)]
        mine = [e for e in seen if getattr(e, "request_id", "") == request_id]
        return {DecodeStarted, PrefillFinished} <= {type(e) for e in mine}

    if stage == "decode":
        await until(decoding, 30, "no DecodeStarted")
    else:
        await asyncio.sleep({"queued": 0.1, "prefill": 0.8}[stage])
    left_at_seq = (await cluster.events())[-1].seq
    await client.leave(cluster, nc, request_id)
    if first is not None:
        await first

    async def cancelled() -> bool:
        found = [s.event for s in await cluster.events(left_at_seq) if isinstance(s.event, RequestCancelled)]
        return request_id in [event.request_id for event in found]

    noticed = await until(cancelled, 30, "no RequestCancelled")
    released = await until(lambda: holds_nothing(cluster), RELEASED_S, "something is still held")
    print(f"{salt}: noticed after {noticed:.2f} s, released {released:.2f} s later")
    after = (await cluster.events())[-1].seq

    async def both_workers_are_idle() -> bool:
        events = [stamped.event for stamped in await cluster.events(after)]
        beats = {e.worker_id: e for e in events if isinstance(e, WorkerHeartbeat)}
        return set(beats) == {"prefill-0", "decode-0"} and all(
            (e.queued, e.running, e.kv_blocks_used) == (0, 0, 0) for e in beats.values()
        )

    await until(both_workers_are_idle, RELEASED_S, "a worker goes on")
    finished = [e for e in (s.event for s in await cluster.events(before)) if isinstance(e, PrefillFinished)]
    assert (request_id in [e.request_id for e in finished]) == (stage == "decode")
