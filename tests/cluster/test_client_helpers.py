"""Clients that nobody here wrote, with the helpers that their users call, against a real cluster and its model: answers
and calls of tools come back as typed values. The model is small, so the schemas leave it little to say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import pytest

from tests.cluster.harness import Cluster
from tests.lazily import Lazily

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic = Lazily("anthropic")
    openai = Lazily("openai")

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m-instruct"
TURNS: list[Any] = [{"role": "user", "content": "Which moon is it?"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": TURNS, "temperature": 0, "max_tokens": 60}
RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "input": "Which moon is it?",
    "temperature": 0,
    "max_output_tokens": 60,
}


class Moon(pydantic.BaseModel):
    phase: Literal["new", "half", "full"]
    age: Literal[1, 2, 3]


class LookUp(pydantic.BaseModel):
    """Look a moon up."""

    phase: Literal["new", "half", "full"]


def tool_of_lookups() -> Any:
    return openai.pydantic_function_tool(LookUp)


@pytest.fixture
def cluster(small: Cluster) -> Cluster:
    """It is left whole."""
    return small


@pytest.fixture
def client(cluster: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0, timeout=300)


async def test_chats_are_parsed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.parse(**ASKED, response_format=Moon)
    moon = whole.choices[0].message.parsed
    assert isinstance(moon, Moon)
    async with client.chat.completions.stream(**ASKED, response_format=Moon) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.parsed == moon
    assert {"content.delta", "content.done"} <= kinds


async def test_tools_are_called_with_typed_arguments(client: openai.AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "LookUp"}}
    choices: tuple[Any, ...] = ("required", named)
    for choice in choices:
        whole = await client.chat.completions.parse(**ASKED, tools=[tool_of_lookups()], tool_choice=choice)
        (call,) = whole.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, LookUp)
    async with client.chat.completions.stream(
        **ASKED, tools=[tool_of_lookups()], tool_choice="required"
    ) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_completion()
    (call,) = streamed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, LookUp)
    assert "tool_calls.function.arguments.done" in kinds


async def test_responses_are_parsed(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.parse(**RESPONSE, text_format=Moon)
    assert isinstance(whole.output_parsed, Moon)
    async with client.responses.stream(**RESPONSE, text_format=Moon) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_response()
    assert streamed.output_parsed == whole.output_parsed
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    tool: Any = {"type": "function", **tool_of_lookups()["function"]}
    called = await client.responses.parse(**RESPONSE, tools=[tool], tool_choice="required")
    assert [item.type for item in called.output] == ["function_call"]


# One prefill worker is a queue that the one decode worker keeps up with: nobody is refused for want of room.
@pytest.mark.usefixtures("one_prefill_worker")
async def test_fifty_streams_at_once_are_each_whole(client: openai.AsyncOpenAI) -> None:
    async def one(number: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=f"Moon number {number % 5}", max_tokens=3, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    texts = await asyncio.gather(*map(one, range(50)))
    assert all(texts)
    for number in range(5):
        assert len(set(texts[number::5])) == 1, "exact numerics: the same prompt has the same answer"


async def test_anthropics_client_streams_and_calls_tools(cluster: Cluster) -> None:
    client = anthropic.AsyncAnthropic(base_url=cluster.http, api_key="none", max_retries=0, timeout=300)
    greedy = {"temperature": 0}  # which this client has no argument for
    asked: dict[str, Any] = {"model": MODEL, "messages": TURNS, "max_tokens": 60, "extra_body": greedy}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        text = "".join([part async for part in stream.text_stream])
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    tool: Any = {"name": "LookUp", "input_schema": LookUp.model_json_schema()}
    called = await client.messages.create(
        **asked, tools=[tool], tool_choice={"type": "tool", "name": "LookUp"}
    )
    (block,) = called.content
    assert block.type == "tool_use"
    LookUp.model_validate(block.input)
    assert called.stop_reason == "tool_use"
