"""Leases that end because a test says that time has passed, and never because the machine was busy."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.pool.guard import STOOD_NS_MIN
from halfmoon.store.pool.slots import Owner
from tests.eventually import eventually

SECOND_NS = 10**9
LEASE_NS, GRACE_NS = 60 * SECOND_NS, SECOND_NS
#: Of the agents whose clock it is.
LEASES = {
    "lease_ttl_ns": LEASE_NS,
    "transfer_ns_max": LEASE_NS // 2,
    "writer_grace_ns": GRACE_NS,
    "sweep_ns": 20_000_000,
}


class LeaseClock:
    """The clock of the pools and of their workers' leases in this process: it stands still unless `passes` moves it.

    In place of `time` in `store.pool.guard` and `store.agent_client`. Workers look at it every 20 ms.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = time.monotonic_ns()
        monkeypatch.setattr("halfmoon.store.pool.guard.time", self)
        monkeypatch.setattr("halfmoon.store.agent_client.time", self)
        monkeypatch.setattr("halfmoon.store.agent_client.WATCH_S", 0.02)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / 1e9

    async def passes(self, elapsed_ns: int, *agents: StoreAgent, renewed: Sequence[Owner] = ()) -> None:
        """So much time, in steps that are no standstill. After each one the agents have swept; after each that is long
        enough to renew a lease, those of `renewed` have been, at the first agent: this waits for it.
        """
        until_ns = self.now_ns + elapsed_ns
        while self.now_ns < until_ns:
            self.now_ns = min(until_ns, self.now_ns + STOOD_NS_MIN)
            for agent in agents:
                guard = agent.context.guard
                await eventually(lambda guard=guard: guard._swept_ns == self.now_ns, "a sweep", every_s=0.005)
            for owner in renewed:
                await eventually(lambda owner=owner: self._renewed(agents[0], owner), f"{owner} is renewed")

    def _renewed(self, agent: StoreAgent, owner: Owner) -> bool:
        """Within the last half of a lease: workers renew theirs after a quarter."""
        hold, ttl_ns = agent.context.guard._pool.holds.get(owner), agent.context.config.lease_ttl_ns
        return hold is not None and hold.expires_ns >= self.now_ns + ttl_ns // 2
