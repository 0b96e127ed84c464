"""`halfmoon bench` against servers that are not halfmoon's: what they do not tell, and what they want to be told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from halfmoon.cli.bench import command
from halfmoon.cli.bench.clients import Model, Record
from halfmoon.cli.bench.http import HttpTarget
from halfmoon.cli.bench.workload import Planned
from halfmoon.cli.commands import parser_of
from halfmoon.cli.options import OptionInvalid

#: As vLLM 0.32 lists its model: without the number of its tokens.
VLLM = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 2560}]}


class Answering:
    """Answers all at once, and keeps what it was asked. Its model is `listed`."""

    where = "here"

    def __init__(self, listed: dict[str, Any]) -> None:
        self.listed, self.asked = listed, list[dict[str, Any]]()

    async def open(self) -> Model:
        return Model.read(self.listed)

    async def ask(self, record: Record, body: dict[str, Any]) -> None:
        self.asked.append(body)
        record.heard_ns.append(record.due_ns)
        record.used({"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]})
        record.end("finished")

    async def close(self) -> None:
        return


async def bench(target: Answering, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(command, "_target", lambda args: target)
    return await command.run(
        parser_of("bench").parse_args(["--requests", "3", "--prompt-tokens", "64", *words])
    )


async def test_a_server_that_does_not_tell_its_vocabulary_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Answering(VLLM)
    with pytest.raises(OptionInvalid, match=r"^--vocab-size: "):
        await bench(target, monkeypatch)
    assert target.asked == []


async def test_prompts_are_of_the_vocabulary_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Answering(VLLM)
    assert await bench(target, monkeypatch, "--vocab-size", "1000") == 0
    ids = [token for body in target.asked for token in body["prompt"]]
    assert len(ids) == 3 * 64
    assert max(ids) < 1000
    told = Answering({"data": [{**VLLM["data"][0], "vocab_size": 50}]})  # type: ignore[dict-item]
    assert await bench(told, monkeypatch) == 0
    assert max(token for body in told.asked for token in body["prompt"]) < 50


async def test_a_vocabulary_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionInvalid, match=r"^--vocab-size -1: "):
        await bench(Answering(VLLM), monkeypatch, "--vocab-size", "-1")


@pytest.mark.parametrize("listed", [{}, {"data": []}, {"data": ["m"]}, {"data": [{"id": "m"}]}], ids=str)
def test_an_answer_that_lists_no_model_is_refused(listed: dict[str, Any]) -> None:
    with pytest.raises(OptionInvalid, match="max_model_len"):
        Model.read(listed)


class Session:
    """As much of an HTTP session as a target uses: one model, and streams of one token."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    @contextlib.asynccontextmanager
    async def post(self, url: str, *, data: bytes, headers: dict[str, str]) -> AsyncIterator[Any]:
        self.sent.append(orjson.loads(data))
        yield self

    status = 200

    @property
    async def content(self) -> AsyncIterator[bytes]:
        yield b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n'
        yield b"data: [DONE]\n"


async def test_each_request_names_the_model() -> None:
    target, session = HttpTarget("http://127.0.0.1:1"), Session()
    target._session, target._model = session, "m"  # type: ignore[assignment]
    record = Record(planned=Planned(number=0, at_ns=0, parts=(), max_tokens=1), due_ns=0)
    await target.ask(record, {"prompt": [1]})
    assert record.outcome == "finished"
    assert [body["model"] for body in session.sent] == ["m"]
