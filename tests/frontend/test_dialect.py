"""What clients of vLLM and of OpenAI send and look for, one cluster for all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from frontend_double import ANSWER, MODEL

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest, parse_chat, parse_completion
from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.model.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hi <|im_end|>"}]


def events_of(stream: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.pure
@pytest.mark.realtime
def test_what_vllm_answers_is_answered(run: Any, tokenizer: Tokenizer) -> None:
    async def streamed(cluster: Any, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
        async with cluster.http.post(cluster.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            return response.headers, events_of(await response.read())

    async def the_last_chunk_has_text_and_reason(cluster: Any) -> None:
        """Load generators count a chunk without text as a token that took no time."""
        _, chunks = await streamed(cluster, "/v1/completions", {"prompt": "Once", "max_tokens": 3})
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        assert texts == ["Half", " moons", ":"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
        assert chunks[-1]["timing_ms"]["ttft"] > 0
        _, chunks = await streamed(cluster, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "Half"}, {"content": " moons"}]

    async def token_ids_are_returned(cluster: Any) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 2, "return_token_ids": True}
        expected = tokenizer.encode(ANSWER)[:2]
        _, _, answer = await cluster.post("/v1/completions", body)
        (choice,) = answer["choices"]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == (expected, [1, 2, 3])
        _, chunks = await streamed(cluster, "/v1/completions", body)
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[expected[0]], [expected[1]]]
        told = [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
        assert told == [[1, 2, 3], None]
        chat = {"messages": CHAT, "max_tokens": 2, "return_token_ids": True}
        _, _, answer = await cluster.post("/v1/chat/completions", chat)
        prompt_ids = tokenizer.encode_chat(CHAT)
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt_ids, expected)
        _, chunks = await streamed(cluster, "/v1/chat/completions", chat)
        assert chunks[0]["prompt_token_ids"] == prompt_ids
        assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [
            None,
            *([one] for one in expected),
        ]

    async def a_request_keeps_the_name_that_its_client_gave(cluster: Any) -> None:
        named, body = {"x-request-id": "mine/7"}, {"prompt": "Once", "max_tokens": 1}
        for path, content in (("/v1/completions", body), ("/v1/completions", {**body, "max_tokens": 0})):
            _, headers, _ = await cluster.post(path, content, headers=named)
            assert headers["x-request-id"] == "mine/7"
        _, headers, answer = await cluster.post("/v1/completions", body, headers={"x-request-id": "a b"})
        assert headers["x-request-id"] == answer["id"].removeprefix("cmpl-")

    async def one_model_is_found_by_its_name(cluster: Any) -> None:
        status, _, content = await cluster.http_get(f"/v1/models/{MODEL}")
        assert (status, json.loads(content)["id"]) == (200, MODEL)
        status, _, content = await cluster.http_get("/v1/models/meta/llama")
        assert (status, json.loads(content)["error"]["code"]) == (404, "model_not_found")

    async def control_tokens_of_a_completion_are_read_and_those_of_a_chat_are_not(cluster: Any) -> None:
        begin, end = tokenizer.control["<|im_start|>"], tokenizer.control["<|im_end|>"]
        ask = {"prompt": "<|im_start|>user", "return_token_strs": True}
        _, _, answer = await cluster.post("/tokenize", ask)
        assert (answer["tokens"][0], answer["count"]) == (begin, 2)
        assert answer["token_strs"] == ["<|im_start|>", "user"]
        _, _, answer = await cluster.post("/tokenize", {"messages": CHAT})
        assert answer["tokens"].count(end) == tokenizer.encode_chat(
            [{"role": "user", "content": "Hi"}]
        ).count(end)
        assert answer["token_strs"] is None
        await cluster.post("/v1/completions", {"prompt": "<|im_start|>user", "max_tokens": 1})
        assert arrived(cluster).prompt_tokens == 2

    async def a_chat_may_fill_the_context_and_a_completion_has_sixteen_tokens(cluster: Any) -> None:
        await cluster.post("/v1/chat/completions", {"messages": CHAT})
        chat = arrived(cluster)
        assert chat.max_tokens == 2048 - chat.prompt_tokens
        await cluster.post("/v1/completions", {"prompt": "Once"})
        assert arrived(cluster).max_tokens == 16

    async def a_prompt_is_cut_from_the_left(cluster: Any) -> None:
        body = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 1, "return_token_ids": True}
        _, _, answer = await cluster.post("/v1/completions", {**body, "truncate_prompt_tokens": 2})
        assert answer["choices"][0]["prompt_token_ids"] == [4, 5]
        longer = {**body, "prompt": [7] * 3000, "truncate_prompt_tokens": -1}
        assert (await cluster.post("/v1/completions", longer))[0] == 200
        assert arrived(cluster).prompt_tokens == 2047
        for wrong in (0, 2049):
            status, _, answer = await cluster.post(
                "/v1/completions", {**body, "truncate_prompt_tokens": wrong}
            )
            assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")

    async def a_smaller_priority_is_earlier(cluster: Any) -> None:
        for asked, within in ((5, -5), (-3, 3), (10**6, -1000), (None, 0)):
            await cluster.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "priority": asked})
            assert arrived(cluster).priority == within

    async def who_should_come_again_is_told_so(cluster: Any) -> None:
        for after_ns, expected in ((2_000_000, ("true", "1", "2")), (0, ("false", None, None))):

            async def reject(double: Any, seq: int, request: RequestArrived, wait_ns: int = after_ns) -> None:
                await double.reject(
                    request, seq, reason="ttft_slo", message="too slow", retry_after_ns=wait_ns
                )

            cluster.double.script = reject
            _, headers, _ = await cluster.post("/v1/completions", {"prompt": "x"})
            names = ("x-should-retry", "retry-after", "retry-after-ms")
            assert tuple(headers.get(name) for name in names) == expected

    def arrived(cluster: Any) -> RequestArrived:
        return next(e for e in reversed(cluster.double.events) if isinstance(e, RequestArrived))

    async def scenario(cluster: Any) -> None:
        await the_last_chunk_has_text_and_reason(cluster)
        await token_ids_are_returned(cluster)
        await a_request_keeps_the_name_that_its_client_gave(cluster)
        await one_model_is_found_by_its_name(cluster)
        await control_tokens_of_a_completion_are_read_and_those_of_a_chat_are_not(cluster)
        await a_chat_may_fill_the_context_and_a_completion_has_sixteen_tokens(cluster)
        await a_prompt_is_cut_from_the_left(cluster)
        await a_smaller_priority_is_earlier(cluster)
        await who_should_come_again_is_told_so(cluster)

    run(scenario)


def refusal(read: Any, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(json.dumps(body).encode())
    return caught.value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 2}, "best_of: only what n says is supported"),
        ({"functions": [{}]}, "functions is not supported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template is not supported"),
        ({"add_special_tokens": True}, "add_special_tokens is not supported in chats: the template has them"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    error = refusal(parse_chat, {"messages": CHAT, **fields})
    assert (error.status, error.message, error.param) == (400, message, next(iter(fields)))
    assert error.code == "unsupported"


def test_older_calls_in_messages_are_refused_and_names_are_read() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
    error = refusal(parse_chat, {"messages": [called]})
    assert error.message == "messages[0].function_call is not supported"
    named = parse_chat(json.dumps({"messages": [{"role": "user", "content": "x", "name": "Ada"}]}).encode())
    assert named.prompt.messages == [{"role": "user", "content": "x", "name": "Ada"}]


def test_switches_of_a_template_cannot_carry_control_tokens() -> None:
    def read(**switches: Any) -> ApiRequest:
        return parse_chat(json.dumps({"messages": CHAT, "chat_template_kwargs": switches}).encode())

    switches = {"enable_thinking": False, "level": 3, "style": "low", "none": None}
    assert read(**switches).prompt.rendering.switches == switches
    for wrong in (
        {"style": "<|im_end|>"},
        {"messages": 1},
        {"bos_token": "x"},
        {"deep": {"a": 1}},
        {"x": "y" * 65},
    ):
        error = refusal(parse_chat, {"messages": CHAT, "chat_template_kwargs": wrong})
        assert (error.status, error.param) == (400, "chat_template_kwargs"), wrong
    effort = parse_chat(json.dumps({"messages": CHAT, "reasoning_effort": "low"}).encode())
    assert effort.prompt.rendering.switches == {"reasoning_effort": "low"}


def test_a_chat_may_go_on_with_its_last_message(tokenizer: Tokenizer) -> None:
    body = {"messages": CHAT, "continue_final_message": True}
    assert refusal(parse_chat, body).param == "continue_final_message"
    ask = parse_chat(json.dumps({**body, "add_generation_prompt": False}).encode())
    assert ask.prompt.rendering.continue_final
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Half a <|im_end|> moon "},
    ]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final=True)
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
    end = tokenizer.control["<|im_end|>"]
    assert whole.count(end) == ids.count(end) + 1
    assert tokenizer.decode(ids).endswith("Half a <|im_end|> moon ")
    assert tokenizer.encode_chat(messages) != whole, "by default the answer's own turn is begun"


def test_a_stop_string_may_be_part_of_the_answer() -> None:
    ask = parse_completion(b'{"prompt": "x", "stop": "STOP", "include_stop_str_in_output": true}')
    assert ask.answer.include_stop
    assert not parse_completion(b'{"prompt": "x", "stop": "STOP"}').answer.include_stop
