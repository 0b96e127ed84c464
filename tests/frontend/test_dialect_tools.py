"""Tools and thoughts in Anthropic's messages and OpenAI's responses, by their own clients."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic
import pytest
from frontend_double import MODEL, Double

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.messages import parse_messages
from halfmoon.schemas.api.requests import ApiRequest, parse_chat
from halfmoon.schemas.api.responses import parse_responses
from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.lazily import Lazily

anthropic: Any = Lazily("anthropic")
openai: Any = Lazily("openai")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASK = "Weather in Rome?"
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "R\\"}o{me"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>{"name": "time_of", "arguments": {}}</tool_call>'
ROME = {"city": 'R"}o{me'}
ANTHROPIC_TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather", "input_schema": SCHEMA},
    {"name": "time_of", "input_schema": {"type": "object"}},
]
OPENAI_TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "The weather", "parameters": SCHEMA},
    {"type": "function", "name": "time_of", "parameters": {"type": "object"}},
]


class Says:
    """The double's script: answers with the next of `texts`, a token at a time. `reason`: how they end."""

    def __init__(self, tokenizer: Tokenizer, reason: str = "stop") -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []
        self.reason = reason

    async def __call__(self, double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        ids = self._tokenizer.encode(self.texts.pop(0)) + ([double.eos] if self.reason == "stop" else [])
        for index, token in enumerate(ids):
            reason = self.reason if index == len(ids) - 1 else ""
            await double.deliver(double.delivery(arrived, f"{seq}-0", index, [token], reason))


@pytest.mark.pure
def test_anthropics_client_calls_tools(run: Any, tokenizer: Tokenizer) -> None:
    says = Says(tokenizer)
    ask: Any = {
        "model": MODEL,
        "max_tokens": 300,
        "messages": [{"role": "user", "content": ASK}],
        "tools": ANTHROPIC_TOOLS,
    }

    async def scenario(cluster: Any) -> None:
        cluster.double.script = says
        async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="k", max_retries=0) as client:
            says.texts = ["I look. " + TWO]
            answer = await client.messages.create(**ask)
            assert answer.stop_reason == "tool_use"
            text, *calls = answer.content
            assert text.text == "I look. "
            assert [(call.name, call.input) for call in calls] == [("weather", ROME), ("time_of", {})]
            turns = [*ask["messages"], {"role": "assistant", "content": answer.model_dump()["content"]}]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": f"{number}"}
                for number, call in enumerate(calls)
            ]
            turns.append({"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]})
            says.texts = ["Warm."]
            answer = await client.messages.create(**{**ask, "messages": turns})
            assert (answer.content[0].text, answer.stop_reason) == ("Warm.", "end_turn")
            says.texts = ["I look. " + TWO]
            async with client.messages.stream(**ask) as stream:
                kinds = [event.type async for event in stream]
                last = await stream.get_final_message()
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
            assert (last.stop_reason, [block.type for block in last.content]) == (
                "tool_use",
                ["text", "tool_use", "tool_use"],
            )
            assert (last.content[1].input, last.content[2].input) == (ROME, {})
            # Of a named tool the model writes the arguments alone.
            says.texts = ['{"city": "Rome"}']
            answer = await client.messages.create(**ask, tool_choice={"type": "tool", "name": "weather"})
            assert (answer.stop_reason, answer.content[0].input) == ("tool_use", {"city": "Rome"})
            with pytest.raises(anthropic.BadRequestError, match="is no function with an input_schema"):
                await client.messages.create(
                    **{**ask, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
                )

    run(scenario)


@pytest.mark.pure
def test_openais_client_calls_tools_by_responses(run: Any, tokenizer: Tokenizer) -> None:
    says = Says(tokenizer)
    ask: Any = {"model": MODEL, "input": ASK, "tools": OPENAI_TOOLS}

    async def scenario(cluster: Any) -> None:
        cluster.double.script = says
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="k", max_retries=0) as client:
            says.texts = ["I look. " + TWO]
            answer = await client.responses.create(**ask)
            said, *calls = answer.output
            assert (answer.output_text, answer.status) == ("I look. ", "completed")
            assert [(call.name, json.loads(call.arguments)) for call in calls] == [
                ("weather", ROME),
                ("time_of", {}),
            ]
            assert len({said.id, *(call.id for call in calls)}) == 3
            turns: list[Any] = [{"role": "user", "content": ASK}]
            turns += [item.model_dump(exclude_none=True) for item in answer.output]
            turns += [
                {"type": "function_call_output", "call_id": call.call_id, "output": "30"} for call in calls
            ]
            says.texts = ["Warm."]
            answer = await client.responses.create(**{**ask, "input": turns})
            assert answer.output_text == "Warm."
            says.texts = ["I look. " + TWO]
            async with client.responses.stream(**ask) as stream:
                kinds = [event.type async for event in stream]
                last = await stream.get_final_response()
            assert [item.type for item in last.output] == ["message", "function_call", "function_call"]
            assert json.loads(last.output[1].arguments) == ROME
            assert kinds.count("response.function_call_arguments.done") == 2
            assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
            says.texts = ['{"city": "Rome"}']
            named: Any = {"type": "function", "name": "weather"}
            answer = await client.responses.create(**ask, tool_choice=named)
            assert answer.output[0].arguments == '{"city": "Rome"}'
            with pytest.raises(openai.BadRequestError, match="only functions with a name"):
                await client.responses.create(**{**ask, "tools": [{"type": "web_search"}]})

    run(scenario)


@pytest.mark.pure
def test_thoughts_have_blocks_of_their_own(
    run: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = Says(tokenizer)
    asked: Any = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": ASK}]}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    text = "<think>Rome...</think>Warm."

    async def by_messages(cluster: Any) -> None:
        async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="k", max_retries=0) as client:
            says.texts = [text] * 2
            answer = await client.messages.create(**asked, thinking=thinking)
            thought, said = answer.content
            assert (thought.thinking, said.text, answer.stop_reason) == ("Rome...", "Warm.", "end_turn")
            async with client.messages.stream(**asked, thinking=thinking) as stream:
                thoughts = [event.thinking async for event in stream if event.type == "thinking"]
                last = await stream.get_final_message()
            assert "".join(thoughts) == last.content[0].thinking == "Rome..."
            assert last.content[1].text == "Warm."

    async def by_responses(cluster: Any) -> None:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="k", max_retries=0) as client:
            says.texts = [text] * 2
            answer = await client.responses.create(model=MODEL, input=ASK)
            thought, _ = answer.output
            assert (thought.type, thought.content[0].text) == ("reasoning", "Rome...")
            assert answer.output_text == "Warm."
            assert answer.usage is not None
            assert answer.usage.output_tokens_details.reasoning_tokens == len(tokenizer.encode("Rome..."))
            stream = await client.responses.create(model=MODEL, input=ASK, stream=True)
            events = [event async for event in stream]
            deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
            assert "".join(deltas) == "Rome..."
            assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]

    async def scenario(cluster: Any) -> None:
        cluster.double.script = says
        monkeypatch.setattr(Tokenizer, "thinks", property(lambda _: True))
        await by_messages(cluster)
        await by_responses(cluster)

    run(scenario)


class Moon(pydantic.BaseModel):
    """What an answer is to be."""

    phase: str


@pytest.mark.pure
def test_openais_client_parses_responses(run: Any, tokenizer: Tokenizer) -> None:
    says = Says(tokenizer)
    ask: Any = {"model": MODEL, "input": "Which moon?", "text_format": Moon}

    async def scenario(cluster: Any) -> None:
        cluster.double.script = says
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="k", max_retries=0) as client:
            says.texts = ['{"phase": "half"}'] * 2
            assert (await client.responses.parse(**ask)).output_parsed == Moon(phase="half")
            async with client.responses.stream(**ask) as stream:
                assert (await stream.get_final_response()).output_parsed == Moon(phase="half")
            tool: Any = openai.pydantic_function_tool(Moon)
            says.texts = ['[{"name": "Moon", "parameters": {"phase": "full"}}]']
            called = await client.responses.parse(
                model=MODEL,
                input="Hi",
                tools=[{"type": "function", **tool["function"]}],
                tool_choice="required",
            )
            (call,) = called.output
            assert call.parsed_arguments == {"phase": "full"}

    run(scenario)


@pytest.mark.pure
def test_a_call_that_was_cut_is_told_as_far_as_it_came(run: Any, tokenizer: Tokenizer) -> None:
    says = Says(tokenizer, "length")
    text = 'I look. <tool_call>{"name": "weather", "arguments": {"city": "Ro'
    turns = [{"role": "user", "content": ASK}]

    async def scenario(cluster: Any) -> None:
        cluster.double.script = says
        says.texts = [text] * 3
        ask = {"model": MODEL, "messages": turns, "max_tokens": 300, "tools": ANTHROPIC_TOOLS}
        _, _, message = await cluster.post("/v1/messages", ask)
        assert message["stop_reason"] == "max_tokens"
        assert message["content"][1]["input"] == {"": '{"city": "Ro'}
        ask = {"model": MODEL, "input": turns, "tools": OPENAI_TOOLS}
        _, _, response = await cluster.post("/v1/responses", ask)
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="k", max_retries=0) as client:
            events = [event async for event in await client.responses.create(**ask, stream=True)]
        items = [event.item for event in events if event.type == "response.output_item.done"]
        # Only the last item was cut.
        for said, call in (response["output"], [item.to_dict() for item in items]):
            assert (said["status"], call["status"], call["arguments"]) == (
                "completed", "incomplete", '{"city": "Ro',
            )  # fmt: skip

    run(scenario)


@pytest.mark.pure
def test_tools_are_among_the_tokens_that_are_counted(run: Any, tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": ASK}]
    tool = ANTHROPIC_TOOLS[0]
    function = {"name": tool["name"], "description": tool["description"], "parameters": SCHEMA}

    async def scenario(cluster: Any) -> None:
        ask = {"model": MODEL, "messages": turns, "tools": [tool]}
        _, _, counted = await cluster.post("/v1/messages/count_tokens", ask)
        whole = tokenizer.encode_chat(turns, tools=[{"type": "function", "function": function}])
        assert counted["input_tokens"] == len(whole)

    run(scenario)


def chat_of(ask: ApiRequest) -> Any:
    return ask.prompt.messages, ask.tool_use, ask.structure


def messages_of(parse: Any, body: Any) -> Any:
    """The chat that a body means, with its calls by number: their ids are drawn."""
    found = json.dumps(parse(json.dumps(body).encode()).prompt.messages)
    for place, name in enumerate(dict.fromkeys(re.findall(r"chatcmpl-tool-\w+", found))):
        found = found.replace(name, f"call {place}")
    return json.loads(found)


@pytest.mark.pure
@pytest.mark.parametrize(
    "text", ["<think>Rome...</think>I look. " + TWO, "<think>Rome...</think>Warm.", "Warm.", TWO]
)
def test_an_answer_is_taken_back_and_means_the_chat_that_it_was(
    run: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(Tokenizer, "thinks", property(lambda _: True))
    says = Says(tokenizer)
    asked: list[Any] = [{"role": "user", "content": ASK}]
    well: Any = {"role": "user", "content": "Well?"}
    functions = [{"type": "function", "function": tool} for tool in OPENAI_TOOLS]

    async def answer(cluster: Any, path: str, body: Any) -> Any:
        says.texts = [text]
        status, _, found = await cluster.post(path, {"model": MODEL, **body})
        assert status == 200, found
        return found

    async def scenario(cluster: Any) -> None:
        cluster.double.script = says
        chat: dict[str, Any] = {"messages": [*asked], "tools": functions}
        said = (await answer(cluster, "/v1/chat/completions", chat))["choices"][0]["message"]
        outputs = [
            {"role": "tool", "tool_call_id": call["id"], "content": "30"}
            for call in said.get("tool_calls", [])
        ]
        chat["messages"] += [said, *outputs, well]

        messages: dict[str, Any] = {"messages": [*asked], "tools": ANTHROPIC_TOOLS, "max_tokens": 300}
        content = (await answer(cluster, "/v1/messages", messages))["content"]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": [{"type": "text", "text": "30", "cache_control": {"type": "ephemeral"}}],
            }
            for block in content
            if block["type"] == "tool_use"
        ]
        turn = {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]}
        messages["messages"] += [{"role": "assistant", "content": content}, turn]

        responses: dict[str, Any] = {
            "input": [*asked],
            "tools": OPENAI_TOOLS,
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
        output = (await answer(cluster, "/v1/responses", responses))["output"]
        responses["input"] += output
        responses["input"] += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "30"}
            for item in output
            if item["type"] == "function_call"
        ]
        responses["input"].append(well)

        expected = messages_of(parse_chat, chat)
        assert ("reasoning" in expected[1]) == text.startswith("<think>")
        assert messages_of(parse_messages, {"model": MODEL, **messages}) == expected
        assert messages_of(parse_responses, responses) == expected
        await answer(cluster, "/v1/messages", messages)
        await answer(cluster, "/v1/responses", responses)

    run(scenario)


@pytest.mark.pure
def test_reasoning_is_never_an_error() -> None:
    """Summaries stand in for thoughts that are not there; encrypted ones are another server's."""

    def read(*items: Any) -> Any:
        return messages_of(parse_responses, {"input": [*items, {"role": "user", "content": "Hi"}]})[:-1]

    encrypted = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "encrypted_content": "gAAA",
        "content": None,
    }
    assert read(encrypted) == []
    summary = {**encrypted, "summary": [{"type": "summary_text", "text": "Short."}]}
    thoughts = {"reasoning": "Short.", "reasoning_content": "Short."}
    assert read(summary) == [{"role": "assistant", "content": "", **thoughts}]
    text = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Long."}]}
    message = {"type": "message", "role": "assistant", "content": "Yes."}
    thoughts = {"reasoning": "Long.", "reasoning_content": "Long."}
    assert read(text, message) == [{"role": "assistant", "content": "Yes.", **thoughts}]
    # Each answer is a turn of its own.
    assert [turn["content"] for turn in read(message, text, message)] == ["Yes.", "Yes."]
    old = {"role": "assistant", "content": "Yes.", "reasoning_content": "Long."}
    chat = {"messages": [old, {"role": "user", "content": "Hi"}]}
    assert messages_of(parse_chat, chat)[:-1] == read(text, message)


@pytest.mark.pure
def test_a_call_that_was_cut_is_taken_back() -> None:
    """As the text that it is, in each dialect."""
    text = '{"city": "Ro'
    cut = {
        "type": "function_call",
        "call_id": "c1",
        "name": "weather",
        "arguments": text,
        "status": "incomplete",
    }
    block = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"": text}}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [block]}]
    for parse, body in (
        (parse_responses, {"input": [cut]}),
        (parse_responses, {"input": [{**cut, "status": "completed"}]}),
        (parse_messages, {"model": MODEL, "max_tokens": 1, "messages": turns}),
    ):
        *_, read = messages_of(parse, body)
        assert read["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.pure
def test_what_is_to_be_included_is_refused_where_it_is_missed() -> None:
    ask: dict[str, Any] = {"input": "Hi", "include": ["message.output_text.logprobs"]}
    with pytest.raises(ApiError) as caught:
        parse_responses(json.dumps(ask).encode())
    assert (caught.value.status, caught.value.param) == (400, "include")


CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TURNS = [
    {"role": "user", "content": ASK},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "30"},
    {"role": "user", "content": "Well?"},
]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("choice", "anthropics", "openais", "parallel"),
    [
        (None, None, None, None),
        ("required", {"type": "any"}, "required", None),
        ("required", {"type": "any", "disable_parallel_tool_use": True}, "required", False),
        (
            {"type": "function", "function": {"name": "weather"}},
            {"type": "tool", "name": "weather"},
            {"type": "function", "name": "weather"},
            None,
        ),
        ("none", {"type": "none"}, "none", None),
    ],
)
def test_all_three_mean_the_same_chat(choice: Any, anthropics: Any, openais: Any, parallel: Any) -> None:
    functions = [
        {
            "type": "function",
            "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA},
        },
        {"type": "function", "function": {"name": "time_of", "parameters": {"type": "object"}}},
    ]
    chat = {
        "messages": TURNS,
        "tools": functions,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
    }
    blocks = [
        {"type": "redacted_thinking", "data": "gAAA"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "30"}]}
    messages = {
        "model": MODEL,
        "max_tokens": 3,
        "messages": [
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        ],
        "tools": ANTHROPIC_TOOLS,
        "tool_choice": anthropics,
    }
    responses = {
        "input": [
            {"role": "user", "content": ASK},
            {"type": "reasoning", "summary": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "30"},
            {"role": "user", "content": "Well?"},
        ],
        "tools": OPENAI_TOOLS,
        "tool_choice": openais,
        "parallel_tool_calls": parallel,
    }
    expected = chat_of(parse_chat(json.dumps(chat).encode()))
    assert chat_of(parse_messages(json.dumps(messages).encode())) == expected
    assert chat_of(parse_responses(json.dumps(responses).encode())) == expected


@pytest.mark.pure
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    ],
)
def test_what_is_no_use_of_tools_is_refused_by_name(fields: Any, param: str) -> None:
    ask = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": ASK}], **fields}
    with pytest.raises(ApiError) as caught:
        parse_messages(json.dumps(ask).encode())
    assert (caught.value.status, caught.value.param) == (400, param)
