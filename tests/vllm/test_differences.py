"""What counts as a difference, and that no reason excuses more than it names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.vllm.asked import requests
from tests.vllm.differences import DIFFERENCES, differences, reasons

TEXTS = (
    "= .body.choices[].text", "= .body.choices[].message.content", "= .events[].choices[].text",
    "= .events[].choices[].delta.content", "= .body.usage.completion_tokens", "= .body.usage.prompt_tokens",
    "= .body.choices[].finish_reason", "= .events[].choices[].finish_reason",
)  # fmt: skip
#: Whose values are the same as vLLM's, and so must never have a reason to be others.
SAME = (
    "plain completion", "plain chat", "streamed completion", "streamed chat", "chat of regex", "completion of regex",
    "chat of json_object", "streamed chat of choice", "completion of choice", "echo alone", "echoed logprobs",
)  # fmt: skip


def streamed(*texts: str) -> dict[str, Any]:
    return {"status": 200, "events": [{"choices": [{"text": text}]} for text in texts]}


def scored(*values: float) -> dict[str, Any]:
    return {"status": 200, "body": {"logprobs": list(values)}}


def test_texts_in_other_pieces_are_told_apart_from_other_texts() -> None:
    vllm = streamed("red", " wine")
    assert differences(vllm, streamed("red wine"), values=True) == ["~ .events[].choices[].text"]
    assert differences(vllm, streamed("red ", "wine"), values=True) == ["~ .events[].choices[].text"]
    assert differences(vllm, streamed("red", "wine"), values=True) == ["= .events[].choices[].text"]
    assert differences(vllm, streamed("red", "wine"), values=False) == []
    assert differences(vllm, vllm, values=True) == []


def test_what_lies_between_two_digits_may_be_told_as_either() -> None:
    assert differences(scored(-22.56, 0.0), scored(-22.57, 0.0), values=True) == []
    assert differences(scored(-22.56), scored(-22.58), values=True) == ["= .body.logprobs[]"]
    assert differences(scored(-0.1), scored(-0.1, -0.2), values=True) == ["= .body.logprobs[]"]


@pytest.mark.parametrize("name", SAME)
def test_no_reason_excuses_what_is_the_same(name: str) -> None:
    _, unexplained = reasons(name, list(TEXTS))
    excused = {place for place in TEXTS if f"{name}: {place}" not in unexplained}
    fewer = {"= .body.usage.completion_tokens"} if name == "completion of choice" else set()
    assert excused == fewer


def test_each_reason_is_of_requests_that_are_asked() -> None:
    names = [each.name for each in requests()]
    assert [
        row.what for row in DIFFERENCES if not any(re.fullmatch(row.requests, name) for name in names)
    ] == []
