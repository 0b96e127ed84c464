"""The NATS edge: a micro service that any NATS client can find and use."""

from __future__ import annotations

import argparse
import asyncio
import threading
from typing import Any

import orjson
import pytest
from frontend_double import ANSWER, MODEL, inboxes_of_a_client
from nats.errors import MaxPayloadError

from halfmoon.cli import status
from halfmoon.cli.client import chat, generate
from halfmoon.schemas.events import RequestArrived, RequestCancelled
from halfmoon.schemas.tokens import TakeRequest
from halfmoon.workers.frontend.config import FrontendConfig
from tests.eventually import BOUND_S, eventually

BODY = {"prompt": "Once", "max_tokens": 200}
#: Requests of which one of two frontends gets all in one run of 10^18.
MANY = 60


@pytest.mark.pure
def test_the_micro_service_can_be_found_and_measured(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        await cluster.ask("generate", BODY)
        await cluster.ask("generate", {"prompt": 5})
        await cluster.stream("generate", BODY)

        async def srv(verb: str) -> Any:
            return orjson.loads((await cluster.client.nc.request(f"$SRV.{verb}", b"", timeout=BOUND_S)).data)

        ping = await srv("PING")
        assert (ping["type"], ping["name"], ping["id"]) == (
            "io.nats.micro.v1.ping_response",
            "halfmoon",
            cluster.double.frontend_id,
        )
        info = await srv("INFO.halfmoon")
        assert info["type"] == "io.nats.micro.v1.info_response"
        subjects = {endpoint["subject"] for endpoint in info["endpoints"]}
        names = ("generate", "chat", "models", "cancel", "status", "tokenize")
        assert subjects == {f"halfmoon.v1.{name}" for name in names}
        stats = await srv(f"STATS.halfmoon.{cluster.double.frontend_id}")
        endpoint = next(each for each in stats["endpoints"] if each["name"] == "generate")
        assert (endpoint["num_requests"], endpoint["num_errors"]) == (3, 1)
        assert endpoint["last_error"] == "400 invalid"
        assert endpoint["average_processing_time"] > 100_000
        await asyncio.sleep(0)

    run(scenario)


def test_every_endpoint_answers(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        _, answer = await cluster.ask("chat", {"messages": messages, "max_tokens": 200, "logprobs": 2})
        assert answer["text"] == ANSWER
        assert answer["usage"] == {
            "prompt_tokens": answer["usage"]["prompt_tokens"],
            "cached_tokens": 16,
            "completion_tokens": 42,
        }
        assert answer["timing_ms"]["prefill"] == 3.0
        assert set(answer["timing_ms"]) == {"queue", "transfer", "prefill", "ttft", "tbt_mean", "total"}
        assert (answer["prefill_worker"], answer["decode_worker"]) == ("p1", "d1")
        assert len(answer["logprobs"]) == 42
        chunks = await cluster.stream("chat", {"messages": messages, "max_tokens": 200})
        assert "".join(chunk["text"] for chunk in chunks[:-1]) == chunks[-1]["text"] == ANSWER
        assert [chunk["index"] for chunk in chunks[:-1]] == list(range(len(chunks) - 1))
        assert (await cluster.ask("models", {}))[1]["data"][0]["id"] == MODEL
        assert (await cluster.ask("tokenize", {"prompt": "Once"}))[1]["count"] == 1
        assert (await cluster.ask("status", {}))[1]["ready"] is True
        headers, answer = await cluster.ask("cancel", {})
        assert (headers["Nats-Service-Error-Code"], answer["error"]["param"]) == ("400", "id")

    run(scenario)


def test_two_frontends_share_the_requests_and_either_can_cancel(
    run: Any, server_url: str, tokenizer: Any
) -> None:
    from frontend_double import cluster as make

    async def never(double: Any, seq: int, arrived: RequestArrived) -> None:
        """Nobody places the request."""

    async def scenario(first: Any) -> None:
        async with make(server_url, tokenizer) as second:
            first.double.script = second.double.script = never
            pending: list[Any] = []
            served: dict[str, bool] = {}
            # The server draws who gets each: of a few requests one frontend may get all.
            while len(served) < 2 and len(pending) < MANY:
                body = {**BODY, "request_id": f"r{len(pending)}"}
                pending.append(asyncio.ensure_future(first.ask("generate", body)))
                arrived = await first.double.wait_for(RequestArrived, len(pending))
                served = {event.frontend_id: True for event in arrived}
            assert len(served) == 2
            for number in range(len(pending)):
                _, answer = await first.ask("cancel", {"id": f"r{number}"})
                assert answer["cancelled"] is True
            for headers, _ in await asyncio.gather(*pending):
                assert headers["Nats-Service-Error-Code"] == "499"
            cancelled = await first.double.wait_for(RequestCancelled, len(pending))
            assert len(cancelled) == len(pending)

    run(scenario)


@pytest.mark.pure
def test_payloads_have_a_limit_and_say_so(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        with pytest.raises(MaxPayloadError):
            await cluster.ask("generate", {"prompt": "x" * (1 << 20)})
        body = {"prompt": "Once", "max_tokens": 200, "logprobs": 20, "request_id": "large"}
        edge = cluster.frontend._nats
        edge.payload_bytes_max = 4096
        headers, answer = await cluster.ask("generate", body)
        assert (headers["Nats-Service-Error-Code"], answer["error"]["code"]) == ("413", "answer_too_large")
        chunks = await cluster.stream("generate", body)
        assert chunks[-1]["text"] == ANSWER
        assert "logprobs" not in chunks[-1]
        assert all("logprobs" in chunk for chunk in chunks[:-1])

    run(scenario)


@pytest.mark.pure
def test_traceparent_is_kept_to_the_end_and_nonsense_is_not(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers, _ = await cluster.ask("generate", BODY, headers={"traceparent": trace})
        assert headers["traceparent"] == trace
        headers, _ = await cluster.ask("generate", BODY, headers={"traceparent": "../../x"})
        assert "traceparent" not in headers

    run(scenario)


async def nothing(*_: Any) -> None:
    """No worker takes it."""


NO_INBOXES = (
    "",
    "halfmoon.events.up.WorkerLeft",
    "halfmoon.inbox.frontend.x.1",
    "$JS.API.STREAM.PURGE.EVENTS",
    "a..b",
)


async def plainly(nc: Any, subject: str, payload: bytes, reply: str, headers: bytes = b"") -> None:
    """As a client may that checks nothing."""
    message = b"%b\r\n" % payload
    line = f"PUB {subject} {reply} {len(payload)}\r\n"
    if headers:
        block = b"NATS/1.0\r\n" + headers + b"\r\n"
        line = f"HPUB {subject} {reply} {len(block)} {len(block) + len(payload)}\r\n"
        message = block + message
    await nc._send_command(line.encode() + message)
    await nc._flush_pending()


@pytest.mark.pure
def test_a_request_is_dropped_and_counted_when_its_reply_subject_is_no_inbox(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        nc, ours = cluster.client.nc, cluster.frontend.bus.nc
        deputy: list[str] = []

        async def heard(msg: Any) -> None:
            deputy.append(msg.subject)

        for subject in NO_INBOXES[1:3]:
            await nc.subscribe(subject, cb=heard)
        names = ("generate", "chat", "models", "status", "tokenize", "cancel")
        for reply in NO_INBOXES:
            for name in names:
                for body in (b"{}", b"", orjson.dumps(BODY)):
                    await plainly(nc, f"halfmoon.v1.{name}", body, reply)
            for verb in ("PING", "INFO", "STATS"):
                await plainly(nc, f"$SRV.{verb}", b"", reply)
        await plainly(nc, "halfmoon.v1.generate", orjson.dumps(BODY), "_INBOX.\x0c")
        await cluster.ask("models", {})
        await cluster.ask("generate", BODY)
        assert len(await cluster.double.wait_for(RequestArrived)) == 1
        assert deputy == []
        assert ours.stats["reconnects"] == 0
        stats = orjson.loads((await nc.request("$SRV.STATS", b"", timeout=BOUND_S)).data)["endpoints"]
        dropped = {each["name"]: each["num_errors"] for each in stats}
        answered = len(NO_INBOXES) * 3
        assert dropped == {name: answered for name in names[1:5]} | {
            "generate": answered + 1,
            "cancel": answered,
        }

    run(scenario)


@pytest.mark.pure
def test_a_request_can_be_cancelled_by_a_message_without_a_reply_subject(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = nothing
        asking = asyncio.ensure_future(cluster.ask("generate", {**BODY, "request_id": "mine"}))
        await cluster.double.wait_for(RequestArrived)
        await cluster.client.nc.publish("halfmoon.v1.cancel", b'{"id":"mine"}')
        headers, _ = await asking
        assert headers["Nats-Service-Error-Code"] == "499"

    run(scenario)


@pytest.mark.pure
def test_nobody_is_kept_alive_at_a_subject_that_is_no_inbox(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = nothing
        nc, inbox = cluster.client.nc, cluster.client.nc.new_inbox()
        for number, alive in enumerate(("halfmoon.events.up.WorkerLeft", "a b", "$JS.API.X", "_INBOX.>")):
            headers = f"Halfmoon-Alive: {alive}\r\n".encode()
            body = orjson.dumps({**BODY, "request_id": f"r{number}"})
            await plainly(nc, "halfmoon.v1.generate", body, inbox, headers)
        await cluster.double.wait_for(RequestArrived, 4)
        heard: list[str] = []

        async def hear(msg: Any) -> None:
            heard.append(msg.subject)

        await nc.subscribe("halfmoon.events.up.*", cb=hear)
        # One that came later is kept alive at its subject again and again.
        body = orjson.dumps({**BODY, "request_id": "r4"})
        await nc.subscribe(alive := nc.new_inbox(), cb=hear)
        await plainly(nc, "halfmoon.v1.generate", body, inbox, f"Halfmoon-Alive: {alive}\r\n".encode())
        await eventually(lambda: len(heard) >= 3, "it is kept alive")
        assert set(heard) == {alive}
        assert len(cluster.frontend.registry.requests) == 5
        for number in range(5):
            await cluster.ask("cancel", {"id": f"r{number}"})

    run(scenario, alive_ns=50_000_000)


@pytest.mark.pure
def test_clients_may_have_inboxes_of_another_name(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        inboxes_of_a_client(cluster.client, b"_INBOX_alice")
        _, answer = await cluster.ask("generate", BODY)
        assert answer["text"] == ANSWER

    run(scenario, client_inboxes="_INBOX.,_INBOX_alice.")


@pytest.mark.pure
@pytest.mark.parametrize(
    "prefix", ["", "h", "halfmoon", "halfmoon.", "halfmoon.events.", "$JS.", "a b", ">", "a.."]
)
def test_what_is_no_beginning_of_inboxes_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="client_inboxes"):
        FrontendConfig(frontend_id="f", model=MODEL, client_inboxes=prefix)


@pytest.mark.pure
def test_a_long_prompt_does_not_hold_up_others(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizing ends here when the others are served."""
    go_on = threading.Event()

    async def scenario(cluster: Any) -> None:
        prompts = cluster.frontend.registry.prompts
        submit = prompts._threads.submit
        monkeypatch.setattr(prompts._threads, "submit", lambda work: submit(lambda: go_on.wait() and work()))
        long = asyncio.ensure_future(cluster.ask("generate", {"prompt": "word " * 150_000}))
        try:
            await eventually(lambda: prompts.pending, "it is being tokenized")
            _, answer = await cluster.ask("generate", BODY)
            assert answer["text"] == ANSWER
            assert not long.done()
        finally:
            go_on.set()
        headers, _ = await long
        assert headers["Nats-Service-Error-Code"] == "400"

    run(scenario)


@pytest.mark.pure
def test_the_log_holds_no_text_and_no_tokens(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        await cluster.ask("generate", {**BODY, "prompt": "a very secret prompt " * 20})
        (arrived,) = await cluster.double.wait_for(RequestArrived)
        assert b"secret" not in orjson.dumps(str(arrived))
        reply = await cluster.double.bus.request(
            f"halfmoon.take.{cluster.double.frontend_id}.w",
            TakeRequest(request_id=arrived.request_id, order_id="99999-0", worker_id="w", role="decode"),
            type(await cluster.double.take(arrived, "99999-0", "decode", "w")),
            timeout_s=BOUND_S,
        )
        assert reply.gone  # finished: nothing is kept

    run(scenario)


def test_the_commands(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(dest="command")
    modules = {"generate": generate, "chat": chat, "status": status}
    for name, module in modules.items():
        module.add(subparsers.add_parser(name))  # type: ignore[attr-defined]

    async def command(cluster: Any, *words: str) -> tuple[int, str, str]:
        args = parser.parse_args([*words, "--nats", cluster.nats_url])
        code = await modules[args.command].run(args)  # type: ignore[attr-defined]
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    async def scenario(cluster: Any) -> None:
        assert await command(cluster, "generate", "Once", "--max-tokens", "99") == (0, ANSWER + "\n", "")
        assert await command(cluster, "chat", "Hello", "--system", "Be brief.") == (0, ANSWER + "\n", "")
        code, out, _ = await command(
            cluster, "generate", "Once", "--json", "--stop", "naïve", "--ttft-slo-ms", "9000"
        )
        answer = orjson.loads(out)
        assert (code, answer["finish_reason"], answer["text"]) == (0, "stop", ANSWER.partition("naïve")[0])
        assert set(answer) >= {
            "text", "token_ids", "finish_reason", "usage", "timing_ms", "prefill_worker", "decode_worker"
        }  # fmt: skip
        code, out, err = await command(cluster, "generate", "Once", "--temperature", "9")
        assert (code, out) == (1, "")
        assert "temperature" in err
        code, out, _ = await command(cluster, "status", "--json")
        assert code == 0
        assert set(orjson.loads(out)) >= {"ready", "nats", "http", "model", "nodes", "conductors"}
        code, out, _ = await command(cluster, "status")
        assert "d1" in out

    run(scenario)


def test_commands_without_a_cluster_say_so(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    generate.add(subparsers.add_parser("generate"))
    for url, words in ((server_url, "no frontend answers"), ("nats://127.0.0.1:1", "no NATS server")):
        assert asyncio.run(generate.run(parser.parse_args(["generate", "x", "--nats", url]))) == 1
        assert words in capsys.readouterr().err


def test_no_request_is_lost_while_a_frontend_stops(run: Any, server_url: str, tokenizer: Any) -> None:
    """Its queue group's other member takes what it does not."""
    from frontend_double import cluster as make

    async def scenario(first: Any) -> None:
        answers = []
        stopped = asyncio.Event()

        async def ask_one(number: int) -> None:
            answers.append(await first.ask("generate", {"prompt": [number], "max_tokens": 2}))

        async def ask_on(number: int) -> None:
            while not stopped.is_set():
                await ask_one(number)
            for _ in range(5):
                await ask_one(number)

        async with make(server_url, tokenizer) as second:
            asking = [asyncio.ensure_future(ask_on(number)) for number in range(8)]
            await second.double.wait_for(RequestArrived, 80)
            here = second.frontend.config.frontend_id
            assert here in {event.frontend_id for event in await second.double.wait_for(RequestArrived)}
            await second.frontend.stop()
            stopped.set()
            await asyncio.gather(*asking)
        refused = [body["error"]["code"] for _, body in answers if "error" in body]
        assert set(refused) <= {"stopping"}

    run(scenario)
