"""Every way that a request can end: refused, failed, cancelled, left, overtaken by a shutdown. Never silence."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import orjson
import pytest
from frontend_double import LAYOUT, MODEL

from halfmoon.bus.connection import Bus
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.decisions import EngineRefusal, FailRequest, Prediction
from halfmoon.schemas.events import FrontendJoined, FrontendLeft, RequestArrived, RequestCancelled
from halfmoon.schemas.tokens import ResendReply
from halfmoon.workers.frontend import cluster_status
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.frontend import Frontend
from halfmoon.workers.frontend.redelivery import Redelivery
from tests.eventually import BOUND_S, eventually

BODY = {"prompt": "Once", "max_tokens": 200}
MS = 1_000_000
PATIENT_NS = int(BOUND_S) * 1_000 * MS


async def never(double: Any, seq: int, arrived: RequestArrived) -> None:
    """Nobody places the request."""


async def five_tokens(double: Any, seq: int, arrived: RequestArrived) -> None:
    """And then nothing more."""
    await double.place(arrived, f"{seq}-0")
    await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:5]))


async def cancelled(cluster: Any) -> RequestCancelled:
    (event,) = await cluster.double.wait_for(RequestCancelled)
    (arrived,) = await cluster.double.wait_for(RequestArrived)
    assert event.request_id == arrived.request_id
    assert (await cluster.double.take(arrived, "999999-0", "prefill", "p1")).gone
    return event


REASONS = [("ttft_slo", 429), ("no_room", 429), ("no_worker", 503), ("decode_refused", 503)]


@pytest.mark.pure
def test_what_no_worker_could_hold_is_refused_by_the_name_of_the_field(run: Any) -> None:
    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        await double.reject(arrived, seq, reason="too_long", message="9 fit no worker")

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        chat = {"messages": [{"role": "user", "content": "Once"}]}
        for path, body, field in (
            ("/v1/completions", BODY, "prompt"),
            ("/v1/chat/completions", chat, "messages"),
        ):
            got, _, answer = await cluster.post(path, body)
            error = answer["error"]
            assert (got, error["code"], error["param"]) == (400, "too_long", field)
            assert (error["type"], error["message"]) == ("invalid_request_error", f"{field}: 9 fit no worker")

    run(scenario)


@pytest.mark.pure
def test_the_length_that_is_promised_is_what_the_cluster_can_hold_now(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded by the model's context; without workers, the last word counts."""
    monkeypatch.setattr(cluster_status, "CACHED_S", -1.0)  # asked for each time

    async def promised(cluster: Any) -> set[int]:
        _, _, body = await cluster.http_get("/v1/models")
        _, models = await cluster.ask("models", {})
        _, tokenized = await cluster.ask("tokenize", {"prompt": "Once"})
        return {
            orjson.loads(body)["data"][0]["max_model_len"],
            models["data"][0]["max_model_len"],
            tokenized["max_model_len"],
        }

    async def scenario(cluster: Any) -> None:
        for held, length in ((0, 2048), (300, 300), (40, 40), (0, 40), (1 << 20, 2048)):
            cluster.double.request_tokens_max = held
            assert await promised(cluster) == {length}
        _, status = await cluster.ask("status", {})
        assert status["request_tokens_max"] == 1 << 20
        cluster.double.request_tokens_max = 40
        await promised(cluster)
        await cluster.ask("generate", {"prompt": [5] * 30})
        (arrived,) = await cluster.double.wait_for(RequestArrived)
        assert arrived.max_tokens == 10  # not said: as many as fit

    run(scenario)


@pytest.mark.pure
@pytest.mark.parametrize(("reason", "status"), REASONS)
def test_a_rejection_says_why_and_when_to_try_again(run: Any, reason: Any, status: int) -> None:
    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        await double.reject(
            arrived,
            seq,
            reason=reason,
            message="predicted 900 ms",
            predicted=Prediction(ttft_ns=900 * MS),
            ttft_slo_ns=arrived.ttft_slo_ns,
            retry_after_ns=1_200 * MS,
        )

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        for stream in (False, True):
            body = {**BODY, "stream": stream, "slo": {"ttft_ms": 250}}
            got, headers, answer = await cluster.post("/v1/completions", body)
            assert (got, answer["error"]["code"], answer["error"]["message"]) == (
                status,
                reason,
                "predicted 900 ms",
            )
            assert answer["error"]["predicted_ms"]["ttft"] == 900
            assert answer["error"]["slo_ms"]["ttft"] == 250
            assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1200")
        headers, answer = await cluster.ask("generate", BODY)
        assert headers["Nats-Service-Error-Code"] == str(status)
        assert headers["retry-after-ms"] == "1200"
        assert answer["error"]["code"] == reason

    run(scenario)


@pytest.mark.pure
def test_a_full_frontend_refuses_before_it_looks(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = never
        pending = [asyncio.ensure_future(cluster.post("/v1/completions", BODY)) for _ in range(2)]
        await cluster.double.wait_for(RequestArrived, 2)
        status, headers, answer = await cluster.post("/v1/completions", b"not even JSON")
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")
        headers, answer = await cluster.ask("generate", b"not even JSON")
        assert (headers["Nats-Service-Error-Code"], answer["error"]["code"]) == ("429", "queue_full")
        for task in pending:
            task.cancel()
        await cluster.double.wait_for(RequestCancelled, 2)
        cluster.double.script = five_tokens
        status, _, _ = await cluster.post("/v1/completions", b"not even JSON")
        assert status == 400

    run(scenario, open_requests_max=2)


@pytest.mark.pure
def test_a_failure_before_the_first_token_is_a_status_and_after_it_an_event(run: Any) -> None:
    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        if arrived.max_tokens > 100:
            await five_tokens(double, seq, arrived)
            await double.heard(arrived, 5)
        failure = FailRequest(
            request_id=arrived.request_id, frontend_id=double.frontend_id, message="placed too often"
        )
        await double.order(failure, seq)

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        status, _, answer = await cluster.post("/v1/completions", {**BODY, "max_tokens": 5, "stream": True})
        assert (status, answer["error"]["message"]) == (500, "placed too often")
        events = await cluster.sse("/v1/completions", {**BODY, "stream": True})
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Half moons: "
        assert events[-1]["error"]["message"] == "placed too often"
        messages = await cluster.stream("generate", BODY)
        assert messages[-1]["error"]["message"] == "placed too often"
        status, _, _ = await cluster.post("/v1/completions", BODY)
        assert status == 500

    run(scenario)


@pytest.mark.pure
@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_refusal_is_told_as_its_status_with_the_field_and_the_time(run: Any, stream: bool) -> None:
    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        failure = FailRequest(
            request_id=arrived.request_id,
            frontend_id=double.frontend_id,
            message="no",
            refusal=EngineRefusal(status=429, param="prompt", retry_after_ns=1_500_000_000),
        )
        await double.order(failure, seq)

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
        for path, body, param in (
            ("/v1/completions", {**BODY, "stream": stream}, "prompt"),
            ("/v1/chat/completions", chat, "messages"),
        ):
            status, headers, answer = await cluster.post(path, body)
            error = answer["error"]
            assert (status, headers["retry-after"], headers["retry-after-ms"]) == (429, "2", "1500")
            assert (error["message"], error["param"], error["code"], error["type"]) == (
                "no",
                param,
                "engine_refused",
                "rate_limit_error",
            )

    run(scenario)


@pytest.mark.pure
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [never, five_tokens])
def test_an_http_client_that_leaves_cancels(run: Any, stream: bool, script: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        host, _, port = cluster.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps({**BODY, "stream": stream})
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        (arrived,) = await cluster.double.wait_for(RequestArrived)
        if script is five_tokens:
            await cluster.double.heard(arrived, 5)
        writer.close()
        await cancelled(cluster)

    run(scenario)


def test_a_stopped_stream_of_aiohttp_cancels(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = five_tokens
        async with aiohttp.ClientSession() as session:
            response = await session.post(cluster.url + "/v1/completions", json={**BODY, "stream": True})
            assert b"Half" in await response.content.readany()
            response.close()
            await cancelled(cluster)

    run(scenario)


@pytest.mark.parametrize("script", [never, five_tokens])
def test_a_nats_stream_that_nobody_reads_is_cancelled(run: Any, script: Any) -> None:
    """The server says so: no subscription on the chunks' subject."""

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        inbox = cluster.client.nc.new_inbox()
        subscription = await cluster.client.nc.subscribe(inbox)
        await cluster.client.nc.publish(
            "halfmoon.v1.generate", orjson.dumps({**BODY, "stream": True}), reply=inbox
        )
        await cluster.double.wait_for(RequestArrived)
        alive = orjson.loads((await subscription.next_msg(timeout=BOUND_S)).data)
        assert alive["id"]
        await subscription.unsubscribe()
        await cluster.client.nc.flush()
        await cancelled(cluster)

    run(scenario)


@pytest.mark.pure
def test_a_chunk_that_nobody_reads_is_enough_to_notice(run: Any) -> None:
    """Without the empty chunks in between, which come much too late here."""

    left = asyncio.Event()

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:1]))
        await left.wait()
        await double.deliver(double.delivery(arrived, f"{seq}-0", 1, double.answer_ids[1:3]))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        nc = cluster.client.nc
        subscription = await nc.subscribe(inbox := nc.new_inbox())
        await nc.publish("halfmoon.v1.generate", orjson.dumps({**BODY, "stream": True}), reply=inbox)
        await subscription.next_msg(timeout=BOUND_S)
        await subscription.unsubscribe()
        await nc.flush()
        left.set()
        await cancelled(cluster)

    run(scenario, alive_ns=60_000 * MS)


def test_a_nats_request_with_an_alive_subject_is_cancelled_when_that_goes_away(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = never
        nc = cluster.client.nc
        alive = nc.new_inbox()
        asked = 0

        async def listening(_: Any) -> None:
            nonlocal asked
            asked += 1

        subscription = await nc.subscribe(alive, cb=listening)
        inbox = nc.new_inbox()
        await nc.subscribe(inbox)
        await nc.publish(
            "halfmoon.v1.generate", orjson.dumps(BODY), reply=inbox, headers={"Halfmoon-Alive": alive}
        )
        await eventually(lambda: asked >= 2, "it is asked again and again")
        assert not [event for event in cluster.double.events if isinstance(event, RequestCancelled)]
        await subscription.unsubscribe()
        await nc.flush()
        await cancelled(cluster)

    run(scenario)


def test_a_nats_request_without_one_waits_on(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = never
        pending = asyncio.ensure_future(cluster.ask("generate", {**BODY, "request_id": "mine"}))
        await cluster.double.wait_for(RequestArrived)
        # One that came later is given up at a subject where nobody listens.
        gone = {"Halfmoon-Alive": cluster.client.nc.new_inbox()}
        other = asyncio.ensure_future(cluster.ask("generate", BODY, headers=gone))
        _, later = await cluster.double.wait_for(RequestArrived, 2)
        (given_up,) = await cluster.double.wait_for(RequestCancelled)
        assert given_up.request_id == later.request_id
        other.cancel()
        assert not pending.done()
        _, answer = await cluster.ask("cancel", {"id": "mine"})
        assert answer == {"id": "mine", "cancelled": True}
        headers, body = await pending
        assert (headers["Nats-Service-Error-Code"], body["error"]["code"]) == ("499", "cancelled")
        await cluster.double.wait_for(RequestCancelled, 2)
        _, answer = await cluster.ask("cancel", {"id": "mine"})
        assert answer == {"id": "mine", "cancelled": False}

    run(scenario)


@pytest.mark.pure
def test_two_open_requests_cannot_share_a_request_id(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = never
        pending = asyncio.ensure_future(cluster.post("/v1/completions", {**BODY, "request_id": "twin"}))
        await cluster.double.wait_for(RequestArrived)
        status, _, answer = await cluster.post("/v1/completions", {**BODY, "request_id": "twin"})
        assert (status, answer["error"]["param"]) == (422, "request_id")
        await cluster.ask("cancel", {"id": "twin"})
        status, _, answer = await pending
        assert status == 499

    run(scenario)


@pytest.mark.pure
def test_a_stop_string_ends_the_work_too(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        _, _, answer = await cluster.post("/v1/completions", {**BODY, "stop": "STOP"})
        assert answer["choices"][0]["text"].endswith("Then ")
        assert answer["choices"][0]["finish_reason"] == "stop"
        (event,) = await cluster.double.wait_for(RequestCancelled)
        assert event.reason == "stop"

    run(scenario)


def test_a_worker_that_knows_a_request_and_never_goes_on_does_not_keep_it_open(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers each question; the client is told which worker was silent, and after how many tokens."""
    # No request is given up before it has come as far as it is to come.
    stuck: set[str] = set()
    limit = Redelivery._silence_ns_max
    monkeypatch.setattr(
        Redelivery,
        "_silence_ns_max",
        lambda self, request: limit(self, request) if request.request_id in stuck else PATIENT_NS,
    )
    frontends: list[Frontend] = []

    async def stuck_at_once(double: Any, seq: int, arrived: RequestArrived) -> None:
        double.resend = lambda _: ResendReply(known=True)
        await double.place(arrived, f"{seq}-0")
        stuck.add(arrived.request_id)

    async def stuck_later(double: Any, seq: int, arrived: RequestArrived) -> None:
        double.resend = lambda _: ResendReply(known=True)
        await double.place(arrived, f"{seq}-0")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, [5, 6]))
        (request,) = frontends[0].registry.requests.values()
        await eventually(lambda: len(request.output_ids) == 2, "the frontend has two tokens")
        stuck.add(arrived.request_id)

    async def scenario(cluster: Any) -> None:
        frontends.append(cluster.frontend)
        cases = ((stuck_at_once, "it waits for its first token"), (stuck_later, "which sent 2 tokens"))
        for number, (script, phase) in enumerate(cases, start=1):
            cluster.double.script = script
            status, _, answer = await cluster.post("/v1/completions", BODY)
            message = answer["error"]["message"]
            assert (status, answer["error"]["code"]) == (500, "silence")
            assert phase in message, message
            assert "decode worker d1" in message, message
            told = re.match(r"no token came for (\d+) s: .* was last heard of (\d+) s ago$", message)
            assert told, message
            silent_s, heard_s = map(int, told.groups())
            assert heard_s <= silent_s + 1, message  # it answered since; the one is cut, the other rounded
            assert len(cluster.double.resend_requests) >= number  # it was asked, and it answered
            events = await cluster.double.wait_for(RequestCancelled, number)
            assert events[-1].reason == "silence"

    run(scenario, resend_after_ns=100 * MS, silence_s=0.6)


def test_a_request_whose_first_token_may_come_late_is_waited_for(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = never
        asked = asyncio.ensure_future(cluster.post("/v1/completions", {**BODY, "slo": {"ttft_ms": 60_000}}))
        await cluster.double.wait_for(RequestArrived)
        # One that came later and may not wait is given up before it.
        status, _, answer = await cluster.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (500, "silence")
        assert not asked.done()
        asked.cancel()

    run(scenario, resend_after_ns=100 * MS, silence_s=0.3)


def test_a_request_that_nothing_is_heard_of_fails(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = never
        status, _, answer = await cluster.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (500, "silence")
        (event,) = await cluster.double.wait_for(RequestCancelled)
        assert event.reason == "silence"

    run(scenario, resend_after_ns=100 * MS, silence_s=0.6)


@pytest.mark.pure
def test_stopping_finishes_what_is_open_and_refuses_the_rest(run: Any) -> None:
    go_on = asyncio.Event()

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        await go_on.wait()
        ids, reason = double.output(arrived)
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, ids, reason))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        pending = [asyncio.ensure_future(cluster.post("/v1/completions", BODY)) for _ in range(2)]
        pending.append(asyncio.ensure_future(cluster.ask("generate", BODY)))
        await cluster.double.wait_for(RequestArrived, 3)
        stopping = asyncio.ensure_future(cluster.frontend.stop())
        await eventually(lambda: cluster.frontend.registry.draining, "it stops")
        status, _, answer = await cluster.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "stopping")
        status, _, _ = await cluster.http_get("/ready")
        assert status == 503
        assert not any(each.done() for each in (*pending, stopping))
        go_on.set()
        for answered in await asyncio.gather(*pending[:2]):
            assert answered[0] == 200
        assert (await pending[2])[1]["done"]
        await stopping
        await cluster.double.wait_for(FrontendLeft)

    run(scenario, drain_ns_max=PATIENT_NS)


@pytest.mark.pure
def test_stopping_tells_those_that_cannot_be_finished(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = never
        pending = [cluster.post("/v1/completions", BODY), cluster.ask("generate", BODY)]
        pending = [asyncio.ensure_future(each) for each in pending]
        await cluster.double.wait_for(RequestArrived, 2)
        await cluster.frontend.stop()
        (status, _, answer), (headers, _) = await asyncio.gather(*pending)
        assert (status, answer["error"]["code"]) == (503, "stopping")
        assert headers["Nats-Service-Error-Code"] == "503"

    run(scenario, drain_ns_max=200 * MS)


@pytest.mark.pure
def test_a_frontend_whose_port_is_taken_joins_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Any) -> None:
        port = cluster.frontend.http_port
        config = FrontendConfig(frontend_id="second", model=MODEL, context_tokens=2048, http_port=port)
        second = Frontend(cluster.client, config, cluster.double.tokenizer, LAYOUT)
        with pytest.raises(OSError, match=str(port)):
            await second.start()
        await cluster.client.flush(1.0)
        await cluster.double.bus.last_seq()
        joined = [event.frontend_id for event in cluster.double.events if isinstance(event, FrontendJoined)]
        assert "second" not in joined
        monkeypatch.setattr("halfmoon.workers.frontend.registry.JOINING_S", 0)
        with pytest.raises(ApiError, match="starting"):
            await second.registry.admit()

    run(scenario)


@pytest.mark.pure
def test_a_request_finds_a_frontend_from_the_moment_that_it_joins(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: Any) -> None:
        await cluster.frontend.stop()  # the only one
        await cluster.double.wait_for(FrontendLeft)
        config = FrontendConfig(frontend_id="second", model=MODEL, context_tokens=2048, http_port=0)
        second = Frontend(cluster.client, config, cluster.double.tokenizer, LAYOUT)
        append = Bus.append
        early: list[asyncio.Future[Any]] = []

        async def joining(bus: Bus, event: Any, **more: Any) -> int:
            if isinstance(event, FrontendJoined):
                early.append(asyncio.ensure_future(cluster.ask("models", {})))
                early.append(asyncio.ensure_future(cluster.ask("generate", {"prompt": 3})))
                cluster.url = second.http_url
                early.append(asyncio.ensure_future(cluster.post("/v1/completions", {"prompt": 3})))
                await early[0]
                await cluster.http_get("/health")
                assert [one.done() for one in early] == [True, False, False], "they wait until it has joined"
            return await append(bus, event, **more)

        monkeypatch.setattr(Bus, "append", joining)
        await second.start()
        (_, models), (headers, _), (status, _, _) = await asyncio.gather(*early)
        assert models["data"]
        assert (headers["Nats-Service-Error-Code"], status) == ("400", 400)
        await second.stop()

    run(scenario)
