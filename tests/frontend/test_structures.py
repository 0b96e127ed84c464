"""A structure that a client asks for reaches the workers as a grammar; one that is none is refused by its field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from frontend_double import Double, whole_answer

from halfmoon.schemas.events import RequestArrived, RequestCancelled
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.model.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=one>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}


def test_structures_become_grammars_or_are_refused(run: Any, tokenizer: Tokenizer) -> None:
    given: list[Sampling] = []

    async def noted(double: Double, seq: int, arrived: RequestArrived) -> None:
        given.append((await double.place(arrived, f"{seq}-0")).sampling)
        await whole_answer(double, seq, arrived)

    async def sampling_of(cluster: Any, **fields: Any) -> Sampling:
        body = {"prompt": "x", "max_tokens": 1, **fields}
        status, _, answer = await cluster.post("/v1/completions", body)
        assert status == 200, answer
        return given.pop()

    async def scenario(cluster: Any) -> None:
        cluster.double.script = noted
        written = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        grammar = (await sampling_of(cluster, response_format=written)).grammar
        assert '"required":["a"]' in grammar
        for same in ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}):
            assert (await sampling_of(cluster, **same)).grammar == grammar
        strict = {"json": SCHEMA, "disable_additional_properties": True, "disable_any_whitespace": True}
        changed = (await sampling_of(cluster, structured_outputs=strict)).grammar
        assert '"additionalProperties":false' in changed
        assert '"whitespace_flexible":false' in changed
        assert (await sampling_of(cluster, response_format={"type": "text"})).grammar == ""
        tagged = (await sampling_of(cluster, response_format=TAG)).grammar
        assert '"<f="' in tagged
        told = {"structural_tag": json.dumps(TAG)}
        assert (await sampling_of(cluster, structured_outputs=told)).grammar == tagged
        assert (await sampling_of(cluster, structured_outputs={"structural_tag": TAG})).grammar == tagged
        banned = await sampling_of(cluster, bad_words=["moon"], allowed_token_ids=[1, 2])
        assert banned.bad_words == [tokenizer.encode("moon"), tokenizer.encode(" moon")]
        assert banned.allowed_token_ids == [1, 2]
        for fields, param in (
            ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
            ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
            ({"guided_grammar": "start: nothing"}, "guided_grammar"),
            (
                {"response_format": {**written, "json_schema": {"schema": {"type": "x"}}}},
                "response_format.json_schema",
            ),
            ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
            ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
            ({"response_format": {"type": "structural_tag"}}, "response_format"),
            ({"response_format": {**TAG, "triggers": ["<other"]}}, "response_format"),
            ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json"),
            ({"structured_outputs": {"regex": "a" * 50_000}}, "structured_outputs.regex"),
            ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
            ({"bad_words": ["b" * 250] * 256, "guided_regex": '"' * 30_000}, "guided_regex"),
        ):
            status, _, answer = await cluster.post("/v1/completions", {"prompt": "x", **fields})
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert param in answer["error"]["message"]

    run(scenario)


def test_an_answer_whose_grammar_runs_into_a_bound_fails_by_name(run: Any) -> None:
    body = {"prompt": "x", "max_tokens": 5, "structured_outputs": {"regex": "a+"}}

    async def bounded(double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:2]))
        last = double.delivery(arrived, f"{seq}-0", 2, double.answer_ids[2:3])
        none = msgspec.structs.replace(last.tokens[0], bound_reached=True)
        await double.deliver(msgspec.structs.replace(last, tokens=[none]))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = bounded
        status, _, answer = await cluster.post("/v1/completions", body)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "too_complex", "structured_outputs.regex")
        assert "after 2 tokens of the answer" in error["message"]
        *pieces, last = await cluster.sse("/v1/completions", {**body, "stream": True})
        assert pieces
        assert last == answer, "an event, and the stream is over"
        _, told = await cluster.ask("generate", body)
        assert told == answer
        await cluster.double.wait_for(RequestCancelled, 3)

    run(scenario)
