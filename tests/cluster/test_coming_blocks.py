"""A prompt that begins as one that is being computed waits for its blocks, on a real cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import nats
import pytest

from halfmoon.schemas.decisions import StartPrefill
from halfmoon.workers.hold_points import PROMPT_LAYER
from tests.cluster.harness import Cluster
from tests.cluster.holding import Holds
from tests.cluster.prompts import prompt
from tests.eventually import eventually

pytestmark = pytest.mark.usefixtures("one_prefill_worker")


@pytest.fixture
def cluster(small: Cluster) -> Cluster:
    """It is left whole."""
    return small


async def test_the_second_of_two_equal_prompts_computes_what_the_first_one_did_not(
    cluster: Cluster, nc: nats.NATS, holds: Holds
) -> None:
    body: dict[str, Any] = {"prompt": prompt(600), "max_tokens": 4, "temperature": 0, "cache_salt": "coming"}
    holds.arm(PROMPT_LAYER)
    first = asyncio.create_task(cluster.generate(nc, **body))
    of_first = await holds.held(PROMPT_LAYER)
    seen = (await cluster.decisions())[-1].cause_seq
    second = asyncio.create_task(cluster.generate(nc, **body))

    async def placed() -> list[StartPrefill]:
        found = [one.decision for one in await cluster.decisions() if one.cause_seq > seen]
        return [one for one in found if isinstance(one, StartPrefill)]

    (order,) = await eventually(placed, "the second prompt is placed")
    assert order.order_id != of_first
    assert order.local_blocks == 2  # none of them is there yet
    holds.go_on()
    answers = [await first, await second]
    assert [answer["usage"]["cached_tokens"] for answer in answers] == [0, 512]
    assert answers[0]["text"] == answers[1]["text"]
