"""Every field of the API, wrong in every way: refused with the status and the field's name, on both edges
alike.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.schemas.api.bodies import ChatBody, CompletionBody
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest, parse_chat, parse_completion
from tests.api_fields import CHATS, FIELDS, NO_JSON, PROMPTS
from tests.lengths import examples

API = Path(__file__).parents[2] / "docs" / "api.md"


def refusal(body: Any, read: Any = parse_completion) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(orjson.dumps(body) if not isinstance(body, bytes) else body)
    return caught.value


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(name: str) -> None:
    refused, taken = FIELDS[name]
    for value in refused:
        for base, read in (
            ({"prompt": "x"}, parse_completion),
            ({"messages": [{"role": "user", "content": "x"}]}, parse_chat),
        ):
            # The standard library's encoder also writes integers that orjson refuses.
            error = refusal(json.dumps({**base, name: value}).encode(), read)
            assert error.status == 400, (name, value)
            assert error.param is not None, (name, value)
            assert error.param.partition(".")[0] == name
            assert name in error.message
    for value in taken:
        parse_completion(orjson.dumps({"prompt": "x", name: value}))


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_every_field_is_in_the_document(body: Any) -> None:
    text = API.read_text()
    names = [field.name for field in msgspec.structs.fields(body)]
    assert [name for name in names if not re.search(rf"`{name}\b", text)] == []


@pytest.mark.parametrize(("prompt", "status"), PROMPTS)
def test_a_wrong_prompt_is_refused_by_name(prompt: Any, status: int) -> None:
    error = refusal({"prompt": prompt})
    assert (error.status, error.param) == (status, "prompt")


@pytest.mark.parametrize("messages", CHATS)
def test_wrong_messages_are_refused_by_name(messages: Any) -> None:
    error = refusal({"messages": messages}, parse_chat)
    assert (error.status, error.param) == (400, "messages")


@pytest.mark.parametrize("payload", NO_JSON)
def test_what_is_no_json_is_refused_as_such(payload: bytes) -> None:
    error = refusal(payload)
    assert (error.status, error.code) == (400, "invalid_json")


@pytest.mark.parametrize("payload", [b"null", b"[]", b'"text"', b"5"])
def test_what_is_no_object_is_refused(payload: bytes) -> None:
    assert refusal(payload).status == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"prompt": "x", "top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(body: Any, param: str) -> None:
    error = refusal(body)
    assert (error.status, error.param) == (400, param)


def test_numbers_out_of_floats_range_are_refused() -> None:
    assert refusal(b'{"prompt": "x", "temperature": 1e999}').param == "temperature"


def test_unknown_fields_are_ignored_and_absent_ones_have_their_defaults() -> None:
    ask = parse_completion(b'{"prompt": "x", "wings": {"left": [1]}, "temperature": null}')
    assert (ask.prompt.text, ask.max_tokens, ask.answer.stream, ask.sampling.temperature) == (
        "x",
        None,
        False,
        1.0,
    )
    assert ask.sampling.logprobs == -1


def test_seeds_differ_unless_given() -> None:
    asks = [parse_completion(b'{"prompt": "x"}') for _ in range(8)]
    assert len({ask.sampling.seed for ask in asks}) == 8
    assert parse_completion(b'{"prompt": "x", "seed": 7}').sampling.seed == 7


def outcome(read: Any, payload: bytes) -> ApiRequest | ApiError:
    try:
        ask: ApiRequest = read(payload)
    except ApiError as error:
        return error
    return ask


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from([*FIELDS, "prompt", "messages", "max_completion_tokens"])
bodies = st.dictionaries(names, json_values, max_size=6)


@settings(max_examples=examples(300), deadline=None)
@given(body=bodies)
def test_any_json_object_is_taken_or_refused_with_a_body_that_is_json(body: dict[str, Any]) -> None:
    payload = json.dumps(body).encode()
    for read in (parse_completion, parse_chat):
        answer = outcome(read, payload)
        if isinstance(answer, ApiError):
            assert answer.status in (400, 422)
            assert set(orjson.loads(answer.body())["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=examples(300), deadline=None)
@given(payload=st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(payload: bytes) -> None:
    for read in (parse_completion, parse_chat):
        with pytest.raises(ApiError):
            read(payload)


@pytest.mark.pure
@pytest.mark.realtime
def test_both_edges_refuse_alike(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        wrong = [
            ({"prompt": "x", name: value}, 400, name)
            for name, (values, _) in FIELDS.items()
            for value in values[:1]
        ]
        wrong += [
            ({"prompt": "x", "model": "gpt-9"}, 404, "model"),
            ({"prompt": ""}, 400, "prompt"),
            ({"prompt": []}, 400, "prompt"),
            ({"prompt": [10**6]}, 400, "prompt"),
            ({"prompt": "x", "max_tokens": 4096}, 400, "max_tokens"),
            ({"prompt": [7] * 2048}, 400, "prompt"),
        ]
        for body, status, param in wrong:
            payload = json.dumps(body).encode()
            http_status, _, http_body = await cluster.post("/v1/completions", payload)
            headers, nats_body = await cluster.ask("generate", payload)
            assert (http_status, http_body["error"]["param"].partition(".")[0]) == (status, param), body
            assert nats_body == http_body
            assert headers["Nats-Service-Error-Code"] == str(status)
            assert headers["Nats-Service-Error"].startswith(http_body["error"]["message"][:20])
        assert not cluster.double.events or all(
            type(event).__name__ in ("FrontendJoined", "FrontendHeartbeat") for event in cluster.double.events
        )

    run(scenario)


@pytest.mark.pure
@pytest.mark.realtime
def test_large_and_odd_bodies_over_http(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        status, _, body = await cluster.post("/v1/completions", orjson.dumps({"prompt": "x" * (3 << 20)}))
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        words = "word " * 400_000
        status, _, body = await cluster.post("/v1/completions", orjson.dumps({"prompt": words}))
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        packed = gzip.compress(b'{"prompt": "x", "max_tokens": 3}')
        status, _, body = await cluster.post("/v1/completions", packed, headers={"content-encoding": "gzip"})
        assert status == 200
        bomb = gzip.compress(b" " * (64 << 20))
        status, _, body = await cluster.post("/v1/completions", bomb, headers={"content-encoding": "gzip"})
        assert status in (400, 413)

    run(scenario)


@pytest.mark.pure
def test_token_ids_are_some_and_of_the_vocabulary(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        size = cluster.frontend.registry.tokenizer.vocab_size
        told = {}
        for name, ids in {"last": [1, size - 1], "beyond": [size, 1], "none": [], "mixed": [1, "x"]}.items():
            status, _, answer = await cluster.post("/v1/completions", {"prompt": ids, "max_tokens": 1})
            told[name] = status, answer.get("error", {}).get("code")
        assert told == {
            "last": (200, None),
            "beyond": (400, "invalid"),
            "none": (400, "empty"),
            "mixed": (400, "invalid"),
        }

    run(scenario)
