"""`kill -9` of real processes under a real request: the same text after a pause, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from typing import Any

import aiohttp
import nats
import orjson
import pytest

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.events import DecodeStarted, RequestArrived
from halfmoon.schemas.kv import KvReady
from tests.cluster.harness import Cluster, all_ready
from tests.cluster.prompts import prompt

#: Two workers of each role that compute; tests/cluster/test_conductors.py kills where nothing is computed.
pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(pairs: Cluster) -> Cluster:
    """Each test leaves it whole."""
    return pairs


async def nothing_held(cluster: Cluster) -> None:
    """No lease, no reservation, no push anywhere."""
    held: dict[str, Any] = {}
    for _ in range(200):  # 20 s: a lease that only its own end would take lives a minute
        held = {
            node: (s.holds, s.slots_reserved, s.slots_leased, s.slots_condemned, s.pushes_open)
            for node, s in (await cluster.stores()).items()
        }
        if all(some == (0, 0, 0, 0, 0) for some in held.values()):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(held)


def fields(length: int, tokens: int, salt: str) -> dict[str, Any]:
    return {
        "prompt": prompt(length),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logits_digest": True,
        "cache_salt": salt,
    }


async def order_of(cluster: Cluster, kind: type, arrived_after: int) -> Any:
    """The first order of `kind` for a request that arrived after this place in the log."""
    async with asyncio.timeout(20):
        while True:
            arrived = {
                s.event.request_id
                for s in await cluster.events(arrived_after)
                if isinstance(s.event, RequestArrived)
            }
            for ordered in await cluster.decisions():
                if isinstance(ordered.decision, kind) and ordered.decision.request_id in arrived:
                    return ordered.decision
            await asyncio.sleep(0.02)


async def some_kv_pushed(cluster: Cluster, order: StartPrefill) -> None:
    """Some layers of the prompt are at the decode worker's node, others are not computed yet."""
    async with asyncio.timeout(60):
        while not [
            m for _, m in await cluster.kv() if isinstance(m, KvReady) and m.order_id == order.order_id
        ]:
            await asyncio.sleep(0.02)


async def decode_started(cluster: Cluster, arrived_after: int) -> None:
    async with asyncio.timeout(60):
        while not any(isinstance(s.event, DecodeStarted) for s in await cluster.events(arrived_after)):
            await asyncio.sleep(0.02)


def said(cluster: Cluster) -> str:
    return (cluster.directory.parents[1] / f"{cluster.name}.out").read_text()


async def last_seq(cluster: Cluster) -> int:
    events = await cluster.events()
    return events[-1].seq


def same(answer: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert answer["token_ids"] == undisturbed["token_ids"]
    assert answer["finish_reason"] == undisturbed["finish_reason"] == "length"
    assert answer["text"] == undisturbed["text"]


async def test_a_prefill_worker_dies_while_it_computes(cluster: Cluster, nc: nats.NATS) -> None:
    undisturbed = await cluster.generate(nc, **fields(600, 4, "calm"))
    await all_ready(cluster)
    before = await last_seq(cluster)
    asked = asyncio.ensure_future(cluster.generate(nc, **fields(600, 4, "prefill dies")))
    order = await order_of(cluster, StartPrefill, before)
    await some_kv_pushed(cluster, order)
    cluster.kill(order.worker_id)
    answer = await asked
    same(answer, undisturbed)
    assert answer["logits_digests"] == undisturbed["logits_digests"]
    placements = [
        o.decision
        for o in await cluster.decisions()
        if isinstance(o.decision, StartPrefill) and o.decision.request_id == order.request_id
    ]
    assert len(placements) == 2
    assert placements[1].worker_id != order.worker_id
    await all_ready(cluster)
    await nothing_held(cluster)


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_requests_wait_while_every_worker_of_a_role_is_restarted(
    cluster: Cluster, nc: nats.NATS, half: str
) -> None:
    """As a rolling restart where there is one worker of a role: nothing is refused, nothing lost."""
    undisturbed = await cluster.generate(nc, **fields(40, 4, "calm"))
    await all_ready(cluster)
    before = await last_seq(cluster)
    asked = []
    for number in range(12):
        patient = {**fields(40, 4, f"{half} restarts"), "slo": {"ttft_ms": 120_000}}
        asked.append(asyncio.ensure_future(cluster.generate(nc, **patient)))
        await asyncio.sleep(0.2)
        if number == 2:
            for place in range(2):
                cluster.kill(f"{half}-{place}", signal.SIGTERM)
    for answer in await asyncio.gather(*asked):
        same(answer, undisturbed)
    arrived = {
        s.event.request_id: s.seq for s in await cluster.events(before) if isinstance(s.event, RequestArrived)
    }
    first = [
        o
        for o in await cluster.decisions()
        if isinstance(o.decision, StartDecode) and o.decision.placement == 1
    ]
    # Some came while there was no worker, and were placed when one joined.
    assert [o for o in first if o.cause_seq > arrived.get(o.decision.request_id, o.cause_seq)]
    await all_ready(cluster)
    await nothing_held(cluster)


async def test_a_decode_worker_dies_in_the_middle_of_an_answer(cluster: Cluster, nc: nats.NATS) -> None:
    tokens = 16
    undisturbed = await cluster.generate(nc, **fields(300, tokens, "calm"))
    await all_ready(cluster)
    before = await last_seq(cluster)
    inbox = nc.new_inbox()
    chunks: list[dict[str, Any]] = []
    done = asyncio.Event()

    async def receive(message: Any) -> None:
        chunks.append(orjson.loads(message.data))
        if chunks[-1].get("done") or "error" in chunks[-1]:
            done.set()

    await nc.subscribe(inbox, cb=receive)
    body = orjson.dumps({**fields(300, tokens, "decode dies"), "stream": True})
    await nc.publish(f"{subjects.API}.generate", body, reply=inbox)
    order = await order_of(cluster, StartDecode, before)
    async with asyncio.timeout(30):
        while len(chunks) < 4:
            await asyncio.sleep(0.01)
    cluster.kill(order.worker_id)
    async with asyncio.timeout(60):
        await done.wait()
    assert "error" not in chunks[-1], chunks[-1]
    same(chunks[-1], undisturbed)
    streamed = "".join(chunk.get("text", "") for chunk in chunks[:-1])
    assert streamed == undisturbed["text"]  # nothing twice, nothing missing
    orders = [
        o.decision
        for o in await cluster.decisions()
        if isinstance(o.decision, StartDecode) and o.decision.request_id == order.request_id
    ]
    assert [o.placement for o in orders] == [1, 2]
    assert orders[1].worker_id != order.worker_id
    await all_ready(cluster)
    await nothing_held(cluster)


async def test_a_decode_worker_dies_in_the_middle_of_an_object(cluster: Cluster, nc: nats.NATS) -> None:
    """What a schema allows next is a function of the tokens: the other worker goes on in the same object."""
    row = {
        "type": "object",
        "properties": {"id": {"type": "integer", "maximum": 99}, "name": {"type": "string", "maxLength": 12}},
        "required": ["id", "name"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": row, "minItems": 3, "maxItems": 3}
    written = {"json": schema, "disable_any_whitespace": True}
    asked = {"prompt": prompt(300), "structured_outputs": written, "max_tokens": 200, "stream": True}

    async def answer(salt: str, kill_after: int) -> dict[str, Any]:
        before, inbox = await last_seq(cluster), nc.new_inbox()
        heard = await nc.subscribe(inbox)
        body = {**asked, "seed": 11, "cache_salt": salt, "logits_digest": True}
        await nc.publish(f"{subjects.API}.generate", orjson.dumps(body), reply=inbox)
        chunks = 0
        while True:
            message = orjson.loads((await heard.next_msg(timeout=90)).data)
            assert "error" not in message, message
            if message.get("done"):
                return dict(message)
            chunks += bool(message["text"])
            if chunks == kill_after:
                cluster.kill((await order_of(cluster, StartDecode, before)).worker_id)
                chunks += 1

    undisturbed = await answer("calm", 0)
    rows = orjson.loads(undisturbed["text"])
    assert [sorted(each) for each in rows] == [["id", "name"]] * 3
    await all_ready(cluster)
    resumed = await answer("dies in an object", 8)
    assert resumed["text"] == undisturbed["text"]
    assert resumed["logits_digests"] == undisturbed["logits_digests"]
    orders = [o.decision for o in await cluster.decisions() if isinstance(o.decision, StartDecode)]
    assert orders[-1].placement == 2
    await all_ready(cluster)
    await nothing_held(cluster)


async def test_a_drained_store_hands_over_what_no_other_node_holds(cluster: Cluster, nc: nats.NATS) -> None:
    """First that of the decode node: the prompt's blocks are at the prefill node too, and then there alone."""
    undisturbed = await cluster.generate(nc, **fields(600, 4, "drained"))
    nodes = [undisturbed["decode_worker"], undisturbed["prefill_worker"]]
    moved = []
    for node in nodes:
        await all_ready(cluster)
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "halfmoon.cli.main", "drain", node, "--cluster", cluster.name, "--json"],
            env=cluster.environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        drained = json.loads(done.stdout)
        assert drained["left"] == 0
        moved.append(drained["moved"])
        async with asyncio.timeout(60):
            while f"store-{node} died (status 0); it is started again" not in said(cluster):
                await asyncio.sleep(0.1)
    assert moved[1] >= 2
    await all_ready(cluster)
    again = await cluster.generate(nc, **fields(600, 4, "drained"))
    same(again, undisturbed)
    assert again["usage"]["cached_tokens"] == 512
    await nothing_held(cluster)


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_store_agent_dies_under_a_request(cluster: Cluster, nc: nats.NATS, half: str) -> None:
    undisturbed = await cluster.generate(nc, **fields(1000, 8, "calm"))
    await all_ready(cluster)
    before = await last_seq(cluster)
    asked = asyncio.ensure_future(cluster.generate(nc, **fields(1000, 8, f"store of {half} dies")))
    order = await order_of(cluster, StartPrefill, before)
    await asyncio.sleep(0.5)
    node = order.worker_id if half == "prefill" else order.decode_node_id
    indexed = (await cluster.status())["index_blocks"]
    cluster.kill(f"store-{node}")
    answer = await asked
    same(answer, undisturbed)
    await all_ready(cluster)
    assert 0 < (await cluster.status())["index_blocks"] <= indexed + 8
    again = await cluster.generate(nc, **fields(1000, 8, "calm"))
    same(again, undisturbed)
    await nothing_held(cluster)


async def test_a_conductor_dies_and_the_next_one_goes_on(cluster: Cluster, nc: nats.NATS) -> None:
    undisturbed = await cluster.generate(nc, **fields(600, 16, "calm"))
    asked = asyncio.ensure_future(cluster.generate(nc, **fields(600, 16, "conductor dies")))
    await asyncio.sleep(0.3)
    cluster.kill("conductor-0")
    late = asyncio.ensure_future(cluster.generate(nc, **fields(600, 16, "asked while there is none")))
    same(await asked, undisturbed)
    same(await late, undisturbed)
    await all_ready(cluster)
    await nothing_held(cluster)


async def test_a_stopped_worker_is_lost_and_its_late_words_change_nothing(
    cluster: Cluster, nc: nats.NATS
) -> None:
    undisturbed = await cluster.generate(nc, **fields(300, 16, "calm"))
    await all_ready(cluster)
    before = await last_seq(cluster)
    asked = asyncio.ensure_future(cluster.generate(nc, **fields(300, 16, "decode stops")))
    order = await order_of(cluster, StartDecode, before)
    await decode_started(cluster, before)
    pid = cluster.kill(order.worker_id, signal.SIGSTOP)
    answer = await asked
    cluster.kill(order.worker_id, signal.SIGCONT)
    assert pid == cluster.pid(order.worker_id)
    same(answer, undisturbed)
    await all_ready(cluster)
    await nothing_held(cluster)


async def test_nats_server_dies_under_a_prefill_and_the_request_does_not_wait_for_its_lease(
    cluster: Cluster, nc: nats.NATS
) -> None:
    """A message that was lost on the way to the decode worker is missed by its heartbeats, within a few seconds."""
    undisturbed = await cluster.generate(nc, **fields(600, 4, "calm"))
    await all_ready(cluster)
    before = await last_seq(cluster)
    body = {**fields(600, 4, "server dies"), "stream": False}
    del body["logits_digest"]
    async with aiohttp.ClientSession() as session:
        started = time.monotonic()
        asked = asyncio.ensure_future(session.post(f"{cluster.http}/v1/completions", json=body))
        await some_kv_pushed(cluster, await order_of(cluster, StartPrefill, before))
        cluster.kill_server()
        reply = await asked
        answer = await reply.json()
    assert reply.status == 200, answer
    assert answer["choices"][0]["text"] == undisturbed["text"]
    assert time.monotonic() - started < 60  # alone about 5 s; a lease lives as long
    await all_ready(cluster)
    await nothing_held(cluster)
