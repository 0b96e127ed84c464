"""Answers that come through a gateway: tokens of their parts."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from halfmoon.bus.connection import Bus
from halfmoon.schemas.tokens import AnswerRelayed, EngineNamed
from halfmoon.workers.adapters.actions import AskEngine
from halfmoon.workers.adapters.engines.completion import EngineRefused, Heard
from halfmoon.workers.adapters.relayed import RelayedAnswers

pytestmark = pytest.mark.pure
VOCABULARY = 50_000
BODY = {"model": "e", "cache_salt": "s"}
ASK = AskEngine("o1", "r-o1", BODY, b"", gateway_of="f")


class OneBus:
    """As much of one as relayed answers need."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.receive: Any = None

    async def subscribe(self, subject: str, kind: type, handler: Any, *, author: str) -> None:
        assert (subject, kind, author) == ("halfmoon.relay.vllm-0.*", AnswerRelayed, "frontend_id")
        self.receive = handler

    def publish_soon(self, subject: str, message: Any) -> None:
        self.said.append((subject, message))


async def answered(*parts: AnswerRelayed, at: str = "127.0.0.1:8000") -> list[Heard]:
    """All that is heard of the answer. Raises EngineRefused."""
    bus = OneBus()
    relayed = RelayedAnswers(cast(Bus, bus), "vllm-0", at, {"authorization": "k"}, VOCABULARY)
    await relayed.open()
    found: list[Heard] = []

    async def hear() -> None:
        async for one in relayed.answer(ASK):
            found.append(one)

    hearing = asyncio.ensure_future(hear())
    while not bus.said and not hearing.done():
        await asyncio.sleep(0)
    for part in parts:
        bus.receive(part)
    await hearing
    ((subject, named),) = bus.said
    assert subject == "halfmoon.forward.f.vllm-0"
    assert named == EngineNamed(
        worker_id="vllm-0", request_id="r-o1", order_id="o1", endpoint="127.0.0.1:8000",
        fields=json.dumps(BODY, separators=(",", ":")), headers={"authorization": "k"},
    )  # fmt: skip
    bus.receive(parts[-1])  # nobody waits for it any more
    return found


def part(body: bytes, number: int = 0, **fields: Any) -> AnswerRelayed:
    defaults: dict[str, Any] = {"frontend_id": "f", "order_id": "o1", "streamed": True}
    return AnswerRelayed(number=number, body=body, **{**defaults, **fields})


def line(*ids: int, reason: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "token_ids": list(ids), "finish_reason": reason, "delta": {"content": "x"}}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def ids_of(found: list[Heard]) -> list[int]:
    return [token.token_id for one in found for token in one.tokens]


STREAM = b": comment\n\n" + line() + line(5, 6) + line(9, index=1) + line(7, reason="length")


@pytest.mark.parametrize("size", [1, 7, 64, len(STREAM)])
async def test_a_stream_may_be_cut_anywhere(size: int) -> None:
    cut = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    found = await answered(*(part(one, number) for number, one in enumerate(cut)))
    assert ids_of(found) == [5, 6, 7]
    assert [one.finish_reason for one in found][-1] == "length"
    assert not any(one.whole for one in found)


async def test_another_frontends_parts_and_orders_do_not_count() -> None:
    others = [part(line(1), frontend_id="g"), part(line(2), order_id="o2")]
    assert ids_of(await answered(*others, part(STREAM))) == [5, 6, 7]


@pytest.mark.parametrize("reason", ["tool_calls", "function_call"])
async def test_an_answer_that_calls_a_tool_has_stopped(reason: str) -> None:
    assert (await answered(part(line(5, reason=reason))))[-1].finish_reason == "stop"


async def test_an_answer_that_is_no_stream_is_heard_at_its_end() -> None:
    body = json.dumps({"choices": [{"index": 0, "token_ids": [5, 6], "finish_reason": "stop"}]}).encode()
    (found,) = await answered(
        part(body[:9], streamed=False), part(body[9:], 1, streamed=False), part(b"", 2, streamed=False, ended=True)
    )  # fmt: skip
    assert (ids_of([found]), found.finish_reason, found.whole) == ([5, 6], "stop", True)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([part(line(5)), part(line(6), 2)], "a part of the engine's answer was lost"),
        ([part(line(5), ended=True)], "the engine's answer ended early"),
        ([part(b"data: {", ended=False), part(b"\n", 1)], "not understood"),
        ([part(line(VOCABULARY))], "none of the model's"),
        ([part(b'{"error": {"message": "busy"}}', status=503, ended=True)], "the engine answers 503: busy"),
        ([part(b"no healthy upstream", status=503, ended=True, streamed=False)], "no healthy upstream"),
        ([part(b"{}", streamed=False, ended=True)], "has no tokens"),
        ([part(b"x" * (16 << 20), streamed=False), part(b"x", 1, streamed=False)], "is longer than"),
    ],
)
async def test_an_answer_that_is_none(parts: list[AnswerRelayed], said: str) -> None:
    with pytest.raises(EngineRefused, match=said):
        await answered(*parts)


async def test_an_engine_whose_name_has_no_address() -> None:
    with pytest.raises(EngineRefused, match=r"no-such-host\.invalid:8000"):
        await answered(part(b""), at="no-such-host.invalid:8000")
