"""OpenAI's client: its errors, what it does again by itself, many streams at once, and leaving one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pydantic
import pytest
from frontend_double import ANSWER, MODEL, FailsLater, fail, whole_answer

from halfmoon.schemas.events import RequestArrived, RequestCancelled
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.lazily import Lazily

if TYPE_CHECKING:
    import openai
else:
    openai = Lazily("openai")

STREAMS = 50
ASK: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 2}


class Moon(pydantic.BaseModel):
    """What an answer is to be."""

    phase: str


def client_of(cluster: Any, *, retries: int = 0, key: str = "k") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=retries)


async def silent(double: Any, seq: int, arrived: RequestArrived) -> None:
    """A worker that has not begun."""


async def said(stream: Any) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


@pytest.mark.pure
def test_every_refusal_is_an_error_of_its_own(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        ask = ASK
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
            # No class has this status for its own.
            with pytest.raises(openai.APIStatusError) as large:
                await client.completions.create(**{**ask, "prompt": "x" * (3 << 20)})
            assert (large.value.status_code, large.value.code) == (413, "body_too_large")

    run(scenario, api_keys={"k": "mine"})


@pytest.mark.pure
def test_what_is_not_the_clients_fault_has_errors_too(run: Any) -> None:
    """No request is ever in conflict with another (409): one whose name is taken is 422, as above."""

    async def scenario(cluster: Any) -> None:
        cluster.double.script = fail
        async with client_of(cluster) as client:
            with pytest.raises(openai.InternalServerError) as failed:
                await client.completions.create(**ASK)
            assert (failed.value.status_code, failed.value.code) == (500, "failed")
            with pytest.raises(openai.InternalServerError) as failed:
                await client.responses.create(model=MODEL, input="Hi")
            assert (failed.value.status_code, failed.value.code) == (500, "failed")
            cluster.frontend.registry.draining = True
            with pytest.raises(openai.InternalServerError) as stopping:
                await client.completions.create(**ASK)
            assert (stopping.value.status_code, stopping.value.code) == (503, "stopping")
            cluster.frontend.registry.draining = False
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0) as nobody:
            with pytest.raises(openai.APIConnectionError):
                await nobody.completions.create(**ASK)

    run(scenario)


@pytest.mark.pure
def test_what_fails_in_mid_stream_is_an_error_of_the_stream(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        async with client_of(cluster, retries=2) as client:
            cluster.double.script = script = FailsLater()
            stream = await client.completions.create(**{**ASK, "max_tokens": 9}, stream=True)
            assert (await anext(stream)).choices[0].text == "Half"
            script.seen.set()
            with pytest.raises(openai.APIError, match="placed 3 times") as failed:
                await anext(stream)
            assert failed.value.code == "failed"
            # A response's failure is an event, and the answer's status.
            cluster.double.script = script = FailsLater()
            async for event in await client.responses.create(model=MODEL, input="Hi", stream=True):
                if event.type == "response.output_text.delta":
                    script.seen.set()
            assert (event.type, event.response.status) == ("response.failed", "failed")
            assert event.response.error is not None
            assert "placed 3 times" in event.response.error.message
        assert len(await cluster.double.wait_for(RequestArrived, 2)) == 2, "a stream is not begun twice"

    run(scenario)


@pytest.mark.pure
def test_a_clients_classes_take_log_probabilities_of_a_prompt(run: Any, tokenizer: Tokenizer) -> None:
    """As those who measure models ask for them; what OpenAI does not know is among a class's further fields."""
    count = len(tokenizer.encode("Once upon a time"))

    async def scenario(cluster: Any) -> None:
        ask: dict[str, Any] = {**ASK, "prompt": "Once upon a time", "echo": True, "logprobs": 1}
        async with client_of(cluster) as client:
            (choice,) = (await client.completions.create(**ask)).choices
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == [None, *[-9.5] * (count - 1), -0.5, -0.5]
            assert "".join(choice.logprobs.tokens or []) == choice.text
            streamed = [chunk async for chunk in await client.completions.create(**ask, stream=True)]
            first = streamed[0].choices[0].logprobs
            assert first is not None
            assert first.token_logprobs == [None, *[-9.5] * (count - 1), -0.5]
            chat = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=1,
                extra_body={"prompt_logprobs": 0},
            )
            assert chat.usage is not None
            assert chat.model_extra is not None
            assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(**ASK, stream=True, extra_body={"prompt_logprobs": 1})
            assert bad.value.param == "prompt_logprobs"

    run(scenario)


@pytest.mark.pure
def test_an_answer_that_was_cut_is_no_object(run: Any) -> None:
    """OpenAI's helper says that the length ended it, and not that its JSON is broken."""

    async def scenario(cluster: Any) -> None:
        async with client_of(cluster) as client:
            with pytest.raises(openai.LengthFinishReasonError):
                await client.chat.completions.parse(
                    model=MODEL,
                    messages=[{"role": "user", "content": "Hi"}],
                    max_tokens=2,
                    response_format=Moon,
                )

    run(scenario)


@pytest.mark.pure
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


@pytest.mark.pure
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


@pytest.mark.pure
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
