"""Several choices and several prompts in one answer over HTTP, each a request of its own to the cluster."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from frontend_double import ANSWER, Double, whole_answer

from halfmoon.schemas.events import RequestArrived, RequestCancelled
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.eventually import eventually

#: More than one block of the double's layout.
LONG = [7] * 40


def chunks_of(stream: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def arrivals(cluster: Any) -> list[RequestArrived]:
    return [event for event in cluster.double.events if isinstance(event, RequestArrived)]


@pytest.mark.pure
def test_choices_and_prompts_share_an_answer(run: Any, tokenizer: Tokenizer) -> None:
    texts = [tokenizer.decode(tokenizer.encode(ANSWER)[:count]) for count in range(4)]

    async def streamed(cluster: Any, body: dict[str, Any]) -> list[Any]:
        async with cluster.http.post(
            cluster.url + body.pop("path", "/v1/completions"), json={**body, "stream": True}
        ) as response:
            assert response.status == 200, await response.text()
            return chunks_of(await response.read())

    async def every_prompt_has_its_choices(cluster: Any) -> None:
        body = {"prompt": ["One", [1, 2, 3]], "n": 2, "max_tokens": 3, "seed": 5}
        status, _, answer = await cluster.post("/v1/completions", body)
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"]] == [texts[3]] * 4
        assert all(choice["timing_ms"]["ttft"] > 0 for choice in answer["choices"])
        own = len(tokenizer.encode("One")) + 3
        assert {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")} == {
            "prompt_tokens": own,
            "completion_tokens": 12,
        }
        status, _, answer = await cluster.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 3, "max_tokens": 1}
        )
        assert [choice["message"]["content"] for choice in answer["choices"]] == [texts[1]] * 3

    async def a_stream_tells_which_choice_it_is(cluster: Any) -> None:
        body: dict[str, Any] = {"prompt": ["a", "b"], "n": 2, "max_tokens": 2}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await streamed(cluster, body)
        *chunks, last = chunks
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
        assert len({chunk["id"] for chunk in chunks}) == 1
        for index in range(4):
            own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(chunk["choices"][0]["text"] for chunk in own) == texts[2]
            assert [chunk["usage"]["completion_tokens"] for chunk in own] == [1, 2]
            assert [chunk["choices"][0]["finish_reason"] for chunk in own] == [None, "length"]

    async def further_choices_wait_for_the_first_ones_blocks(cluster: Any) -> None:
        before = len(arrivals(cluster))
        gate = asyncio.Event()

        async def gated(double: Double, seq: int, arrived: RequestArrived) -> None:
            await gate.wait()
            await whole_answer(double, seq, arrived)

        cluster.double.script = gated
        asked = asyncio.ensure_future(
            cluster.post("/v1/completions", {"prompt": LONG, "n": 3, "max_tokens": 2})
        )
        await eventually(lambda: len(arrivals(cluster)) > before, "the first choice is in the log")
        later = asyncio.ensure_future(cluster.post("/v1/completions", {"prompt": "Once", "max_tokens": 1}))
        await eventually(lambda: len(arrivals(cluster)) > before + 1, "and a request that came later")
        *ours, other = arrivals(cluster)[before:]
        assert (len(ours), other.max_tokens) == (1, 1)
        gate.set()
        status, _, answer = await asked
        assert (status, len(answer["choices"])) == (200, 3)
        assert (await later)[0] == 200
        ours = [arrived for arrived in arrivals(cluster)[before:] if arrived.max_tokens == 2]
        assert len(ours) == 3
        assert len({arrived.block_keys for arrived in ours}) == 1
        cluster.double.script = whole_answer

    async def a_prompt_is_echoed(cluster: Any) -> None:
        body = {"prompt": "Say <b>", "echo": True, "max_tokens": 2}
        _, _, answer = await cluster.post("/v1/completions", body)
        assert answer["choices"][0]["text"] == "Say <b>" + texts[2]
        streamed_texts = [chunk["choices"][0]["text"] for chunk in await streamed(cluster, dict(body))]
        assert streamed_texts[0] == "Say <b>" + texts[1]
        assert "".join(streamed_texts) == "Say <b>" + texts[2]
        ids = tokenizer.encode("Say it")
        _, _, answer = await cluster.post("/v1/completions", {**body, "prompt": ids})
        assert answer["choices"][0]["text"] == "Say it" + texts[2]

    async def what_makes_no_sense_is_refused(cluster: Any) -> None:
        async def silent(double: Double, seq: int, arrived: RequestArrived) -> None:
            """The first prompt's request is cancelled when the second is refused."""

        cluster.double.script = silent
        for body, param in (
            ({"prompt": "x", "n": 2, "temperature": 0}, "n"),
            ({"prompt": "x", "n": 1, "best_of": 2}, "best_of"),
            ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
            ({"prompt": ["x", [10**6]]}, "prompt"),
        ):
            status, _, answer = await cluster.post("/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, param)
        _, told = await cluster.ask("generate", {"prompt": ["a", "b"]})
        assert (told["error"]["code"], told["error"]["param"]) == ("unsupported", "prompt")
        assert not cluster.frontend.registry.requests

    async def one_that_fails_fails_all_and_nothing_goes_on(cluster: Any) -> None:
        async def second_is_refused(double: Double, seq: int, arrived: RequestArrived) -> None:
            if arrived.prompt_tokens == 2:
                await double.reject(arrived, seq, reason="queue_full", message="full", retry_after_ns=10**9)

        cluster.double.script = second_is_refused
        cancelled = len([each for each in cluster.double.events if isinstance(each, RequestCancelled)])
        status, headers, answer = await cluster.post("/v1/completions", {"prompt": [[1], [1, 2], [3]]})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")
        await cluster.double.wait_for(RequestCancelled, cancelled + 2)
        assert not cluster.frontend.registry.requests
        cluster.double.script = whole_answer

    async def scenario(cluster: Any) -> None:
        for part in (
            every_prompt_has_its_choices,
            a_stream_tells_which_choice_it_is,
            further_choices_wait_for_the_first_ones_blocks,
            a_prompt_is_echoed,
            what_makes_no_sense_is_refused,
            one_that_fails_fails_all_and_nothing_goes_on,
        ):
            await part(cluster)

    run(scenario)
