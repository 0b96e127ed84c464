"""A stream that has nothing to say sends comments, which clients pass over; a refusal is still a status."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from frontend_double import ANSWER, MODEL, Cluster, Double

from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.frontend.edges.http_answer import COMMENT
from tests.eventually import eventually
from tests.lazily import Lazily

anthropic: Any = Lazily("anthropic")
openai: Any = Lazily("openai")

#: Each wait for the worker is longer than some of these.
PAUSE_S = 0.005
CHAT = [{"role": "user", "content": "Hello"}]
ASKS = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 100}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 100}),
    ("/v1/messages", {"model": MODEL, "messages": CHAT, "max_tokens": 100}),
    ("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 100}),
]


class Held:
    """Workers that stand still before the first token, and once more after it, until they are let go on."""

    def __init__(self, cluster: Cluster, *, fails: bool = False) -> None:
        self.go_on = [asyncio.Event(), asyncio.Event()]
        self._fails = fails
        cluster.double.script = self._answer

    async def _answer(self, double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        await self.go_on[0].wait()
        if self._fails:
            await double.reject(arrived, seq, reason="decode_refused", message="no room")
            return
        ids = double.answer_ids
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, ids[:1]))
        await self.go_on[1].wait()
        await double.deliver(double.delivery(arrived, f"{seq}-0", 1, ids[1:], "stop"))


async def comments(response: Any, count: int) -> list[bytes]:
    """The lines up to the comment of that number."""
    lines: list[bytes] = []
    while lines.count(COMMENT[:-1]) < count:
        lines.append(await response.content.readline())
        assert lines[-1], lines
    return lines


@pytest.mark.parametrize(("path", "body"), ASKS, ids=[path for path, _ in ASKS])
def test_comments_stand_where_there_is_nothing_to_say(run: Any, path: str, body: Any) -> None:
    async def scenario(cluster: Cluster) -> None:
        held = Held(cluster)
        async with cluster.http.post(cluster.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            before = await comments(response, 3)
            assert set(before) == {b"\n", COMMENT[:-1]}
            held.go_on[0].set()
            while not (line := await response.content.readline()).startswith(b"data: "):
                pass
            between = await comments(response, 3)
            held.go_on[1].set()
            rest = await response.read()
        told = line + b"".join(between) + rest
        events = [each for each in told.decode().split("\n\n") if each.strip() and not each.startswith(":")]
        assert "Half" in "".join(events)
        assert not any(": still" in each for each in events), "a comment stands alone"

    run(scenario, sse_comment_s=PAUSE_S)


def test_the_clients_that_people_use_pass_over_comments(run: Any) -> None:
    async def scenario(cluster: Cluster) -> None:
        held = Held(cluster)
        url, messages = cluster.url, [{"role": "user", "content": "Hello"}]
        openai_client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        ask: Any = {"model": MODEL, "messages": messages, "max_tokens": 100}
        # It has its status with the first comment: there is no token yet.
        stream = await openai_client.chat.completions.create(**ask, stream=True)
        held.go_on[0].set()
        text = (await anext(aiter(stream))).choices[0].delta.content or ""
        held.go_on[1].set()
        text += "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == ANSWER
        await openai_client.close()

        held = Held(cluster)
        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        texts = await client.messages.create(**ask, stream=True)
        for each in held.go_on:
            each.set()
        deltas = [event.delta async for event in texts if event.type == "content_block_delta"]
        assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == ANSWER
        await client.close()

    run(scenario, sse_comment_s=PAUSE_S)


@pytest.mark.pure
def test_a_request_that_waits_for_a_worker_is_refused_with_a_status(run: Any) -> None:
    asked = asyncio.Event()
    refuse = asyncio.Event()

    async def waits(double: Double, seq: int, arrived: RequestArrived) -> None:
        asked.set()
        await refuse.wait()
        await double.reject(arrived, seq, reason="no_worker", message="none came", retry_after_ns=1_000_000)

    async def scenario(cluster: Cluster) -> None:
        cluster.double.script = waits
        for path, body in ASKS:
            asked.clear()
            refuse.clear()
            answer = asyncio.ensure_future(cluster.post(path, {**body, "stream": True}))
            await asked.wait()
            (request,) = cluster.frontend.registry.requests.values()
            quiet: Any = request.listener
            quiet = getattr(quiet, "_answer", quiet)
            first = quiet._waiter
            await eventually(
                lambda of=quiet, it=first: of._waiter is not it, "a pause has gone by", every_s=0.01
            )
            refuse.set()
            status, headers, _ = await answer
            assert (status, headers["retry-after-ms"]) == (503, "1"), path

    run(scenario, sse_comment_s=PAUSE_S)


@pytest.mark.pure
def test_what_fails_behind_a_comment_is_an_event(run: Any) -> None:
    async def scenario(cluster: Cluster) -> None:
        for path, body in ASKS:
            held = Held(cluster, fails=True)
            async with cluster.http.post(cluster.url + path, json={**body, "stream": True}) as response:
                await comments(response, 1)
                held.go_on[0].set()
                rest = (await response.read()).decode()
            (told,) = [line for line in rest.splitlines() if line.startswith("data: ")]
            assert "no room" in told, path
            assert json.loads(told.removeprefix("data: "))

    run(scenario, sse_comment_s=PAUSE_S)


@pytest.mark.pure
def test_without_a_pause_there_are_no_comments(run: Any) -> None:
    async def scenario(cluster: Cluster) -> None:
        for path, body in ASKS:
            async with cluster.http.post(cluster.url + path, json={**body, "stream": True}) as response:
                assert COMMENT not in await response.read()

    run(scenario, sse_comment_s=0)
