"""Looks at an engine's health: what proves that it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.adapters.actions import AskEngine
from halfmoon.workers.adapters.engine_link import EngineLink
from halfmoon.workers.adapters.engines import api as engine_api
from halfmoon.workers.adapters.engines.api import EngineAway
from halfmoon.workers.adapters.engines.completion import Heard
from halfmoon.workers.adapters.engines.vllm import VllmApi
from halfmoon.workers.adapters.engines.words import VllmWords
from halfmoon.workers.adapters.events import AnswerBroke, EngineAsked, EngineLooked, TokensHeard
from halfmoon.workers.adapters.mirror import EngineMirror
from tests.eventually import within

pytestmark = pytest.mark.pure


class StandIn(VllmApi):
    """It answers with one token, or breaks off before it."""

    def __init__(self) -> None:
        super().__init__("http://engine")
        self.breaks, self.looks = False, list[str]()

    async def complete(self, body: dict[str, Any], vocabulary: int) -> AsyncIterator[Heard]:
        if self.breaks:
            raise EngineAway("broken")
        yield Heard([SampledToken(token_id=7)], "length")

    async def healthy(self) -> None:
        self.looks.append("health")

    async def cache_percent(self) -> float:
        self.looks.append("cache")
        return 5.0


def asked(number: int) -> AskEngine:
    return AskEngine(order_id=f"o{number}", request_id=f"r{number}", body={}, block_keys=b"")


@pytest.mark.parametrize(
    ("answers", "breaks", "looks"),
    [
        (0, False, ["health", "cache"]),
        # A token is as good as a look.
        (1, False, ["cache"]),
        # A connection that breaks is not, whatever came before.
        (1, True, ["cache", "health", "cache"]),
    ],
)
async def test_an_engine_is_asked_for_its_health_where_its_tokens_do_not_show_it(
    answers: int, breaks: bool, looks: list[str]
) -> None:
    api, heard = StandIn(), asyncio.Queue[Any]()
    mirror = EngineMirror(
        block_tokens=256, cache_tokens=1_024, cache_blocks=64, events="", replay="", topic=""
    )
    link = EngineLink(api, VllmWords("m"), mirror, 100)
    link.hear = heard.put_nowait
    for number in range(answers):
        await link.ask(asked(number))
        assert [type(heard.get_nowait()) for _ in range(2)] == [EngineAsked, TokensHeard]
    looking = asyncio.create_task(link.look_after())
    assert isinstance(await heard.get(), EngineLooked)
    if breaks:
        api.breaks = True
        await link.ask(asked(9))
        assert [type(heard.get_nowait()) for _ in range(3)] == [EngineAsked, EngineLooked, AnswerBroke]
    assert api.looks == looks
    looking.cancel()


async def test_a_stream_that_does_not_end_behind_its_last_token_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_api, "_END_S", 0.0)
    silent = SimpleNamespace(content=SimpleNamespace(readany=asyncio.Event().wait))
    await within(engine_api._ended(cast("Any", silent)), "the stream is left")
