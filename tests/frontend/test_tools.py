"""Tools: told to the model, called in its text, read from it, and written by OpenAI's own client."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pydantic
import pytest
from frontend_double import MODEL, Double

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import parse_chat
from halfmoon.schemas.api.responses import parse_responses
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import unpack_tokens
from halfmoon.workers.frontend.openai.answer_parts import AnswerPart, AnswerParts, CallStyle
from halfmoon.workers.frontend.openai.chat_parts import message_of
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.lazily import Lazily

openai: Any = Lazily("openai")

CHAT = [{"role": "user", "content": "Weather in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time_of"}}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "R\\"}o{me"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>{"arguments": {"a": [1, {}]}, "name": "time_of"}</tool_call>\nand more'
CALL = '{"name": "time_of", "parameters": {"a": [1, {}]}}'
BROKEN = '<tool_call>{"name": "a\\q", "arguments": {}}</tool_call>'
ROME, TWELVE = ("weather", {"city": 'R"}o{me'}), ("time_of", {"a": [1, {}]})


def read(style: CallStyle, text: str, step: int, **options: Any) -> tuple[dict[str, Any], str]:
    """The message of a text that comes in pieces of `step` characters, and how it ends."""
    parts = AnswerParts(style, **options)
    found: list[AnswerPart] = []
    for at in range(0, len(text), step):
        found += parts.push(text[at : at + step])
    found += parts.push("", final=True)
    return message_of(found, ""), parts.finish_reason("stop")


@pytest.mark.parametrize(
    ("style", "options", "text", "content", "reasoning", "calls", "reason"),
    [
        ("hermes", {}, "Just <b>text</b> <tool", "Just <b>text</b> <tool", "", [], "stop"),
        ("hermes", {}, "I look.\n" + ONE, "I look.\n", "", [ROME], "tool_calls"),
        ("hermes", {}, TWO, None, "", [ROME, TWELVE], "tool_calls"),
        ("hermes", {"parallel": False}, TWO, None, "", [ROME], "tool_calls"),
        ("hermes", {}, "<tool_call>no JSON</tool_call>!", "<tool_call>no JSON</tool_call>!", "", [], "stop"),
        ("hermes", {}, BROKEN, BROKEN, "", [], "stop"),
        ("hermes", {}, '<tool_call>{"name": "w', '<tool_call>{"name": "w', "", [], "stop"),
        (
            "hermes",
            {},
            "<tool_call>\n no JSON</tool_call>!",
            "<tool_call>\n no JSON</tool_call>!",
            "",
            [],
            "stop",
        ),
        ("hermes", {}, '<tool_call>\n{"name": "w', '<tool_call>\n{"name": "w', "", [], "stop"),
        ("hermes", {}, "I look. <tool_call>", "I look. <tool_call>", "", [], "stop"),
        ("hermes", {}, "<tool_call>\n ", "<tool_call>\n ", "", [], "stop"),
        ("llama3", {}, CALL, None, "", [TWELVE], "tool_calls"),
        (
            "llama3",
            {},
            '{"type": "function", ' + CALL[1:] + "; " + CALL,
            None,
            "",
            [TWELVE, TWELVE],
            "tool_calls",
        ),
        ("llama3", {}, '{"city": "Rome"} is JSON', '{"city": "Rome"} is JSON', "", [], "stop"),
        ("llama3", {}, '\n {"city": "Rome"}', '\n {"city": "Rome"}', "", [], "stop"),
        ("llama3", {}, "It {is} 7", "It {is} 7", "", [], "stop"),
        (
            "list",
            {},
            f'[{CALL}, {{"name": "weather", "parameters": {{"city": "R\\"}}o{{me"}}}}]',
            None,
            "",
            [TWELVE, ROME],
            "tool_calls",
        ),
        ("arguments", {"named": "time_of"}, '{"a": [1, {}]}', None, "", [TWELVE], "stop"),
        ("", {"thinks": True}, "<think>\nWell...</think>\n\nYes", "\n\nYes", "\nWell...", [], "stop"),
        ("", {"thinks": True}, "  No <think>s", "  No <think>s", "", [], "stop"),
        ("hermes", {"thinking": True}, "Hm</think>" + ONE, None, "Hm", [ROME], "tool_calls"),
        ("", {"thinking": True}, "Hm, cut", "", "Hm, cut", [], "stop"),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_the_parts_of_a_text_do_not_depend_on_how_it_is_cut(
    style: CallStyle,
    options: dict[str, Any],
    text: str,
    content: str | None,
    reasoning: str,
    calls: list[Any],
    reason: str,
    step: int,
) -> None:
    message, ended = read(style, text, step, **options)
    assert message["content"] == content
    assert message.get("reasoning_content", "") == reasoning
    made = [call["function"] for call in message.get("tool_calls", [])]
    assert [(call["name"], json.loads(call["arguments"])) for call in made] == calls
    assert ended == reason


CUT = ONE[:-30]
SECOND = ONE + '<tool_call>{"name": "time_of", "arguments": {"a"'
LISTED = '[{"name": "weather", "parameters": {"city": "R'


@pytest.mark.parametrize(
    ("style", "options", "text", "calls"),
    [
        ("hermes", {}, "I look. " + CUT, 1),
        ("hermes", {}, SECOND, 2),
        ("hermes", {}, ONE + '<tool_call>{"na', 1),
        ("hermes", {}, ONE + "\n<tool_call>", 1),
        ("hermes", {}, "<tool_call>\n", 0),
        ("list", {}, "[", 0),
        ("hermes", {}, '<tool_call>{"name": "f", "arguments": {"a": b}}</tool_call>', 1),
        ("hermes", {}, '<tool_call>{"name": "f", "arguments": {"a": b}}</tool_call>' + ONE, 2),
        ("llama3", {}, CALL[:-4], 1),
        ("llama3", {}, CALL + "; " + CALL[:8], 1),
        ("list", {}, LISTED, 1),
        ("hermes", {"thinking": True}, CUT, 1),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_calls_that_are_cut_or_no_json_are_content_of_a_whole_answer(
    style: CallStyle, options: dict[str, Any], text: str, calls: int, step: int, reason: str
) -> None:
    before = "Hm</think>" if options else ""
    streamed, whole = AnswerParts(style, **options), AnswerParts(style, **options)
    message = message_of(whole.whole(before + text), "")
    assert (message["content"], whole.finish_reason(reason)) == (text, reason)
    assert message.get("reasoning", "") == ("Hm" if options else "")
    assert "tool_calls" not in message
    parts = []
    for at in range(0, len(before + text), step):
        parts += streamed.push((before + text)[at : at + step])
    parts += streamed.push("", final=True)
    assert len({part.call for part in parts if part.call >= 0}) == calls
    assert streamed.finish_reason(reason) == reason


@pytest.mark.parametrize(
    ("style", "options", "text", "reason"),
    [
        ("hermes", {}, ONE.removesuffix("}\n</tool_call>"), "tool_calls"),
        ("hermes", {"parallel": False}, SECOND, "tool_calls"),
        ("llama3", {}, CALL + " and words", "tool_calls"),
        ("arguments", {"named": "weather"}, '{"city": "R', "length"),
    ],
)
def test_calls_that_are_whole_are_calls_where_the_answer_is_cut(
    style: CallStyle, options: dict[str, Any], text: str, reason: str
) -> None:
    parts = AnswerParts(style, **options)
    (call,) = message_of(parts.whole(text), "")["tool_calls"]
    arguments = call["function"]["arguments"]
    assert parts.finish_reason("length") == reason
    assert json.loads(arguments) if reason == "tool_calls" else arguments == text


#: Of `ONE`: its arguments have begun.
CUT_TOKENS = 20
FRAGMENTS = (
    '<tool_call> </tool_call> {"name":"f","arguments": {"type":"function", {"a":1} "parameters" "name" '
    '<think> </think> <|python_tag|> null 12 } { [ ] " \\ : , ; < é x'
)


def test_no_text_makes_a_difference_by_its_cuts() -> None:
    """Drawn of what calls consist of, mostly in no order."""
    fragments = [*FRAGMENTS.split(" "), "\n", " "]
    styles: list[CallStyle] = ["", "hermes", "llama3", "list", "arguments"]
    for seed in range(3000):
        draw = random.Random(seed)
        text = "".join(draw.choice(fragments) for _ in range(draw.randint(1, 14)))
        options = {"thinks": draw.random() < 0.4, "thinking": draw.random() < 0.2, "named": "f"}
        style, outcomes = draw.choice(styles), []
        for step in (1, draw.randint(2, 9), len(text)):
            message, reason = read(style, text, step, **options)
            for call in message.get("tool_calls", []):
                del call["id"]
            outcomes.append((message, reason))
        assert outcomes[0] == outcomes[1] == outcomes[2], (seed, text)
        plain = style in ("", "hermes", "llama3") and "<|python_tag|>" not in text
        if plain and not options["thinks"] and not options["thinking"] and not message.get("tool_calls"):
            assert (message["content"] or "") == text, (seed, text)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat(json.dumps({"messages": CHAT, **fields}).encode())
    return caught.value


def test_templates_are_told_what_was_sent_of_a_function() -> None:
    """`strict` too, as transformers and vLLM tell them: left out, a prompt has other tokens than theirs."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    ask = parse_chat(json.dumps({"messages": CHAT, "tools": [strict, TIME]}).encode())
    assert ask.tool_use is not None
    assert ask.tool_use.tools == [strict, TIME]
    flat = [{"type": "function", **strict["function"]}, {"type": "function", **TIME["function"]}]
    assert parse_responses(json.dumps({"input": "Hi", "tools": flat}).encode()).tool_use == ask.tool_use


def test_what_is_no_tool_or_no_choice_is_refused_by_name() -> None:
    named = {"type": "function", "function": {"name": "nobody"}}
    different = {"type": "object", "$defs": {"x": {"type": "null"}}}
    clash = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {**different, "$defs": {"x": {"type": kind}}}},
        }
        for name, kind in (("a", "null"), ("b", "string"))
    ]
    for fields, param in (
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": clash, "tool_choice": "required"}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": named}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ):
        error = refused(**fields)
        assert (error.status, (error.param or "").partition(".")[0]) == (400, param), fields


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1", "Rome", "[" * 9999, ""])
def test_an_earlier_call_whose_arguments_are_no_json_does_not_end_the_chat(
    arguments: str, tokenizer: Tokenizer
) -> None:
    """What a model wrote comes back with every later turn."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [*CHAT, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "Bad JSON."}]
    ask = parse_chat(json.dumps({"messages": history}).encode())
    assert ask.prompt.messages is not None
    assert json.dumps(arguments or {}) in tokenizer.decode(tokenizer.encode_chat(ask.prompt.messages))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_of_an_earlier_answer_reach_the_template(name: str, tokenizer: Tokenizer) -> None:
    history = [*CHAT, {"role": "assistant", "content": "Sunny.", name: "Rome is <|im_end|> hot."}]
    ask = parse_chat(json.dumps({"messages": history}).encode())
    assert ask.prompt.messages is not None
    source = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}<|im_end|>{% endfor %}"
    thinking = Tokenizer(dataclasses.replace(tokenizer._files, chat_template=source))
    ids = thinking.encode_chat(ask.prompt.messages)
    assert thinking.decode(ids) == "Rome is <|im_end|> hot." * 2
    assert ids.count(thinking.control["<|im_end|>"]) == 2  # the template's own, of two messages


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str


class Report(pydantic.BaseModel):
    city: str
    degrees: int


@pytest.mark.realtime
def test_openais_client_calls_tools_and_parses_answers(run: Any, tokenizer: Tokenizer) -> None:
    texts: list[str] = []
    seen: list[Any] = []

    async def answer(double: Double, seq: int, arrived: RequestArrived) -> None:
        reply = await double.place(arrived, f"{seq}-0")
        seen.append(reply)
        ids = [*tokenizer.encode(texts.pop(0)), double.eos][: arrived.max_tokens]
        for index, token in enumerate(ids):
            last = index == len(ids) - 1
            reason = ("stop" if token == double.eos else "length") if last else ""
            await double.deliver(double.delivery(arrived, f"{seq}-0", index, [token], reason))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = answer
        client = openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0)
        ask: Any = {"model": MODEL, "messages": CHAT}

        texts.append(TWO)
        done = await client.chat.completions.create(**ask, tools=[WEATHER, TIME])
        (choice,) = done.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        calls = choice.message.tool_calls or []
        assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [ROME, TWELVE]
        assert len({call.id for call in calls}) == 2
        prompt = tokenizer.decode(unpack_tokens(seen[-1].token_ids))
        assert json.dumps(WEATHER) in prompt
        assert seen[-1].sampling.grammar == ""

        # Its words and its result are the next turn's.
        texts.append("Warm.")
        turn = [*CHAT, choice.message.model_dump(exclude_none=True)]
        turn += [{"role": "tool", "tool_call_id": call.id, "content": "30 <|im_end|>"} for call in calls]
        done = await client.chat.completions.create(model=MODEL, messages=turn, tools=[WEATHER, TIME])
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("Warm.", "stop")
        ids = unpack_tokens(seen[-1].token_ids)
        assert "<tool_response>\n30 <|im_end|>\n</tool_response>" in tokenizer.decode(ids)
        # System, user, assistant, both results in one turn.
        assert ids.count(tokenizer.control["<|im_end|>"]) == 4

        texts.append("I look. " + ONE)
        content, pieces, names = "", "", []
        async for chunk in await client.chat.completions.create(**ask, tools=[WEATHER], stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for call in delta.tool_calls or []:
                assert call.function is not None
                names += [call.function.name] if call.id else []
                pieces += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason
        assert (content, names, json.loads(pieces), reason) == (
            "I look. ",
            ["weather"],
            ROME[1],
            "tool_calls",
        )

        # Cut within a call: whole and streamed alike it is no call to carry out.
        texts.append(ONE)
        cut = await client.chat.completions.create(**ask, tools=[WEATHER], max_tokens=CUT_TOKENS)
        assert cut.choices[0].finish_reason == "length"
        assert cut.choices[0].message.tool_calls is None
        assert cut.choices[0].message.content
        assert ONE.startswith(cut.choices[0].message.content)
        texts.append("Warm.")
        turn = [*CHAT, cut.choices[0].message.model_dump(exclude_none=True), *CHAT]
        assert (await client.chat.completions.create(model=MODEL, messages=turn, tools=[WEATHER])).choices
        texts.append(ONE)
        reasons, names = [], []
        async for chunk in await client.chat.completions.create(
            **ask, tools=[WEATHER], max_tokens=CUT_TOKENS, stream=True
        ):
            names += [call.function.name for call in chunk.choices[0].delta.tool_calls or [] if call.id]
            reasons.append(chunk.choices[0].finish_reason)
        assert (names, reasons[-1]) == (["weather"], "length")

        texts.append('[{"name": "weather", "parameters": {"city": "Rome"}}]')
        tool = openai.pydantic_function_tool(Weather, name="weather")
        parsed = await client.chat.completions.parse(**ask, tools=[tool], tool_choice="required")
        (made,) = parsed.choices[0].message.tool_calls or []
        assert made.function.parsed_arguments == Weather(city="Rome")
        assert '"const":"weather"' in seen[-1].sampling.grammar

        texts.append('{"city": "Rome"}')
        named: Any = {"type": "function", "function": {"name": "weather"}}
        done = await client.chat.completions.create(**ask, tools=[WEATHER, TIME], tool_choice=named)
        assert done.choices[0].finish_reason == "stop"
        (call,) = done.choices[0].message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')

        texts.append('{"city": "Rome", "degrees": 30}')
        report = await client.chat.completions.parse(**ask, response_format=Report)
        assert report.choices[0].message.parsed == Report(city="Rome", degrees=30)
        assert '"degrees"' in seen[-1].sampling.grammar

        texts.append(ONE)
        done = await client.chat.completions.create(**ask, tools=[WEATHER], tool_choice="none")
        assert (done.choices[0].message.content, done.choices[0].message.tool_calls) == (ONE, None)

        texts.append(ONE)
        _, told = await cluster.ask("chat", {"messages": CHAT, "tools": [WEATHER]})
        assert (told["text"], told["finish_reason"]) == (ONE, "tool_calls")
        assert told["tool_calls"][0]["function"]["name"] == "weather"
        await client.close()

    run(scenario)
