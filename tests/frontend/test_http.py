"""The HTTP edge, with the clients that people use."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from frontend_double import ANSWER, MODEL
from prometheus_client.parser import text_string_to_metric_families

from halfmoon.cli.status import describe
from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.frontend import cluster_status
from tests.eventually import eventually
from tests.lazily import Lazily

openai: Any = Lazily("openai")

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
]


def in_thread(work: Any) -> Any:
    """A blocking client, beside the event loop that serves it."""
    return asyncio.get_running_loop().run_in_executor(None, work)


def test_openais_client_gets_chats_completions_and_streams(run: Any) -> None:
    def work(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k1", max_retries=0)
        assert [model.id for model in client.models.list()] == [MODEL]
        messages: Any = CHAT
        chat = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=100, logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].message.content == ANSWER
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 16
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content or []
        assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == ANSWER
        assert len(content[0].top_logprobs) == 2
        pieces = list(
            client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=100,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert pieces[0].choices[0].delta.role == "assistant"
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == ANSWER
        assert pieces[-2].choices[0].finish_reason == "stop"
        assert pieces[-1].choices == []
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.completion_tokens == chat.usage.completion_tokens
        completion = client.completions.create(model=MODEL, prompt="Once", max_tokens=3, logprobs=1)
        assert completion.choices[0].text == "Half moons:"
        assert completion.choices[0].finish_reason == "length"
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.tokens == ["Half", " moons", ":"]
        assert completion.choices[0].logprobs.text_offset == [0, 4, 10]
        stream = client.completions.create(
            model=MODEL, prompt=[1, 2, 3], max_tokens=100, stream=True, logprobs=1
        )
        choices = [piece.choices[0] for piece in stream if piece.choices]
        assert "".join(choice.text for choice in choices) == ANSWER
        offsets = [
            offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset or []
        ]
        assert offsets == sorted(offsets)
        assert len(offsets) == completion.usage.completion_tokens + 39 if completion.usage else False
        assert len(client.completions.create(model=MODEL, prompt="Once").choices[0].text) > 10  # 16 tokens

    async def scenario(cluster: Any) -> None:
        await in_thread(lambda: work(cluster.url))

    run(scenario, api_keys={"k1": ""})


def test_openais_client_raises_its_own_errors(run: Any) -> None:
    async def reject(double: Any, seq: int, arrived: RequestArrived) -> None:
        await double.reject(arrived, seq, reason="ttft_slo", message="too slow", retry_after_ns=1_000_000)

    def work(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k1", max_retries=1)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-9", prompt="x")
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model=MODEL, prompt="x", temperature=9)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="")
        with pytest.raises(openai.RateLimitError) as limited:
            client.completions.create(model=MODEL, prompt="x")
        assert limited.value.response.headers["retry-after-ms"] == "1"

    async def scenario(cluster: Any) -> None:
        cluster.double.script = reject
        await in_thread(lambda: work(cluster.url))

    run(scenario, api_keys={"k1": ""})


@pytest.mark.pure
def test_a_cpu_on_which_exact_numerics_do_not_hold_is_told(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.exact_numerics = "not_held"

        async def version_told() -> Any:
            version = json.loads((await cluster.http_get("/version"))[2])
            return version if len(version) > 1 else None

        version = await eventually(version_told, "a status has been read")
        assert version["exact_numerics_not_held"] == ["d1"]
        told = json.loads((await cluster.http_get("/status"))[2])
        assert [node["exact_numerics"] for node in told["nodes"]] == ["", "not_held", ""]
        assert "\nexact numerics: not held on the CPU of d1\n" in describe(told)

    run(scenario)


@pytest.mark.pure
def test_what_operators_look_at(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Any) -> None:
        await cluster.post("/v1/completions", {"prompt": "Once", "max_tokens": 5})
        await cluster.post("/v1/completions", {"prompt": "Once", "max_tokens": 0})
        assert (await cluster.http_get("/health"))[0] == 200
        assert (await cluster.http_get("/ready"))[0] == 200
        assert set(json.loads((await cluster.http_get("/version"))[2])) == {"version"}
        status = json.loads((await cluster.http_get("/status"))[2])
        assert status["ready"] is True
        assert [node["id"] for node in status["nodes"]] == ["p1", "d1", cluster.double.frontend_id]
        assert status["conductors"] == [{"id": "c1", "seq": 5, "digest": "00ff"}]
        _, headers, text = await cluster.http_get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(text.decode())}
        samples = {sample.name: sample.value for family in families.values() for sample in family.samples}
        assert samples["vllm:prompt_tokens_total"] == 1
        assert samples["vllm:generation_tokens_total"] == 5
        assert samples["vllm:time_to_first_token_seconds_count"] == 1
        assert samples["vllm:prefix_cache_hits_total"] == 16
        (failed,) = (
            s for s in families["halfmoon_request_errors"].samples if s.name.endswith("_total") and s.value
        )
        assert (failed.labels, failed.value) == ({"status": "400"}, 1)
        (finished,) = (
            s for s in families["vllm:request_success"].samples if s.name.endswith("_total") and s.value
        )
        assert finished.labels == {"model_name": MODEL, "finished_reason": "length"}
        cluster.double.ready = False
        monkeypatch.setattr(cluster_status, "CACHED_S", -1.0)  # what was told is not kept
        code, headers, _ = await cluster.http_get("/ready")
        assert (code, headers["retry-after"]) == (503, "1")

    run(scenario)


@pytest.mark.pure
def test_decode_workers_without_attention_are_told_as_not_ready_and_why(run: Any) -> None:
    why = "decode workers keep no KV, and no attention worker is ready"

    async def scenario(cluster: Any) -> None:
        cluster.double.no_attention = why
        code, headers, body = await cluster.http_get("/ready")
        error = json.loads(body)["error"]
        assert (code, headers["retry-after"]) == (503, "1")
        assert (error["code"], error["message"]) == ("not_ready", why)
        status = json.loads((await cluster.http_get("/status"))[2])
        assert (status["ready"], status["problem"]) == (False, why)
        lines = describe(status).splitlines()
        assert f"not ready ({why})" in lines[0]
        assert f"decodes nothing new: d1 ({why})" in lines

    run(scenario)


@pytest.mark.pure
def test_unknown_paths_and_methods_get_errors_of_the_same_form(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        for method, path, status in (
            ("GET", "/v2", 404),
            ("GET", "/v1/completions", 405),
            ("POST", "/v1/models", 405),
        ):
            async with cluster.http.request(method, cluster.url + path) as response:
                assert response.status == status
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        status, _, answer = await cluster.post("/tokenize", {"prompt": "Once upon a time"})
        assert (status, answer["count"]) == (200, len(answer["tokens"]))
        status, _, answer = await cluster.post("/tokenize", {"messages": CHAT})
        assert answer["count"] > 5
        status, _, answer = await cluster.post("/tokenize", {"prompt": "x", "messages": CHAT})
        assert status == 400

    run(scenario)


def test_curl_streams(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        process = await asyncio.create_subprocess_exec(
            "curl", "-sN", f"{cluster.url}/v1/completions", "-H", "content-type: application/json",
            "-H", "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "-D", "-",
            "-d", '{"prompt": "Once", "max_tokens": 4, "stream": true}', stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0
        assert "200 OK" in output
        assert "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01" in output
        assert output.count("data: ") == 5
        assert output.endswith("data: [DONE]\n\n")

    run(scenario)


def test_a_clients_socket_sends_without_delay(run: Any) -> None:
    """A peer loses 40 ms a stream without TCP_NODELAY."""

    async def scenario(cluster: Any) -> None:
        host, _, port = cluster.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = cluster.frontend._http._server.room.connections
        sock = connection.link.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()

    run(scenario)
