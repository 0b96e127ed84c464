"""Anthropic's messages and OpenAI's responses, by their own clients; what the edge says about itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from frontend_double import ANSWER, MODEL, Double, FailsLater

from halfmoon.schemas.api.messages import parse_messages
from halfmoon.schemas.api.requests import parse_chat
from halfmoon.schemas.api.responses import parse_responses
from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.lazily import Lazily

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic = Lazily("anthropic")
    openai = Lazily("openai")

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


def of_anthropic(cluster: Any, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=cluster.url, api_key="k", max_retries=0, **options)


def of_openai(cluster: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="k", max_retries=0)


@pytest.mark.pure
def test_anthropics_client_is_answered(run: Any, tokenizer: Tokenizer) -> None:
    async def whole(cluster: Any) -> None:
        async with of_anthropic(cluster) as client:
            answer = await client.messages.create(**ASK)
            assert (answer.content[0].text, answer.stop_reason, answer.model) == (
                "Half moons:", "max_tokens", MODEL,
            )  # fmt: skip
            usage = answer.usage
            prompt = len(tokenizer.encode_chat([{"role": "user", "content": "Hi"}]))
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == prompt
            assert usage.output_tokens == 3
            answer = await client.messages.create(**{**ASK, "max_tokens": 300, "stop_sequences": [":"]})
            assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (
                "Half moons", "stop_sequence", ":",
            )  # fmt: skip
            answer = await client.messages.create(**{**ASK, "max_tokens": 300})
            assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")

    async def streamed(cluster: Any) -> None:
        client = of_anthropic(cluster)
        async with client, client.messages.stream(**{**ASK, "max_tokens": 300}) as stream:
            texts = [text async for text in stream.text_stream]
            last = await stream.get_final_message()
        assert ("".join(texts), len(texts) > 3, last.stop_reason) == (ANSWER, True, "end_turn")
        assert last.usage.output_tokens > 3

    async def counted(cluster: Any) -> None:
        turns = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        async with of_anthropic(cluster) as client:
            counts = await client.messages.count_tokens(model=MODEL, messages=turns, system="Be short.")
        whole = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
        assert counts.input_tokens == len(tokenizer.encode_chat(whole))

    async def refused(cluster: Any) -> None:
        async with of_anthropic(cluster) as client:
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                await client.messages.create(**{**ASK, "model": "none"})
            with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                await client.messages.create(**{**ASK, "max_tokens": 0})
            with pytest.raises(anthropic.BadRequestError, match="mcp_servers is not supported"):
                await client.messages.create(**ASK, extra_body={"mcp_servers": [{"url": "http://x"}]})
            image = [{"type": "image", "source": {"type": "url", "url": "http://x"}}]
            with pytest.raises(anthropic.BadRequestError, match="a block of type image"):
                await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": image}]})
        status, _, body = await cluster.post("/v1/messages", {**ASK, "max_tokens": 0})
        assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")

    async def scenario(cluster: Any) -> None:
        for part in (whole, streamed, counted, refused):
            await part(cluster)

    run(scenario)


@pytest.mark.pure
def test_anthropics_client_shows_its_key_in_its_own_header(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        async with of_anthropic(cluster) as client:
            assert (await client.messages.create(**ASK)).stop_reason == "max_tokens"
            assert [model.id async for model in client.models.list()] == [MODEL]
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            for key, status in (("k", 200), ("no", 401)):
                assert (await cluster.http_get(path, headers={"x-api-key": key}))[0] == status
        async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="no", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**ASK)

    run(scenario, api_keys={"k": ""})


@pytest.mark.pure
def test_whatever_is_refused_of_messages_has_anthropics_form(run: Any) -> None:
    counted = "/v1/messages/count_tokens"

    async def scenario(cluster: Any) -> None:
        async def refusal(path: str, body: Any, **headers: str) -> Any:
            status, _, found = await cluster.post(path, body, headers={"x-api-key": "k", **headers})
            assert found["type"] == "error"
            assert found["error"]["message"]
            return status, found["error"]["type"], found["error"]["param"]

        for path in ("/v1/messages", counted):
            assert await refusal(path, {**ASK, "model": "none"}) == (404, "not_found_error", "model")
            assert await refusal(path, {**ASK, "messages": []}) == (400, "invalid_request_error", "messages")
            assert await refusal(path, b"{") == (400, "invalid_request_error", None)
            assert await refusal(path, ASK, **{"x-api-key": "no"}) == (401, "authentication_error", None)
            assert await refusal(path, ASK, origin="http://x") == (403, "permission_error", None)
            typed = {"content-type": "text/plain"}
            assert await refusal(path, ASK, **typed) == (415, "invalid_request_error", None)
        assert await refusal("/v1/messages/batches", {}) == (404, "not_found_error", None)
        status, _, content = await cluster.http_get("/v1/messages")
        assert (status, json.loads(content)["type"]) == (405, "error")
        # Of other paths nothing changes.
        _, _, found = await cluster.post("/v1/responses", {"input": "Hi"})
        assert found["error"]["type"] == "authentication_error"
        assert "type" not in found

    run(scenario, api_keys={"k": ""})


@pytest.mark.pure
def test_a_message_that_is_refused_by_the_cluster_has_anthropics_form(run: Any) -> None:
    async def refuse(double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.reject(arrived, seq, reason="ttft_slo", message="not in time", retry_after_ns=1_000_000)

    async def scenario(cluster: Any) -> None:
        cluster.double.script = refuse
        for stream in (False, True):
            status, headers, found = await cluster.post("/v1/messages", {**ASK, "stream": stream})
            assert (status, headers["x-should-retry"]) == (429, "true")
            assert (found["type"], found["error"]["type"]) == ("error", "rate_limit_error")

    run(scenario)


@pytest.mark.pure
def test_fields_that_change_nothing_are_taken(run: Any) -> None:
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    text: Any = {"type": "text", "text": "Hi", **mark}

    async def scenario(cluster: Any) -> None:
        async with of_anthropic(cluster) as client:
            answer = await client.beta.messages.create(
                model=MODEL,
                max_tokens=3,
                system=[text],
                messages=[{"role": "user", "content": [text]}],
                tools=[{"name": "f", "input_schema": {"type": "object"}, **mark}],
                thinking={"type": "enabled", "budget_tokens": 1024},
                metadata={"user_id": "u"},
                service_tier="auto",
                betas=["interleaved-thinking-2025-05-14"],
            )
        assert answer.stop_reason == "max_tokens"

    run(scenario)


@pytest.mark.pure
def test_a_messages_events_come_in_their_order(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        ask = {**ASK, "stream": True, "stop_sequences": [":"], "max_tokens": 300}
        async with cluster.http.post(
            f"{cluster.url}/v1/messages", json=ask, headers={"traceparent": trace}
        ) as response:
            lines = (await response.text()).split("\n\n")
            assert response.headers["traceparent"] == trace
        assert lines.pop() == ""
        pairs = [line.removeprefix("event: ").split("\ndata: ") for line in lines]
        events = [json.loads(told) for _, told in pairs]
        assert [name for name, _ in pairs] == [event["type"] for event in events]
        start, begun, *deltas, ended, last, stop = events
        assert (start["type"], begun["type"], ended["type"], last["type"], stop["type"]) == (
            "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
        )  # fmt: skip
        assert start["message"]["content"] == []
        assert begun["content_block"] == {"type": "text", "text": ""}
        assert "".join(delta["delta"]["text"] for delta in deltas) == "Half moons"
        assert {event["index"] for event in (begun, *deltas, ended)} == {0}
        assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": ":"}
        # What was read from the cache is counted apart: 16 tokens, as the double's workers say.
        usage = last["usage"]
        assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (16, 3)
        assert {**usage, "output_tokens": 0} == start["message"]["usage"]

    run(scenario)


@pytest.mark.pure
def test_openais_client_has_responses(run: Any, tokenizer: Tokenizer) -> None:
    async def whole(cluster: Any) -> None:
        async with of_openai(cluster) as client:
            answer = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
            assert (answer.output_text, answer.status) == ("Half moons:", "incomplete")
            assert answer.incomplete_details is not None
            assert answer.incomplete_details.reason == "max_output_tokens"
            turns = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
            answer = await client.responses.create(
                model=MODEL, input=turns, instructions="Be short.", reasoning={"effort": "low"}
            )
            assert answer.reasoning is not None
            assert answer.reasoning.effort == "low"
            assert (answer.output_text, answer.status, answer.store) == (ANSWER, "completed", False)
            assert answer.usage is not None
            whole = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
            assert answer.usage.input_tokens == len(tokenizer.encode_chat(whole))

    async def streamed(cluster: Any) -> None:
        async with of_openai(cluster) as client, client.responses.stream(model=MODEL, input="Hi") as stream:
            kinds = [event.type async for event in stream]
            last = await stream.get_final_response()
        assert last.output_text == ANSWER
        assert kinds[:4] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        ]  # fmt: skip
        assert kinds[-4:] == [
            "response.output_text.done", "response.content_part.done", "response.output_item.done",
            "response.completed",
        ]  # fmt: skip

    async def refused(cluster: Any) -> None:
        async with of_openai(cluster) as client:
            with pytest.raises(openai.BadRequestError) as problem:
                await client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")
            assert (problem.value.param, problem.value.code) == ("previous_response_id", "unsupported")
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve("resp_1")

    async def scenario(cluster: Any) -> None:
        for part in (whole, streamed, refused):
            await part(cluster)

    run(scenario)


@pytest.mark.pure
def test_the_events_of_a_response_are_numbered_as_they_come(run: Any) -> None:
    async def numbers(cluster: Any) -> list[tuple[str, int]]:
        async with of_openai(cluster) as client:
            stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
            found = []
            async for event in stream:
                found.append((event.type, event.sequence_number))
                if event.type == "response.output_text.delta" and isinstance(
                    cluster.double.script, FailsLater
                ):
                    cluster.double.script.seen.set()
        return found

    async def scenario(cluster: Any) -> None:
        for last, script in (
            ("response.completed", cluster.double.script),
            ("response.failed", FailsLater()),
        ):
            cluster.double.script = script
            found = await numbers(cluster)
            assert [number for _, number in found] == list(range(len(found)))
            kinds = [kind for kind, _ in found]
            assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], last)

    run(scenario)


@pytest.mark.pure
def test_a_message_that_fails_later_ends_with_an_error_of_anthropics(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = script = FailsLater()
        client = of_anthropic(cluster)
        async with client, client.messages.stream(**{**ASK, "max_tokens": 9}) as stream:
            assert await anext(stream.text_stream) == "Half"
            script.seen.set()
            with pytest.raises(anthropic.APIStatusError, match="placed 3 times") as failed:
                await anext(stream.text_stream)
        body: Any = failed.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "api_error")

    run(scenario)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.pure
def test_both_ask_for_answers_of_a_schema() -> None:
    turns = [{"role": "user", "content": "Hi"}]
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    chat = parse_chat(json.dumps({"messages": turns, "response_format": asked}).encode())
    messages = {**ASK, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    format_ = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
    assert chat.structure is not None
    assert parse_messages(json.dumps(messages).encode()).structure == chat.structure
    responses = {"input": "Hi", "text": {"format": format_}}
    assert parse_responses(json.dumps(responses).encode()).structure == chat.structure


@pytest.mark.pure
def test_tokens_become_text_again(run: Any, tokenizer: Tokenizer) -> None:
    async def scenario(cluster: Any) -> None:
        ids = tokenizer.encode("Half moons.")
        _, _, answer = await cluster.post("/detokenize", {"model": MODEL, "tokens": ids})
        assert answer == {"prompt": "Half moons."}
        status, _, answer = await cluster.post("/detokenize", {"tokens": [10**6]})
        assert (status, answer["error"]["param"]) == (400, "tokens")

    run(scenario)


@pytest.mark.pure
def test_the_edge_says_what_it_is(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        _, _, content = await cluster.http_get("/load")
        assert json.loads(content) == {"server_load": 0}
        _, _, content = await cluster.http_get("/server_info")
        about = json.loads(content)
        assert (about["served_model_names"], about["context_tokens"]) == ([MODEL, "other"], 2048)
        _, _, content = await cluster.http_get("/v1/models")
        assert [model["id"] for model in json.loads(content)["data"]] == [MODEL, "other"]
        _, _, answer = await cluster.post(
            "/v1/completions", {"model": "other", "prompt": "x", "max_tokens": 1}
        )
        assert answer["model"] == MODEL
        _, _, content = await cluster.http_get("/openapi.json")
        document = json.loads(content)
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/detokenize"):
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            name = schema["$ref"].removeprefix("#/components/schemas/")
            assert document["components"]["schemas"][name]["properties"]
        known = set(cluster.frontend._http._handlers)
        pages = {
            path
            for path in known
            if path == "/" or path.startswith("/page") or path.endswith((".js", ".css", ".svg"))
        }
        assert set(document["paths"]) == known - pages

    run(scenario, model_aliases=("other",))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 5000}, "max_output_tokens"),
        ("/v1/responses", {"input": "Hi " * 3000}, "input"),
        (
            "/v1/responses",
            {
                "input": "Hi",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}},
            },
            "text.format",
        ),
        (
            "/v1/messages",
            {**ASK, "output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}},
            "output_config.format",
        ),
    ],
)
def test_a_refused_field_has_the_name_that_it_was_sent_by(
    run: Any, path: str, body: dict[str, Any], param: str
) -> None:
    async def scenario(cluster: Any) -> None:
        status, _, answer = await cluster.post(path, {"model": MODEL, **body})
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["message"].startswith(f"{param}: ")

    run(scenario)
