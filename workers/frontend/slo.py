"""Did requests hold their SLO? Each against its own, or else the cluster's, which conductors know."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError
from halfmoon.schemas import subjects
from halfmoon.schemas.numbers import tbt_ns
from halfmoon.schemas.status import ConductorStatus, StatusRequest

ASK_S = 30.0
RETRY_S = 1.0


class ClusterSlo:
    """The cluster's, in ns; 0 until it is known."""

    def __init__(self) -> None:
        self.ttft_ns = 0
        self.tbt_ns = 0

    async def follow(self, bus: Bus, learn: Callable[[ConductorStatus], None], every_s: float) -> None:
        """Ask the conductors for ever, `ASK_S` or `every_s` seconds after each answer, which goes to `learn` too."""
        while True:
            pause_s = RETRY_S
            with contextlib.suppress(BusError):
                subject = subjects.status(subjects.CONDUCTORS)
                answer = await bus.request(subject, StatusRequest(), ConductorStatus, timeout_s=2.0)
                learn(answer)
                if answer.caught_up:
                    self.ttft_ns, self.tbt_ns = answer.policy.ttft_slo_ns, answer.policy.tbt_slo_ns
                    pause_s = min(ASK_S, every_s)
            await asyncio.sleep(pause_s)

    def judge(self, ttft_ns: int, intervals_ns: Sequence[int], *, ttft_slo_ns: int, tbt_slo_ns: int) -> str:
        """The verdict on an answered request: "met", or the objective that it missed first, "ttft" or "tbt"; "" while
        none is known.

        `ttft_slo_ns`, `tbt_slo_ns`: its own, or 0.
        """
        ttft_slo_ns, tbt_slo_ns = ttft_slo_ns or self.ttft_ns, tbt_slo_ns or self.tbt_ns
        if not ttft_slo_ns or not tbt_slo_ns:
            return ""
        if ttft_ns > ttft_slo_ns:
            return "ttft"
        return "tbt" if tbt_ns(intervals_ns) > tbt_slo_ns else "met"
