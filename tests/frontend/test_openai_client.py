"""OpenAI's client: its errors, what it does again by itself, many streams at once, and leaving one."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from frontend_double import ANSWER, MODEL, whole_answer

from halfmoon.schemas.events import RequestArrived, RequestCancelled

STREAMS = 50


def client_of(cluster: Any, *, retries: int = 0, key: str = "k") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=retries)


async def silent(double: Any, seq: int, arrived: RequestArrived) -> None:
    """A worker that has not begun."""


async def said(stream: Any) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


def test_every_refusal_is_an_error_of_its_own(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        ask: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
        async with client_of(cluster) as client, client_of(cluster, key="no") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.completions.create(**ask)
            with pytest.raises(openai.PermissionDeniedError):
                await client.completions.create(**ask, extra_body={"tenant": "other"})
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(**{**ask, "model": "gpt-9"})
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(**ask, temperature=9)
            assert (bad.value.param, bad.value.code) == ("temperature", "invalid")
            cluster.double.script = silent
            named = {"extra_body": {"request_id": "mine"}}
            first = asyncio.create_task(client.completions.create(**ask, **named))
            await cluster.double.wait_for(RequestArrived, 1)
            with pytest.raises(openai.UnprocessableEntityError) as again:
                await client.completions.create(**ask, **named)
            assert again.value.code == "request_id_in_use"
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.2).completions.create(**ask)
            first.cancel()

    run(scenario, api_keys={"k": "mine"})


@pytest.mark.parametrize(("retry_after_ns", "tries"), [(1_000_000, 3), (0, 1)])
def test_a_refusal_is_tried_again_where_it_says_when(run: Any, retry_after_ns: int, tries: int) -> None:
    """Without a time it would be the same again, and `x-should-retry` says so."""

    async def scenario(cluster: Any) -> None:
        async def refuse(double: Any, seq: int, arrived: RequestArrived) -> None:
            await double.reject(
                arrived, seq, reason="ttft_slo", message="not in time", retry_after_ns=retry_after_ns
            )

        cluster.double.script = refuse
        async with client_of(cluster, retries=2) as client:
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model=MODEL, prompt="Once")
        assert len(await cluster.double.wait_for(RequestArrived, tries)) == tries

    run(scenario)


def test_fifty_streams_at_once_are_each_whole(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        async def one(number: int) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=f"{number}", max_tokens=300, stream=True
            )
            return await said(stream)

        async with client_of(cluster) as client:
            assert await asyncio.gather(*map(one, range(STREAMS))) == [ANSWER] * STREAMS

    run(scenario)


def test_a_stream_that_is_left_is_cancelled_everywhere(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        async def begin(double: Any, seq: int, arrived: RequestArrived) -> None:
            await double.place(arrived, f"{seq}-0")
            await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:1]))

        cluster.double.script = begin
        async with client_of(cluster) as client:
            stream = await client.completions.create(model=MODEL, prompt="Once", max_tokens=9, stream=True)
            async for chunk in stream:
                assert chunk.choices[0].text
                break
            await stream.close()
            (cancelled,) = await cluster.double.wait_for(RequestCancelled)
            (arrived,) = await cluster.double.wait_for(RequestArrived)
            assert cancelled.request_id == arrived.request_id
            cluster.double.script = whole_answer
            again = await client.completions.create(model=MODEL, prompt="Once", max_tokens=300)
            assert again.choices[0].text == ANSWER

    run(scenario)
