"""Answers that the client begins, in all dialects; and the line of a system prompt that is for another vendor."""

from __future__ import annotations

import json
from typing import Any

import pytest
from frontend_double import MODEL

from halfmoon.schemas.api.messages import parse_messages
from halfmoon.schemas.api.requests import parse_chat
from halfmoon.schemas.api.responses import parse_responses
from halfmoon.workers.model.text.tokenizer import Tokenizer

HI = {"role": "user", "content": "Count to three."}
BEGUN = {"role": "assistant", "content": "One, two"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cch=1a2b;"


def read(parse: Any, body: Any) -> Any:
    ask = parse(json.dumps(body).encode())
    return ask.prompt.messages, ask.prompt.rendering


def by_chat(*messages: Any, begun: bool) -> Any:
    fields = {"add_generation_prompt": not begun, "continue_final_message": begun}
    return read(parse_chat, {"messages": messages, **fields})


def by_messages(*messages: Any, **fields: Any) -> Any:
    return read(parse_messages, {"model": MODEL, "max_tokens": 3, "messages": messages, **fields})


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    expected = by_chat(HI, BEGUN, begun=True)
    assert by_messages(HI, BEGUN) == expected
    blocks = {"role": "assistant", "content": [{"type": "text", "text": "One, two"}]}
    assert by_messages(HI, blocks) == expected
    # Only the last one.
    assert by_messages(HI, BEGUN, HI) == by_chat(HI, BEGUN, HI, begun=False)


def test_an_answer_of_which_there_is_no_text_has_not_begun() -> None:
    for content in ("", []):
        assert by_messages(HI, {"role": "assistant", "content": content}) == by_chat(HI, begun=False)
    call = {"type": "tool_use", "id": "c1", "name": "count", "input": {}}
    messages, rendering = by_messages(HI, {"role": "assistant", "content": [call]})
    assert (len(messages), rendering.continue_final, rendering.add_generation_prompt) == (2, False, True)


@pytest.mark.parametrize(
    ("status", "begun"), [("incomplete", True), ("in_progress", True), ("completed", False), (None, False)]
)
def test_a_last_item_that_was_cut_is_gone_on_with(status: str | None, begun: bool) -> None:
    text = [{"type": "output_text", "text": "One, two", "annotations": []}]
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": text}
    assert read(parse_responses, {"input": [HI, item]}) == by_chat(HI, BEGUN, begun=begun)
    # Not where another turn follows.
    assert read(parse_responses, {"input": [HI, item, HI]}) == by_chat(HI, BEGUN, HI, begun=False)


@pytest.mark.pure
@pytest.mark.realtime
def test_the_prompt_ends_where_the_answer_begins(run: Any, tokenizer: Tokenizer) -> None:
    async def scenario(cluster: Any) -> None:
        whole = tokenizer.encode_chat([HI, BEGUN], add_generation_prompt=False, continue_final=True)
        ask = {"model": MODEL, "messages": [HI, BEGUN]}
        _, _, counted = await cluster.post("/v1/messages/count_tokens", ask)
        assert counted["input_tokens"] == len(whole)
        _, _, message = await cluster.post("/v1/messages", {**ask, "max_tokens": 2})
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(whole)
        assert message["content"] == [{"type": "text", "text": "Half moons"}]

    run(scenario)


@pytest.mark.parametrize(
    ("system", "left"),
    [
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "Be short."}], "Be short."),
        ([{"type": "text", "text": BILLING + "\nBe short."}], "Be short."),
        (BILLING + "\nBe short.", "Be short."),
        ([{"type": "text", "text": BILLING}], None),
        (BILLING, None),
        # Only at the begin of a text.
        ("Be short.\n" + BILLING, "Be short.\n" + BILLING),
    ],
)
def test_what_is_for_another_vendor_is_no_part_of_the_prompt(system: Any, left: str | None) -> None:
    told = [] if left is None else [{"role": "system", "content": left}]
    assert by_messages(HI, system=system) == by_chat(*told, HI, begun=False)
