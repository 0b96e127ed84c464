"""A client that goes away, at any stage, leaves no lease, no reserved slot and no running work."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import CancelOrder, StartDecode, StartPrefill
from halfmoon.schemas.events import (
    DecodeFailed,
    DecodeStarted,
    PrefillFailed,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    WorkerHeartbeat,
)
from halfmoon.workers.hold_points import DECODE_STEP, PROMPT_LAYER
from tests.cluster.harness import Cluster
from tests.cluster.holding import Holds
from tests.cluster.prompts import prompt
from tests.eventually import BOUND_S, eventually

#: It is known who computes, and who waits for whom.
pytestmark = pytest.mark.usefixtures("one_prefill_worker")
#: A worker draws its next token when it is told to, from this one on.
TOKENS_BEFORE = 4


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
        await nc.request(f"{subjects.API}.cancel", json.dumps({"id": request_id}).encode(), timeout=BOUND_S)


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


#: Each way and each stage once in the default suite.
DEFAULT = [(OverHttp, "queued"), (SilentOnNats, "prefill"), (OverNats, "decode")]


@pytest.mark.parametrize(
    ("way", "stage"),
    [
        pytest.param(way, stage, marks=() if (way, stage) in DEFAULT else pytest.mark.slow)
        for stage in ("queued", "prefill", "decode")
        for way in (OverHttp, OverNats, SilentOnNats)
    ],
)
async def test_who_goes_away_leaves_nothing(
    cluster: Cluster, nc: nats.NATS, holds: Holds, way: type[Any], stage: str
) -> None:
    before = (await cluster.events())[-1].seq
    salt = f"{way.__name__} {stage}"
    fields = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
    holds.arm(DECODE_STEP, TOKENS_BEFORE) if stage == "decode" else holds.arm(PROMPT_LAYER)
    first = None
    if stage == "queued":  # behind a prompt that computes until it is told to go on
        first = asyncio.ensure_future(
            cluster.generate(nc, prompt=prompt(400), max_tokens=1, cache_salt=salt + "first")
        )
        await holds.held(PROMPT_LAYER)
    client = way()
    await client.ask(cluster, nc, {**fields, "prompt": prompt(40 if stage == "decode" else 2000)})

    async def placed() -> list[str]:
        return [
            s.event.request_id
            for s in await cluster.events(before)
            if isinstance(s.event, RequestArrived) and s.event.max_tokens == 200
        ]

    (request_id,) = await eventually(placed, "RequestArrived")

    async def ordered() -> bool:
        orders = [o.decision for o in await cluster.decisions()]
        return any(isinstance(o, StartPrefill | StartDecode) and o.request_id == request_id for o in orders)

    await eventually(ordered, "an order")

    async def queued() -> bool:
        events = [stamped.event for stamped in await cluster.events(before)]
        beats = [e for e in events if isinstance(e, WorkerHeartbeat) and e.worker_id == "prefill-0"]
        return bool(beats) and (beats[-1].queued, beats[-1].running) == (1, 1)

    async def decoding() -> bool:
        """And its prefill has ended: the two halves tell it apart from each other."""
        seen = [s.event for s in await cluster.events(before)]
        mine = [e for e in seen if getattr(e, "request_id", "") == request_id]
        return {DecodeStarted, PrefillFinished} <= {type(e) for e in mine}

    match stage:
        case "queued":
            await eventually(queued, "it waits behind the other")
        case "prefill":
            await holds.held(PROMPT_LAYER)
        case "decode":
            await holds.held(DECODE_STEP)
            await eventually(decoding, "DecodeStarted")
    left_at_seq = (await cluster.events())[-1].seq
    await client.leave(cluster, nc, request_id)

    async def cancelled() -> bool:
        found = [s.event for s in await cluster.events(left_at_seq) if isinstance(s.event, RequestCancelled)]
        return request_id in [event.request_id for event in found]

    async def told_to_stop() -> bool:
        orders = [o.decision for o in await cluster.decisions()]
        return any(isinstance(o, CancelOrder) and o.request_id == request_id for o in orders)

    await eventually(cancelled, "RequestCancelled")
    await eventually(told_to_stop, "CancelOrder")
    holds.go_on()
    if first is not None:
        await first
    await eventually(lambda: holds_nothing(cluster), "nothing is held")
    after = (await cluster.events())[-1].seq

    async def all_workers_are_idle() -> bool:
        events = [stamped.event for stamped in await cluster.events(after)]
        beats = {e.worker_id: e for e in events if isinstance(e, WorkerHeartbeat)}
        return set(beats) == {"prefill-0", "prefill-1", "decode-0"} and all(
            (e.queued, e.running, e.kv_blocks_used) == (0, 0, 0) for e in beats.values()
        )

    await eventually(all_workers_are_idle, "all workers are idle")
    finished = [e for e in (s.event for s in await cluster.events(before)) if isinstance(e, PrefillFinished)]
    assert (request_id in [e.request_id for e in finished]) == (stage == "decode")
    # A worker that stops because it was told to has no more to say of the request.
    ends = PrefillFailed | DecodeFailed | RequestFinished
    events = [s.event for s in await cluster.events(before)]
    assert [e for e in events if isinstance(e, ends) and e.request_id == request_id] == []
