"""A structure that a client asks for reaches the workers as a grammar; one that is none is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest
from frontend_double import Double, whole_answer

from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.model.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.pure
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
        banned = await sampling_of(cluster, bad_words=["moon"], allowed_token_ids=[1, 2])
        assert banned.bad_words == [tokenizer.encode("moon"), tokenizer.encode(" moon")]
        assert banned.allowed_token_ids == [1, 2]
        circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
        for fields, param in (
            ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
            ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
            ({"guided_grammar": "start: nothing"}, "guided_grammar"),
            (
                {"response_format": {**written, "json_schema": {"schema": {"type": "x"}}}},
                "response_format.json_schema",
            ),
            ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
            ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json"),
            ({"guided_json": circle}, "guided_json"),
            ({"structured_outputs": {"grammar": 'start: start "a"'}}, "structured_outputs.grammar"),
            ({"guided_regex": r"[^\s\S]"}, "guided_regex"),
            ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json"),
            ({"structured_outputs": {"regex": "a" * 50_000}}, "structured_outputs.regex"),
            ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
            ({"bad_words": ["b" * 250] * 256, "guided_regex": '"' * 30_000}, "guided_regex"),
        ):
            status, _, answer = await cluster.post("/v1/completions", {"prompt": "x", **fields})
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert param in answer["error"]["message"]

    run(scenario)
