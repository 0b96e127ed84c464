"""Announces the pool's blocks in the log: joined, inventory, stored, evicted, heartbeat; in their order of time.

Changes wait up to a millisecond for company. Stored and evicted never overtake each other, and an inventory is taken
and queued in one step of the event loop, so that changes behind it in the log are later than it. When the log cannot
take more (`BusOverloaded`), waiting changes are dropped and a new inventory replaces them once there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError, BusOverloaded
from halfmoon.schemas.events import (
    BlocksEvicted,
    BlocksStored,
    Event,
    StoreHeartbeat,
    StoreInventory,
    StoreJoined,
    StoreLeft,
    StoreSuspected,
    TierLost,
)
from halfmoon.schemas.events import Tier as TierName
from halfmoon.schemas.keys import join_keys
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.store.pool.slots import Change, Counts
from halfmoon.store.tiers.base import Tier

#: 16-byte keys in base64 are 22 bytes each: 45 KiB a message, below the log's 64 KiB.
KEYS_PER_MESSAGE = 2048
BATCH_S = 0.001
OVERLOADED_S = 0.25
SUSPECT_AGAIN_NS = SECOND_NS


class Inventory(Protocol):
    """Blocks that are announced: a pool's, or those of an engine that keeps its own."""

    def keys(self) -> list[bytes]:
        """Each block that is there."""

    def counts(self) -> Counts:
        """How full it is, for heartbeats."""


class Announcer:
    """Announces the pool's blocks in the log, in their order of time."""

    def __init__(self, bus: Bus, *, node_id: str, incarnation: str, heartbeat_ns: int) -> None:
        self._bus = bus
        self._node_id = node_id
        self._incarnation = incarnation
        self._heartbeat_ns = heartbeat_ns
        self._pending: list[Change] = []
        self._timer: asyncio.TimerHandle | None = None
        self._inventory: Inventory | None = None
        self._tier: Tier | None = None
        self._joined: Callable[[], StoreJoined] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._suspected_ns: dict[str, int] = {}
        self._overloaded = False
        #: Called with the same changes.
        self.listeners: list[Callable[[list[Change]], None]] = []

    def start(
        self, inventory: Inventory, joined: Callable[[], StoreJoined], tier: Tier | None = None
    ) -> None:
        """Joins. `joined` makes the first message of every announcement; `inventory` and `tier` have the blocks."""
        self._inventory, self._joined, self._tier = inventory, joined, tier
        self.announce()
        self._beating = asyncio.create_task(self._beat())

    async def leave(self, reason: str) -> None:
        """Announces the remaining changes, and that this store is gone."""
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        self.flush()
        with contextlib.suppress(BusError):
            left = StoreLeft(node_id=self._node_id, incarnation=self._incarnation, reason=reason)
            self._bus.append_soon(left, source_id=self._node_id)

    def add(self, changes: list[Change]) -> None:
        """Called with the pool's changes, in order, on the event loop."""
        for listener in self.listeners:
            listener(changes)
        if not changes or self._overloaded:
            return
        self._pending += changes
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self.flush)

    def flush(self) -> None:
        """Sends waiting changes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, []
        start = 0
        while start < len(pending):
            kind, _, tier = pending[start]
            end = start
            while end < len(pending) and pending[end][::2] == (kind, tier) and end - start < KEYS_PER_MESSAGE:
                end += 1
            keys = join_keys([change.key for change in pending[start:end]])
            message = BlocksStored if kind == "stored" else BlocksEvicted
            if not self._append(
                message(node_id=self._node_id, incarnation=self._incarnation, block_keys=keys, tier=tier)
            ):
                return
            start = end

    def announce(self) -> None:
        """Joins again with the whole inventory; nothing older counts then."""
        if self._inventory is None or self._joined is None:
            return
        self.flush()
        if not self._append(self._joined()):
            return
        tiers: list[tuple[TierName, list[bytes]]] = [("dram", self._inventory.keys())]
        if self._tier is not None:
            tiers.append((self._tier.name, self._tier.keys()))
        parts = [
            (tier, keys[i : i + KEYS_PER_MESSAGE])
            for tier, keys in tiers
            for i in range(0, len(keys), KEYS_PER_MESSAGE)
        ] or [("dram", [])]
        for number, (tier, part) in enumerate(parts):
            inventory = StoreInventory(
                node_id=self._node_id,
                incarnation=self._incarnation,
                part=number,
                parts=len(parts),
                block_keys=join_keys(part),
                tier=tier,
            )
            if not self._append(inventory):
                return

    def tier_lost(self, tier: TierName, reason: str) -> None:
        """Announce at once that nothing is on that tier any more. Waiting changes of it would be stale."""
        self._pending = [change for change in self._pending if change.tier != tier]
        lost = TierLost(node_id=self._node_id, incarnation=self._incarnation, tier=tier, reason=reason[:500])
        self.flush()
        self._append(lost)

    def suspect(self, node_id: str, reason: str) -> None:
        """At once; at most once a second for each node."""
        now_ns = time.monotonic_ns()
        if now_ns - self._suspected_ns.get(node_id, -SUSPECT_AGAIN_NS) >= SUSPECT_AGAIN_NS:
            self._suspected_ns[node_id] = now_ns
            self._append(StoreSuspected(node_id=node_id, reporter_id=self._node_id, reason=reason[:500]))

    def _append(self, event: Event) -> bool:
        try:
            self._bus.append_soon(event, source_id=self._node_id)
            return True
        except BusOverloaded:
            if not self._overloaded:
                self._overloaded = True
                asyncio.get_running_loop().call_later(OVERLOADED_S, self._again)
            return False

    def _again(self) -> None:
        self._overloaded = False
        self._pending = []
        self.announce()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_ns / 1e9)
            assert self._inventory is not None
            counts = self._inventory.counts()
            heartbeat = StoreHeartbeat(
                node_id=self._node_id,
                incarnation=self._incarnation,
                slots_used=counts.slots - counts.free,
                slots_leased=counts.leased,
                leases=counts.leases,
            )
            with contextlib.suppress(BusError):
                # Waits for the ack, so that a long cut does not end in a burst.
                await self._bus.append(heartbeat, source_id=self._node_id)
