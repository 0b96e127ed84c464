"""What an engine answers in place of tokens: whose fault it is, which field it names, and what its client gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halfmoon.schemas.codec import decode, encode
from halfmoon.schemas.decisions import EngineRefusal
from halfmoon.schemas.events import PrefillFailed
from halfmoon.workers.adapters.engines.completion import EngineRefused, read_line, refusal_of

#: As vLLM writes it where a field breaks its bounds, with the field alone in the text and in `param` too.
CHECKED = (
    "1 validation error:\n  {'type': 'greater_than_equal', 'loc': ('body', 'top_k'), 'msg': 'Input should be "
    "greater than or equal to -1', 'input': -7, 'ctx': {'ge': -1}}"
)
#: A check of the whole request repeats it.
WHOLE = (
    "1 validation error:\n  {'type': 'value_error', 'loc': ('body',), 'msg': 'Value error, no', "
    "'input': {'prompt': [4711, 4712]}}"
)
WRAPPED = "[{'type': 'missing', 'loc': ('body', 'function-wrap[__log_extra_fields__()]', 'prompt'), 'msg': 'Required'}]"


@pytest.mark.parametrize(
    ("said", "param", "text"),
    [
        ({"error": {"message": "no", "param": "seed", "code": 400}}, "seed", "no"),
        ({"error": {"message": "no", "param": "body.seed"}}, "seed", "no"),
        ({"object": "error", "message": "no", "param": "seed"}, "seed", "no"),
        ({"error": {"message": "no", "param": None}}, "", "no"),
        ({"error": {"message": CHECKED, "param": None}}, "top_k", CHECKED.partition(", 'input'")[0]),
        ({"error": {"message": WHOLE, "param": None}}, "", WHOLE.partition(", 'input'")[0]),
        ({"error": {"message": WRAPPED}}, "prompt", WRAPPED),
        ({"detail": [{"loc": ["body", "stop", 0], "msg": "Field required"}]}, "stop.0", "Field required"),
        ({"detail": "Not now"}, "", "Not now"),
        ({"error": "Unauthorized"}, "", "Unauthorized"),
        ({"error": {"message": "n" * 999, "param": "p" * 999}}, "p" * 100, "n" * 300),
        ({"error": None}, "", '{"error": null}'),
        ([1], "", "[1]"),
        ({"error": []}, "", "[]"),
        ({"error": {"param": 7, "message": [7]}}, "", "[7]"),
    ],
)
def test_the_field_and_the_text_of_a_refusal(said: Any, param: str, text: str) -> None:
    refused = refusal_of(400, json.dumps(said).encode())
    assert refused.refusal == EngineRefusal(status=400, param=param)
    assert (str(refused), refused.retryable) == (f"the engine answers 400: {' '.join(text.split())}", False)


@pytest.mark.parametrize(
    ("status", "retryable", "told"),
    [
        (400, False, True), (413, False, True), (422, False, True),
        (404, True, True), (429, True, True), (503, True, True),
        (401, True, False), (403, True, False), (405, True, False), (500, True, False), (502, True, False),
    ],
)  # fmt: skip
def test_whose_fault_it_is(status: int, retryable: bool, told: bool) -> None:
    refused = refusal_of(status, b"no")
    assert (str(refused), refused.retryable) == (f"the engine answers {status}: no", retryable)
    assert refused.refusal == (EngineRefusal(status=status) if told else None)
    line = b"data: " + json.dumps({"error": {"message": "no", "code": status}}).encode()
    with pytest.raises(EngineRefused, match=f"the engine answers {status}: no") as streamed:
        read_line(line, 10)
    assert (streamed.value.retryable, streamed.value.refusal) == (retryable, refused.refusal)


@pytest.mark.parametrize("error", ["no", {"message": "no"}, {"message": "no", "code": "x"}])
def test_an_error_in_a_stream_without_a_status_may_be_another_engines_luck(error: Any) -> None:
    with pytest.raises(EngineRefused, match="the engine: no") as refused:
        read_line(b"data: " + json.dumps({"error": error}).encode(), 10)
    assert (refused.value.retryable, refused.value.refusal) == (True, None)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), ("", 0), ("0", 0), ("-1", 0), ("1.5", 0), ("9" * 9, 86_400), ("9" * 5000, 0),
     ("Thu, 26 Nov 2026 00:00:00 GMT", 0)],
)  # fmt: skip
def test_when_to_try_again(header: str, seconds: int) -> None:
    refusal = refusal_of(503, b"", header).refusal
    assert refusal == EngineRefusal(status=503, retry_after_ns=seconds * 1_000_000_000)
    failed = PrefillFailed(order_id="o", request_id="r", worker_id="w", reason="x", refusal=refusal)
    assert decode(encode(failed), PrefillFailed) == failed
