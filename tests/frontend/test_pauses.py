"""Neither a pause of placements nor an answer through a gateway is a worker's silence: what waits for their end is not
failed.
"""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.status import ConductorStatus
from halfmoon.workers.frontend.open_request import OpenRequest
from halfmoon.workers.frontend.redelivery import Redelivery
from halfmoon.workers.frontend.registry import RequestRegistry

SILENCE_S = 120


class Registry:
    """As much of one as redelivery needs."""

    def __init__(self) -> None:
        self.bus: Any = None
        self.metrics: Any = None
        self.config: Any = SimpleNamespace(resend_after_ns=SECOND_NS, silence_s=SILENCE_S)
        self.requests: dict[str, OpenRequest] = {}
        self.paused = False
        self.failed: list[str] = []

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        raise AssertionError("no worker has the request, so that none can be asked")

    def fail(self, request: OpenRequest, error: ApiError, reason: str = "") -> None:
        self.failed.append(reason)


def waiting() -> OpenRequest:
    """Accepted at 0, and no worker named."""
    found = SimpleNamespace(
        request_id="r1", polled_at_ns=0, heard_at_ns=0, progress_at_ns=0, output_ids=[], order_id="", decode_worker="",
        resending=False, answered_elsewhere=False, arrived=SimpleNamespace(ttft_slo_ns=0),
    )  # fmt: skip
    return cast(OpenRequest, found)


@pytest.mark.parametrize("why", ["paused", "answered elsewhere"])
@pytest.mark.parametrize("paused_s", [0, 3_600])
def test_silence_begins_when_a_pause_ends(paused_s: int, why: str) -> None:
    registry, request = Registry(), waiting()
    redelivery = Redelivery(registry, lambda _: None)
    registry.paused, request.answered_elsewhere = why == "paused", why != "paused"
    for second in range(paused_s):
        redelivery.watch(request, second * SECOND_NS)
    registry.paused = request.answered_elsewhere = False
    ended_ns = max(0, paused_s - 1) * SECOND_NS
    redelivery.watch(request, ended_ns + SILENCE_S * SECOND_NS)
    assert registry.failed == []
    redelivery.watch(request, ended_ns + (SILENCE_S + 1) * SECOND_NS)
    assert registry.failed == ["silence"]


def test_a_pause_is_known_by_the_conductors_that_know_all() -> None:
    registry = RequestRegistry.__new__(RequestRegistry)
    registry.prompts = cast(Any, SimpleNamespace(learn=lambda _: None))
    registry.paused = False

    def says(*, paused: bool, caught_up: bool = True) -> None:
        told = ConductorStatus(
            conductor_id="c0", seq=1, digest="", caught_up=caught_up, policy=Policy(), paused=paused
        )
        registry.learn(told)

    says(paused=True)
    assert registry.paused
    says(paused=False, caught_up=False)
    assert registry.paused
    says(paused=False)
    assert not registry.paused
