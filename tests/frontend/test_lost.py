"""Lost tokens and lost workers, over the real NATS: repaired, and the client notices nothing but a pause."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from frontend_double import ANSWER

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import AnnounceYourself, FailRequest
from halfmoon.schemas.events import FrontendJoined, RequestArrived
from halfmoon.schemas.tokens import ResendReply
from halfmoon.workers.frontend.frontend import Frontend
from tests.eventually import eventually

LONG = 33
BODY = {"prompt": "Once", "max_tokens": 200}
SECOND_NS = 10**9


def joined(messages: list[Any]) -> str:
    return "".join(message["text"] for message in messages[:-1])


@pytest.mark.pure
def test_a_gap_is_repaired_at_once(run: Any) -> None:
    """Not only after a silence: that would be one of hours."""
    frontends: list[Frontend] = []

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        ids, reason = double.output(arrived)
        order_id = f"{seq}-0"
        double.resend = lambda request: ResendReply(
            known=True, delivery=double.delivery(arrived, order_id, request.index, ids[request.index : 20])
        )
        await double.place(arrived, order_id)
        await double.deliver(double.delivery(arrived, order_id, 0, ids[:4]))
        await double.deliver(double.delivery(arrived, order_id, 10, ids[10:12]))
        (request,) = frontends[0].registry.requests.values()
        await eventually(lambda: len(request.output_ids) == 20, "the gap is repaired")
        await double.deliver(double.delivery(arrived, order_id, 20, ids[20:], reason))

    async def scenario(cluster: Any) -> None:
        frontends.append(cluster.frontend)
        cluster.double.script = script
        messages = await cluster.stream("generate", BODY)
        assert joined(messages) == messages[-1]["text"] == ANSWER
        assert [request.index for request in cluster.double.resend_requests] == [4]

    run(scenario, resend_after_ns=3600 * SECOND_NS, silence_s=3 * 3600)


def test_a_lost_end_is_asked_for_after_a_silence(run: Any) -> None:
    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        ids, reason = double.output(arrived)
        order_id = f"{seq}-0"
        double.resend = lambda request: ResendReply(
            known=True,
            delivery=double.delivery(arrived, order_id, request.index, ids[request.index :], reason),
        )
        await double.place(arrived, order_id)
        await double.deliver(double.delivery(arrived, order_id, 0, ids[:4]))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        _, _, answer = await cluster.post("/v1/completions", BODY)
        assert answer["choices"][0]["text"] == ANSWER
        assert {request.index for request in cluster.double.resend_requests} == {4}

    run(scenario, resend_after_ns=SECOND_NS // 2)


def test_a_worker_that_forgot_the_order_has_the_request_told_anew(run: Any) -> None:
    """The worker believes that we got everything, so no conductor would place the request again by itself."""

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        ids, reason = double.output(arrived)
        order_id = f"{seq}-0"
        reply = await double.place(arrived, order_id)
        have = len(reply.output_ids) // 4
        if have:
            await double.deliver(double.delivery(arrived, order_id, have, ids[have:], reason))
        else:
            await double.deliver(double.delivery(arrived, order_id, 0, ids[:4]))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        _, _, answer = await cluster.post("/v1/completions", BODY)
        assert answer["choices"][0]["text"] == ANSWER
        first, second = await cluster.double.wait_for(RequestArrived, 2)
        assert second == msgspec.structs.replace(first, answer_lost=True)

    run(scenario, resend_after_ns=SECOND_NS // 5)


def test_a_request_that_nobody_speaks_of_is_asked_about(run: Any) -> None:
    """Its refusal may have been lost. One that has an order is not asked about, however long it takes."""

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        if arrived.prompt_tokens == LONG:
            await double.place(arrived, f"{seq}-0")

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        placed = asyncio.create_task(cluster.post("/v1/completions", {**BODY, "prompt": [7] * LONG}))
        await cluster.double.wait_for(RequestArrived)
        (request,) = cluster.frontend.registry.requests.values()
        await eventually(lambda: request.order_id, "the frontend has heard of its order")
        asked = asyncio.create_task(cluster.post("/v1/completions", BODY))
        _, arrived = await cluster.double.wait_for(RequestArrived, 2)
        forgotten = arrived.request_id

        def silent() -> list[list[str]]:
            events = cluster.double.events
            return [e.silent for e in events[events.index(arrived) :] if getattr(e, "silent", ())]

        await eventually(silent, "a heartbeat names a request")
        assert silent()[0] == [forgotten]
        fail = FailRequest(request_id=forgotten, frontend_id=cluster.double.frontend_id, message="lost")
        await cluster.double.order(fail, 99)
        status, _, answer = await asked
        assert (status, answer["error"]["message"]) == (500, "lost")
        placed.cancel()

    run(scenario, silent_after_ns=SECOND_NS // 5, heartbeat_ns=SECOND_NS // 10)


@pytest.mark.pure
def test_a_second_decode_worker_goes_on_where_the_first_died(run: Any) -> None:
    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        ids, reason = double.output(arrived)
        await double.place(arrived, f"{seq}-0", "d1")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, ids[:9]))
        await double.heard(arrived, 9)
        reply = await double.place(arrived, f"{seq + 9}-1", "d2")
        have = len(reply.output_ids) // 4
        assert have == 9
        late = double.delivery(arrived, f"{seq}-0", 9, ids[9:15])  # the dead one's last words
        await double.deliver(late, worker_id="d1")
        again = double.delivery(arrived, f"{seq + 9}-1", have - 3, ids[have - 3 : 12])
        await double.deliver(again, worker_id="d2")
        await double.deliver(double.delivery(arrived, f"{seq + 9}-1", 12, ids[12:], reason), worker_id="d2")

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        messages = await cluster.stream("generate", BODY)
        assert joined(messages) == messages[-1]["text"] == ANSWER
        assert messages[-1]["token_ids"] == cluster.double.answer_ids
        assert [
            token for message in messages[:-1] for token in message["token_ids"]
        ] == cluster.double.answer_ids
        assert messages[-1]["decode_worker"] == "d2"
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        events = await cluster.sse("/v1/chat/completions", chat)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == ANSWER
        assert cluster.frontend.registry.metrics.resumed == 2

    run(scenario)


@pytest.mark.pure
def test_who_is_asked_to_announce_itself_tells_of_every_open_request(run: Any) -> None:
    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        arrivals = [event for event in double.events if isinstance(event, RequestArrived)]
        if len(arrivals) > 1:
            await double.place(arrived, f"{seq}-0")
            ids, reason = double.output(arrived)
            await double.deliver(double.delivery(arrived, f"{seq}-0", 0, ids, reason))
        else:
            await double.order(AnnounceYourself(role="frontend", target_id=double.frontend_id), seq)

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        _, _, answer = await cluster.post("/v1/completions", BODY)
        assert answer["choices"][0]["text"] == ANSWER
        again, once_more = await cluster.double.wait_for(FrontendJoined, 2)
        assert again == once_more
        first, second = await cluster.double.wait_for(RequestArrived, 2)
        assert first == second

    run(scenario)


@pytest.mark.pure
def test_take_of_an_unknown_request_says_gone(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        arrived = RequestArrived(
            request_id="nobody",
            frontend_id=cluster.double.frontend_id,
            prompt_tokens=1,
            max_tokens=1,
            block_keys=b"",
        )
        assert (await cluster.double.take(arrived, "1-0", "decode", "d1")).gone
        # What is no message at all, or about nobody, is dropped.
        await cluster.client.nc.publish(subjects.tokens(cluster.double.frontend_id, "d1"), b"{]")
        await cluster.double.deliver(cluster.double.delivery(arrived, "1-0", 0, [5]))
        status, _, _ = await cluster.post("/v1/completions", BODY)
        assert status == 200

    run(scenario)
