"""A process that is stopped for longer than its lease and goes on: its late bytes reach nobody's block."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lease_clock import LEASE_NS, LEASES, LeaseClock
from store_harness import Cluster, cluster, keys, until
from test_agent import same, stored
from transport_harness import Side, call

from halfmoon.store.errors import OrderUnknown
from halfmoon.store.pool.guard import peer_writer
from halfmoon.store.pool.slots import Owner
from halfmoon.store.transports.base import Slice
from tests.eventually import BOUND_S

SLOTS = 4
#: After which nothing of a worker that stands still is left, were a last renewal of its leases still on the way.
PAST_NS = 2 * LEASE_NS


class Process:
    """One that waits after each thing that it says."""

    def __init__(self, here: Cluster, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        here.stack.callback(self.end)

    async def says(self) -> str:
        assert self.process.stdout is not None
        line: bytes = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), BOUND_S)
        return line.decode().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    async def until_it_says(self, words: str) -> None:
        while (said := await self.says()) != words:
            assert said not in ("", "refused", "all written"), said
            self.go_on()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def late_writer(here: Cluster, node_id: str) -> Process:
    command = [sys.executable, str(Path(__file__).with_name("late_writer.py")), here.url, node_id]
    return Process(here, command)


async def test_a_worker_that_was_stopped_past_its_lease_writes_into_nobodys_slots(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LeaseClock(monkeypatch)
    async with cluster(nats_url) as here:
        agent = await here.agent("n1", slots=SLOTS, **LEASES)
        late = late_writer(here, "n1")
        await late.until_it_says("layer 0")
        late.process.send_signal(signal.SIGSTOP)
        await clock.passes(PAST_NS, agent)
        assert agent.context.guard.counts().free == SLOTS
        one = await here.client("n1", "w1")
        await stored(one, "o2", keys(*range(SLOTS)), seed=7)
        late.process.send_signal(signal.SIGCONT)
        late.go_on()
        assert await late.says() == "refused"
        opened = await one.open_put("o3", keys(*range(SLOTS)), blocks=SLOTS)
        assert opened.present == list(range(SLOTS))
        assert same(one, opened.slots, 7)
        await one.release("o3")


@pytest.mark.parametrize("ends", [signal.SIGCONT, signal.SIGKILL], ids=["it goes on", "it dies"])
async def test_a_slot_waits_for_the_end_of_a_copy_that_was_stopped_halfway(
    nats_url: str, ends: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LeaseClock(monkeypatch)
    async with cluster(nats_url) as here:
        agent = await here.agent("n1", slots=SLOTS, **LEASES)
        guard = agent.context.guard
        late = late_writer(here, "n1")
        await late.until_it_says("in 0")
        late.process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            await clock.passes(PAST_NS, agent)
            assert (guard.counts().free, guard.counts().condemned) == (SLOTS - 1, 1)
        guard.check()
        late.process.send_signal(ends)
        if ends is signal.SIGCONT:
            late.go_on()
            assert await late.says() == "refused"  # its next block
        await until(lambda: guard.counts().free == SLOTS)


@pytest.mark.pure
async def test_a_store_agent_that_was_stopped_past_a_reservation_writes_into_nobodys_slots() -> None:
    """Over shared memory nobody but the writer itself is there to refuse; its deadline may have been checked before."""
    one, two = Side("shm", "one"), Side("shm", "two")
    one.meet(two)
    theirs = two.reserved(2)
    items = [Slice(0, theirs[0], 0, 4), Slice(1, theirs[1], 0, 4)]
    await one.transport.write(two.peer, items, call())
    two.guard.release(Owner("o", "w"), writers=[peer_writer("one")])
    before = two.view.blocks.copy()
    one.view.blocks[:] = 9
    with pytest.raises(OrderUnknown):
        await one.transport.write(two.peer, items, call())
    assert np.array_equal(two.view.blocks, before)
    assert not two.view.marks.any()
    for side in (one, two):
        await side.close()
