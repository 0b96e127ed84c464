"""Anthropic's client: its errors, what it does again by itself, many streams at once, and leaving one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anthropic
import pytest
from frontend_double import (
    ANSWER,
    MODEL,
    begin,
    fail,
    fail_later,
    fail_once,
    refuse,
    refuse_once,
    silent,
    whole_answer,
)

from halfmoon.schemas.events import RequestArrived, RequestCancelled

STREAMS = 50
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def client_of(cluster: Any, *, retries: int = 0, key: str = "k") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=cluster.url, api_key=key, max_retries=retries)


def kind_of(error: anthropic.APIStatusError) -> Any:
    """What Anthropic's own errors say they are."""
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
    return error.body["error"]["type"]


def test_every_refusal_is_an_error_of_its_own(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        async with client_of(cluster) as client, client_of(cluster, key="no") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as error:
                await stranger.messages.create(**ASK)
            assert kind_of(error.value) == "authentication_error"
            with pytest.raises(anthropic.PermissionDeniedError) as denied:
                await client.messages.create(**ASK, extra_body={"tenant": "other"})
            assert kind_of(denied.value) == "permission_error"
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await client.messages.create(**{**ASK, "model": "claude-9"})
            assert kind_of(unknown.value) == "not_found_error"
            with pytest.raises(anthropic.BadRequestError) as bad:
                await client.messages.create(**ASK, extra_body={"temperature": 9})
            assert kind_of(bad.value) == "invalid_request_error"
            long = [{"role": "user", "content": "x" * (3 << 20)}]
            with pytest.raises(anthropic.APIStatusError) as large:
                await client.messages.create(**{**ASK, "messages": long})
            assert (large.value.status_code, kind_of(large.value)) == (413, "request_too_large")
            cluster.double.script = silent
            with pytest.raises(anthropic.APITimeoutError):
                await client.with_options(timeout=0.2).messages.create(**ASK)
            cluster.double.script = fail
            with pytest.raises(anthropic.InternalServerError) as failed:
                await client.messages.create(**ASK)
            assert (failed.value.status_code, kind_of(failed.value)) == (500, "api_error")
            cluster.frontend.registry.draining = True
            with pytest.raises(anthropic.InternalServerError) as stopping:
                await client.messages.create(**ASK)
            assert (stopping.value.status_code, kind_of(stopping.value)) == (503, "overloaded_error")
            await cluster.frontend._http.stop()
            with pytest.raises(anthropic.APIConnectionError):
                await client.messages.create(**ASK)

    run(scenario, api_keys={"k": "mine"})


@pytest.mark.parametrize(("retry_after_ns", "tries"), [(1_000_000, 3), (0, 1)])
def test_a_refusal_is_tried_again_where_it_says_when(run: Any, retry_after_ns: int, tries: int) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = refuse(retry_after_ns)
        async with client_of(cluster, retries=2) as client:
            with pytest.raises(anthropic.RateLimitError) as refused:
                await client.messages.create(**ASK)
        assert kind_of(refused.value) == "rate_limit_error"
        assert len(await cluster.double.wait_for(RequestArrived, tries)) == tries

    run(scenario)


def test_a_refusal_is_tried_again_when_it_says(run: Any) -> None:
    """And what has failed without a time, by the client's own."""

    async def scenario(cluster: Any) -> None:
        async with client_of(cluster, retries=1) as client:
            for script, least_s in ((refuse_once, 1.3), (fail_once, 0.0)):
                cluster.double.script = script
                began = time.monotonic()
                answer = await client.messages.create(**ASK)
                assert answer.content[0].text == "Half moons"
                assert time.monotonic() - began >= least_s
        assert len(await cluster.double.wait_for(RequestArrived, 4)) == 4

    run(scenario)


def test_what_fails_in_mid_stream_is_an_error_of_the_stream(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = fail_later
        async with client_of(cluster, retries=2) as client:
            async with client.messages.stream(**{**ASK, "max_tokens": 9}) as stream:
                assert await anext(stream.text_stream) == "Half"
                with pytest.raises(anthropic.APIStatusError, match="placed 3 times") as failed:
                    await anext(stream.text_stream)
            assert kind_of(failed.value) == "api_error"
        assert len(await cluster.double.wait_for(RequestArrived, 1)) == 1, "a stream is not begun twice"

    run(scenario)


def test_fifty_streams_at_once_are_each_whole(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        async def one(number: int) -> str:
            turns: Any = [{"role": "user", "content": f"{number}"}]
            async with client.messages.stream(model=MODEL, messages=turns, max_tokens=300) as stream:
                return await stream.get_final_text()

        async with client_of(cluster) as client:
            assert await asyncio.gather(*map(one, range(STREAMS))) == [ANSWER] * STREAMS

    run(scenario)


def test_a_stream_that_is_left_is_cancelled_everywhere(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.double.script = begin
        async with client_of(cluster) as client:
            async with client.messages.stream(**{**ASK, "max_tokens": 9}) as stream:
                async for text in stream.text_stream:
                    assert text == "Half"
                    break
            (cancelled,) = await cluster.double.wait_for(RequestCancelled)
            (arrived,) = await cluster.double.wait_for(RequestArrived)
            assert cancelled.request_id == arrived.request_id
            cluster.double.script = whole_answer
            answer = await client.messages.create(**{**ASK, "max_tokens": 300})
            assert answer.content[0].text == ANSWER

    run(scenario)
