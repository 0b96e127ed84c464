"""`kill -9` of real processes under a real request: the same text after a pause, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from typing import Any, TypeVar

import aiohttp
import nats
import orjson
import pytest

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.kv import KvReady
from halfmoon.workers.hold_points import DECODE_STEP, JOINING, PROMPT_LAYER
from tests.cluster.harness import Cluster, all_ready
from tests.cluster.holding import Holds
from tests.cluster.prompts import prompt
from tests.cluster.steering import last_seq, nobody_is_started_again
from tests.eventually import BOUND_S, eventually

Order = TypeVar("Order", StartPrefill, StartDecode)

#: Two workers of each role that compute; tests/cluster/test_conductors.py kills where nothing is computed.
pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(pairs: Cluster) -> Cluster:
    """Each test leaves it whole."""
    return pairs


async def nothing_held(cluster: Cluster) -> None:
    """No lease, no reservation, no push anywhere, and none of them was left to its lease's own end."""

    async def none() -> bool:
        return all(
            (s.holds, s.slots_reserved, s.slots_leased, s.slots_condemned, s.pushes_open) == (0, 0, 0, 0, 0)
            for s in (await cluster.stores()).values()
        )

    await eventually(none, "nothing is held", every_s=0.1)
    assert [s.counters.get("holds_expired", 0) for s in (await cluster.stores()).values()] == [0] * 4


def fields(length: int, tokens: int, salt: str) -> dict[str, Any]:
    return {
        "prompt": prompt(length),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logits_digest": True,
        "cache_salt": salt,
    }


async def order_of(cluster: Cluster, kind: type[Order], order_id: str) -> Order:
    """The half of an order that somebody obeys; orders are heard before they are stored."""

    async def stored() -> list[Order]:
        decided = [one.decision for one in await cluster.decisions()]
        return [one for one in decided if isinstance(one, kind) and one.order_id == order_id]

    (order,) = await eventually(stored, f"{kind.__name__} {order_id} is stored", every_s=0.1)
    return order


async def placements(cluster: Cluster, order: Order) -> list[Order]:
    """All orders like this one of its request."""
    decided = [one.decision for one in await cluster.decisions()]
    return [one for one in decided if isinstance(one, type(order)) and one.request_id == order.request_id]


async def in_mid_prompt(cluster: Cluster, holds: Holds) -> StartPrefill:
    """Some layers of the prompt are at the decode worker's node; its worker goes no further. PROMPT_LAYER is armed."""
    order = await order_of(cluster, StartPrefill, await holds.held(PROMPT_LAYER))

    async def pushed() -> bool:
        heard = [message for _, message in await cluster.kv()]
        return any(isinstance(one, KvReady) and one.order_id == order.order_id for one in heard)

    await eventually(pushed, "some layers are at the decode node", every_s=0.1)
    return order


async def answering(cluster: Cluster, holds: Holds) -> StartPrefill:
    """It computes the prompt of an answer of one token, and goes no further; nobody else hears of it."""
    order = await order_of(cluster, StartPrefill, await holds.held(PROMPT_LAYER))
    assert order.answers
    decided = [one.decision for one in await cluster.decisions()]
    assert not [one for one in decided if isinstance(one, StartDecode) and one.request_id == order.request_id]
    assert not [message for _, message in await cluster.kv() if message.order_id == order.order_id]
    return order


async def in_mid_answer(cluster: Cluster, holds: Holds) -> StartDecode:
    """Its worker does not begin the next step. DECODE_STEP is armed."""
    return await order_of(cluster, StartDecode, await holds.held(DECODE_STEP))


async def arrived(cluster: Cluster, after: int, count: int) -> dict[str, int]:
    """Place in the log by request, of `count` requests that arrived after a place, once they have."""

    async def found() -> dict[str, int]:
        stamped = await cluster.events(after)
        places = {s.event.request_id: s.seq for s in stamped if isinstance(s.event, RequestArrived)}
        return places if len(places) >= count else {}

    return await eventually(found, f"{count} requests have arrived", every_s=0.1)


def said(cluster: Cluster) -> str:
    return (cluster.directory.parents[1] / f"{cluster.name}.out").read_text()


def same(answer: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert answer["token_ids"] == undisturbed["token_ids"]
    assert answer["finish_reason"] == undisturbed["finish_reason"] == "length"
    assert answer["text"] == undisturbed["text"]


@pytest.mark.parametrize("tokens", [4, 1])
async def test_a_prefill_worker_dies_while_it_computes(
    cluster: Cluster, nc: nats.NATS, holds: Holds, tokens: int
) -> None:
    undisturbed = await cluster.generate(nc, **fields(600, tokens, f"calm, {tokens}"))
    await all_ready(cluster)
    holds.arm(PROMPT_LAYER, 3)
    asked = asyncio.ensure_future(cluster.generate(nc, **fields(600, tokens, f"prefill dies, {tokens}")))
    order = await (in_mid_prompt(cluster, holds) if tokens > 1 else answering(cluster, holds))
    cluster.kill(order.worker_id)
    answer = await asked
    same(answer, undisturbed)
    assert answer["logits_digests"] == undisturbed["logits_digests"]
    first, second = await placements(cluster, order)
    assert first == order
    assert second.worker_id != order.worker_id
    await all_ready(cluster)
    await nothing_held(cluster)


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_requests_wait_while_every_worker_of_a_role_is_restarted(
    cluster: Cluster, nc: nats.NATS, holds: Holds, half: str
) -> None:
    """As a rolling restart where there is one worker of a role: nothing is refused, nothing lost."""
    undisturbed = await cluster.generate(nc, **fields(40, 4, "calm"))
    await all_ready(cluster)
    patient = {**fields(40, 4, f"{half} restarts"), "slo": {"ttft_ms": 120_000}}
    asked = []
    before = await last_seq(cluster)
    workers = [f"{half}-{place}" for place in range(2)]
    for worker_id in workers:
        holds.arm(f"{JOINING}-{worker_id}")
    for number in range(6):
        asked.append(asyncio.ensure_future(cluster.generate(nc, **patient)))
        await arrived(cluster, before, number + 1)
        if number == 2:
            for worker_id in workers:
                cluster.kill(worker_id, signal.SIGTERM)
    for worker_id in workers:
        await holds.held(f"{JOINING}-{worker_id}")
    none_there = await last_seq(cluster)
    asked += [asyncio.ensure_future(cluster.generate(nc, **patient)) for _ in range(6)]
    late = await arrived(cluster, none_there, 6)
    holds.go_on()
    for answer in await asyncio.gather(*asked):
        same(answer, undisturbed)
    first = {
        o.decision.request_id: o.cause_seq
        for o in await cluster.decisions()
        if isinstance(o.decision, StartDecode) and o.decision.placement == 1
    }
    # Those that came while there was no worker were placed when one had joined.
    assert len(late) == 6
    assert [request_id for request_id, seq in late.items() if first[request_id] <= seq] == []
    await all_ready(cluster)
    await nothing_held(cluster)


async def test_a_decode_worker_dies_in_the_middle_of_an_answer(
    cluster: Cluster, nc: nats.NATS, holds: Holds
) -> None:
    tokens = 16
    undisturbed = await cluster.generate(nc, **fields(300, tokens, "calm"))
    await all_ready(cluster)
    inbox = nc.new_inbox()
    chunks: list[dict[str, Any]] = []
    done = asyncio.Event()

    async def receive(message: Any) -> None:
        chunks.append(orjson.loads(message.data))
        if chunks[-1].get("done") or "error" in chunks[-1]:
            done.set()

    await nc.subscribe(inbox, cb=receive)
    body = orjson.dumps({**fields(300, tokens, "decode dies"), "stream": True})
    holds.arm(DECODE_STEP, 6)
    await nc.publish(f"{subjects.API}.generate", body, reply=inbox)
    order = await in_mid_answer(cluster, holds)
    await eventually(lambda: len(chunks) >= 4, "the client has some of it")
    assert not done.is_set()
    cluster.kill(order.worker_id)
    await eventually(done.is_set, "the answer is whole")
    assert "error" not in chunks[-1], chunks[-1]
    same(chunks[-1], undisturbed)
    streamed = "".join(chunk.get("text", "") for chunk in chunks[:-1])
    assert streamed == undisturbed["text"]  # nothing twice, nothing missing
    orders = await placements(cluster, order)
    assert [o.placement for o in orders] == [1, 2]
    assert orders[1].worker_id != order.worker_id
    await all_ready(cluster)
    await nothing_held(cluster)


async def test_a_decode_worker_dies_in_the_middle_of_an_object(
    cluster: Cluster, nc: nats.NATS, holds: Holds
) -> None:
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
        inbox = nc.new_inbox()
        heard = await nc.subscribe(inbox)
        body = {**asked, "seed": 11, "cache_salt": salt, "logits_digest": True}
        await nc.publish(f"{subjects.API}.generate", orjson.dumps(body), reply=inbox)
        chunks = 0
        while True:
            message = orjson.loads((await heard.next_msg(timeout=BOUND_S)).data)
            assert "error" not in message, message
            if message.get("done"):
                return dict(message)
            chunks += bool(message["text"])
            if kill_after and chunks == kill_after:
                cluster.kill((await in_mid_answer(cluster, holds)).worker_id)
                chunks += 1

    undisturbed = await answer("calm", 0)
    rows = orjson.loads(undisturbed["text"])
    assert [sorted(each) for each in rows] == [["id", "name"]] * 3
    # Eight chunks have no more tokens than this.
    assert undisturbed["usage"]["completion_tokens"] > 30
    await all_ready(cluster)
    holds.arm(DECODE_STEP, 24)
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
        line = f"store-{node} died (status 0); it is started again"
        await eventually(lambda line=line: line in said(cluster), line, every_s=0.1)
    assert moved[1] >= 2
    await all_ready(cluster)
    again = await cluster.generate(nc, **fields(600, 4, "drained"))
    same(again, undisturbed)
    assert again["usage"]["cached_tokens"] == 512
    await nothing_held(cluster)


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_store_agent_dies_under_a_request(
    cluster: Cluster, nc: nats.NATS, holds: Holds, half: str
) -> None:
    undisturbed = await cluster.generate(nc, **fields(1000, 8, "calm"))
    await all_ready(cluster)
    holds.arm(PROMPT_LAYER, 3)
    asked = asyncio.ensure_future(cluster.generate(nc, **fields(1000, 8, f"store of {half} dies")))
    order = await in_mid_prompt(cluster, holds)
    node = order.worker_id if half == "prefill" else order.decode_node_id
    indexed = (await cluster.status())["index_blocks"]
    cluster.kill(f"store-{node}")
    holds.go_on()
    answer = await asked
    same(answer, undisturbed)
    await all_ready(cluster)
    assert 0 < (await cluster.status())["index_blocks"] <= indexed + 8
    again = await cluster.generate(nc, **fields(1000, 8, "calm"))
    same(again, undisturbed)
    await nothing_held(cluster)


async def test_a_conductor_dies_and_the_next_one_goes_on(
    cluster: Cluster, nc: nats.NATS, holds: Holds
) -> None:
    undisturbed = await cluster.generate(nc, **fields(600, 16, "calm"))
    await all_ready(cluster)
    before = await last_seq(cluster)
    holds.arm(PROMPT_LAYER, 3)
    asked = asyncio.ensure_future(cluster.generate(nc, **fields(600, 16, "conductor dies")))
    await in_mid_prompt(cluster, holds)
    with nobody_is_started_again(cluster):
        cluster.kill("conductor-0")
        late = asyncio.ensure_future(cluster.generate(nc, **fields(600, 16, "asked while there is none")))
        await arrived(cluster, before, 2)
    holds.go_on()
    same(await asked, undisturbed)
    same(await late, undisturbed)
    await all_ready(cluster)
    await nothing_held(cluster)


async def test_a_stopped_worker_is_lost_and_its_late_words_change_nothing(
    cluster: Cluster, nc: nats.NATS, holds: Holds
) -> None:
    undisturbed = await cluster.generate(nc, **fields(300, 16, "calm"))
    await all_ready(cluster)
    holds.arm(DECODE_STEP, 6)
    asked = asyncio.ensure_future(cluster.generate(nc, **fields(300, 16, "decode stops")))
    order = await in_mid_answer(cluster, holds)
    pid = cluster.kill(order.worker_id, signal.SIGSTOP)
    holds.go_on()
    try:
        answer = await asked
    finally:
        cluster.kill(order.worker_id, signal.SIGCONT)
    assert pid == cluster.pid(order.worker_id)
    same(answer, undisturbed)
    assert [o.placement for o in await placements(cluster, order)] == [1, 2]
    await all_ready(cluster)
    await nothing_held(cluster)


async def test_nats_server_dies_under_a_prefill_and_the_request_does_not_wait_for_its_lease(
    cluster: Cluster, nc: nats.NATS, holds: Holds
) -> None:
    """A message that was lost on the way to the decode worker is missed by its heartbeats."""
    undisturbed = await cluster.generate(nc, **fields(600, 4, "calm"))
    await all_ready(cluster)
    holds.arm(PROMPT_LAYER, 3)
    body = {**fields(600, 4, "server dies"), "stream": False}
    del body["logits_digest"]
    async with aiohttp.ClientSession() as session:
        asked = asyncio.ensure_future(session.post(f"{cluster.http}/v1/completions", json=body))
        await in_mid_prompt(cluster, holds)
        cluster.kill_server()
        holds.go_on()
        reply = await asked
        answer = await reply.json()
    assert reply.status == 200, answer
    assert answer["choices"][0]["text"] == undisturbed["text"]
    await all_ready(cluster)
    await nothing_held(cluster)
