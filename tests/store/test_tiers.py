"""Pool, leases, pins, quotas, SSD tier and eviction together, on real memory and a real file, against sets
and dictionaries; and what a kill at any line of it leaves behind (`make crash-points` does that at length).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from crash_points import run as crash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_harness import SECRET, layout

from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.open_tier import open_tier
from halfmoon.store.agent.release import release
from halfmoon.store.agent.tier_load import promote
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import BlockMissing, OrderUnknown, StoreError, StoreFull, WrongTenant
from halfmoon.store.pool.eviction import EvictionName
from halfmoon.store.pool.guard import WORKER
from halfmoon.store.pool.segment import Segment, segment_name
from halfmoon.store.pool.slots import Change, Owner, tenant_mark
from halfmoon.store.tiers.ssd_file import PAGE_BYTES
from tests.guardian import cluster_name

SHAPE = layout(layers=2, kv_heads=1)
BLOCK = SHAPE.block_bytes
SLOTS, RECORDS, KEYS, QUOTA = 4, 8, 12, 3


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def value(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (2, BLOCK // 2), np.uint8)


def tenant_of(number: int) -> str:
    """The last four keys belong to a tenant with a quota."""
    return tenant_mark("small") if number >= KEYS - 4 else ""


class Announced:
    """In the announcer's place: follows what is said, and finds what cannot be so."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[bytes]] = {"dram": set(), "ssd": set()}

    def add(self, changes: list[Change]) -> None:
        for kind, key, tier in changes:
            if kind == "stored":
                assert key not in self.tiers[tier], (kind, key, tier)
                self.tiers[tier].add(key)
            else:
                self.tiers[tier].remove(key)

    def tier_lost(self, tier: str, why: str) -> None:
        raise AssertionError(why)


class Tiers(RuleBasedStateMachine):
    """Every rule is something that a worker, a client, the disk or an operator does."""

    eviction: EvictionName = "lru"

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.name = cluster_name()
        self.path = Path(self.directory.name) / "tier"
        self.number = 0
        #: Keys whose bytes on the disk were changed behind the tier's back.
        self.bad: set[bytes] = set()
        self.open_agent()

    def open_agent(self) -> None:
        config = StoreConfig(
            cluster=self.name,
            node_id="n1",
            layout=SHAPE,
            slots=SLOTS,
            eviction=self.eviction,
            cluster_secret=SECRET,
            ssd=str(self.path),
            ssd_bytes=2 * PAGE_BYTES + RECORDS * (BLOCK + 64),
            ssd_stop_s=0.0,
            quota=(f"small={QUOTA * BLOCK}",),
            data_port=-1,
        )
        bus: Any = None  # nothing is said to anybody here
        self.context = AgentContext(bus, config)
        self.announced: Any = Announced()
        self.context.announcer = self.announced
        self.context.segment = Segment.create(segment_name(self.name, "n1"), config.geometry)
        self.tier: Any = open_tier(self.context)
        self.context.tier = self.tier
        self.tier._announce = self.announced.add
        self.do(self.tier._open())
        assert self.tier.records == RECORDS
        self.announced.tiers["ssd"] = set(self.tier.keys())
        self.leases: dict[Owner, list[int]] = {}
        self.pinned: set[int] = set()

    def close_agent(self) -> None:
        assert self.context.segment is not None
        self.tier._threads.shutdown()
        self.tier._retire()
        self.context.executor.shutdown()
        self.context.segment.close()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.close_agent()
            self.loop.close()
            self.directory.cleanup()

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def owner(self) -> Owner:
        self.number += 1
        return Owner(f"o{self.number}", "w")

    def held(self) -> set[bytes]:
        pool = self.context.guard._pool
        return {pool.slots[slot].key for hold in pool.holds.values() for slot in hold.slots}

    @rule(first=st.integers(0, KEYS - 1), count=st.integers(1, 4), give_up=st.booleans())
    def put(self, first: int, count: int, give_up: bool) -> None:
        numbers = [n for n in range(first, min(first + count, KEYS)) if tenant_of(n) == tenant_of(first)]
        keys, owner, tenant = [key(n) for n in numbers], self.owner(), tenant_of(first)
        here = [k in self.announced.tiers["dram"] for k in keys]
        pool = self.context.guard._pool
        kept = len(
            {slot for hold in pool.holds.values() for slot in hold.slots}
            | {pool.find(k) for k in keys} - {None}
        )
        own_kept = len(
            {k for k in self.held() if tenant and k >= key(KEYS - 4)}
            | {k for k in keys if tenant and pool.find(k) is not None}
        )
        try:
            hold = self.context.guard.open_put(owner, keys, len(keys), writer=WORKER, tenant=tenant)
        except StoreFull:
            over = bool(tenant) and own_kept + here.count(False) > QUOTA
            assert over or kept + here.count(False) > SLOTS
            return
        assert kept + here.count(False) <= SLOTS
        assert [i in hold.present for i in range(len(keys))] == here
        for i, number in enumerate(numbers):
            if i not in hold.present:
                self.context.view.blocks[hold.slots[i]] = value(number)
        if not give_up:
            self.do(self.context.commit(owner, 0, len(keys)))
        self.do(release(self.context, owner))

    @rule(first=st.integers(0, KEYS - 1), count=st.integers(1, 3))
    def lease(self, first: int, count: int) -> None:
        owner, numbers = self.owner(), list(range(first, min(first + count, KEYS)))
        try:
            self.context.guard.lease(owner, [key(n) for n in numbers], 0)
        except BlockMissing:
            assert not all(key(n) in self.announced.tiers["dram"] for n in numbers)
            return
        self.leases[owner] = numbers

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            owner = data.draw(st.sampled_from(sorted(self.leases)))
            del self.leases[owner]
            assert self.context.guard.release(owner)

    @rule(number=st.integers(0, KEYS - 1), hard=st.booleans(), on=st.booleans())
    def pin(self, number: int, hard: bool, on: bool) -> None:
        try:
            self.context.guard.pin(
                "p", [key(number)], tenant_of(number), hard=hard, ttl_ns=10**12 if on else 0
            )
        except BlockMissing:
            assert key(number) not in self.announced.tiers["dram"]
        except StoreFull:
            assert len(self.pinned) >= SLOTS // 2
        else:
            if hard:
                (self.pinned.add if on else self.pinned.discard)(number)

    @rule()
    def save(self) -> None:
        self.do(self.tier._save_some(SLOTS))

    @rule(first=st.integers(0, KEYS - 1), count=st.integers(1, 3))
    def load_some(self, first: int, count: int) -> None:
        self.load(first, count)

    def load(self, first: int, count: int) -> None:
        keys = [key(n) for n in range(first, min(first + count, KEYS))]
        on_disk = [
            k for k in keys if k in self.announced.tiers["ssd"] and k not in self.announced.tiers["dram"]
        ]
        full = (
            self.context.counters["promotion_store_full"] + self.context.counters["promotion_quota_exceeded"]
        )
        self.do(promote(self.context, self.tier, keys, time.monotonic_ns() + 10**10))
        full -= (
            self.context.counters["promotion_store_full"] + self.context.counters["promotion_quota_exceeded"]
        )
        if not full and not self.bad & set(on_disk):
            assert all(k in self.announced.tiers["dram"] for k in on_disk)
        assert not self.bad & set(on_disk) & self.announced.tiers["dram"]
        self.bad &= self.announced.tiers["ssd"]

    @rule(data=st.data())
    def load_one(self, data: st.DataObject) -> None:
        if only_there := sorted(self.announced.tiers["ssd"] - self.announced.tiers["dram"]):
            self.load(int.from_bytes(data.draw(st.sampled_from(only_there)), "little"), 1)

    @rule(number=st.integers(0, KEYS - 1))
    def remove(self, number: int) -> None:
        idle = key(number) in self.announced.tiers["dram"] and key(number) not in self.held()
        assert bool(self.context.guard.remove([key(number)], tenant_of(number))) == idle
        self.tier.remove([key(number)])
        self.bad.discard(key(number))

    @rule(number=st.integers(KEYS - 4, KEYS - 1))
    def ask_for_anothers(self, number: int) -> None:
        if key(number) in self.announced.tiers["dram"]:
            try:
                self.context.guard.take(self.owner(), [key(number)], tenant_mark("evil"))
            except WrongTenant:
                return
            raise AssertionError("another tenant's block was given out")

    @rule(data=st.data(), at=st.integers(0, BLOCK - 1))
    def the_disk_changes_a_byte(self, data: st.DataObject, at: int) -> None:
        only_there = sorted(self.announced.tiers["ssd"] - self.announced.tiers["dram"])
        if not only_there:
            return
        chosen = data.draw(st.sampled_from(only_there))
        fd = os.open(self.path, os.O_RDWR)
        place = 2 * PAGE_BYTES + self.tier._records[chosen] * BLOCK + at
        (byte,) = os.pread(fd, 1, place)
        os.pwrite(fd, bytes([byte ^ 0x40 if chosen not in self.bad else byte]), place)
        os.fsync(fd)
        os.close(fd)
        self.bad.add(chosen)

    @rule()
    def restart(self) -> None:
        """Without saving anything: what is in memory is lost, what is on the disk is not."""
        on_disk = set(self.tier.keys())
        assert self.tier._file is not None
        self.tier._file.write_table()  # what was forgotten since the last batch
        self.close_agent()
        self.open_agent()
        assert set(self.tier.keys()) == on_disk

    @invariant()
    def all_is_accounted_for(self) -> None:
        if not hasattr(self, "loop"):
            return
        guard = self.context.guard
        guard.check()
        self.tier.check()
        assert self.announced.tiers == {"dram": set(guard.keys()), "ssd": set(self.tier.keys())}
        counts = guard.counts()
        assert counts.free + counts.reserved + counts.committed + counts.condemned == SLOTS
        for number in range(KEYS):
            if (slot := guard.find(key(number))) is not None:
                assert np.array_equal(self.context.view.blocks[slot], value(number)), (
                    f"wrong bytes in block {number}"
                )
        for number in {n for numbers in self.leases.values() for n in numbers} | self.pinned:
            assert guard.find(key(number)) is not None, f"block {number} was evicted though it is held"
        for owner in self.leases:
            with contextlib.suppress(OrderUnknown, StoreError):
                guard.renew(owner, WORKER)


class TiersS3Fifo(Tiers):
    eviction = "s3fifo"


TestTiers = Tiers.TestCase
TestTiersS3Fifo = TiersS3Fifo.TestCase
for case in (TestTiers, TestTiersS3Fifo):
    case.settings = settings(
        max_examples=int(os.environ.get("TIERS_EXAMPLES", "12")), stateful_step_count=40, deadline=None
    )
del case  # or it is collected once more


def test_a_kill_at_any_line_leaves_no_wrong_byte_and_nothing_leaked(nats_url: str, tmp_path: Path) -> None:
    kills = list(crash(nats_url, tmp_path, 5, seed=int(time.time())))
    assert kills
    assert all(found > 0 or missing > 0 for _, _, found, missing in kills)
