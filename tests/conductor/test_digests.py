"""Conductors compare their states on a real log: what is alike stays alike, what is ill stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator

import pytest
from conductor_scripts import S, arrived
from live_conductors import CLUSTER, client, conductor, decisions_of, log_of, reach, replayed, say

from halfmoon.bus import snapshots
from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.live import digest_exchange, shell
from halfmoon.conductor.live.digest_exchange import SNAPSHOT_DIGESTS, Diverged
from halfmoon.schemas.decisions import Decision
from halfmoon.schemas.events import Stamped, StateDigested, WorkerHeartbeat
from halfmoon.schemas.policy import Policy
from tests.eventually import BOUND_S, eventually
from tests.nats_in_process import in_process

EVERY = 100
QUIET = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S, digest_events=EVERY)


async def beats(bus: Bus, count: int) -> int:
    """So many events that change nothing but the place in the log."""
    for _ in range(count - 1):
        bus.append_soon(WorkerHeartbeat(worker_id="p0", incarnation="i1"), source_id="up")
    return await say(bus, WorkerHeartbeat(worker_id="p0", incarnation="i1"))


def said(log: list[Stamped]) -> dict[int, dict[str, str]]:
    """Place, conductor, digest."""
    found: dict[int, dict[str, str]] = {}
    for stamped in log:
        if isinstance(event := stamped.event, StateDigested):
            found.setdefault(event.at_seq, {})[event.conductor_id] = event.digest
    return found


def digests_of(log: list[Stamped]) -> dict[int, str]:
    """As a fresh core finds them, after each event."""
    core = Core()
    found = {}
    for stamped in log:
        core.step(stamped)
        found[stamped.seq] = core.digest()
    return found


def loud(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@contextlib.asynccontextmanager
async def ill_conductor(url: str, conductor_id: str, *, ill_from: int) -> AsyncIterator[asyncio.Task[None]]:
    """One whose state is changed behind its back after event `ill_from`."""
    bus = await Bus.connect(BusConfig(url=url), name=conductor_id)
    shells: list[shell.Shell] = []

    def corrupt(stamped: Stamped, decisions: list[Decision]) -> None:
        if stamped.seq == ill_from:
            shells[0].core.state.counters.arrived += 1

    def started(made: shell.Shell) -> None:
        made.after_step = corrupt
        shells.append(made)

    task = asyncio.create_task(shell.run(bus, conductor_id=conductor_id, policy=QUIET, started=started))
    try:
        await eventually(lambda: shells and shells[0].caught_up.is_set(), f"{conductor_id} has caught up")
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()


@pytest.mark.pure
@in_process
async def test_conductors_say_the_digest_that_a_fresh_reading_of_the_log_gives(url: str) -> None:
    async with (
        client(url) as bus,
        conductor(url, "c1", QUIET),
        conductor(url, "c2", QUIET),
        conductor(url, "c3", QUIET),
    ):
        await say(bus, *CLUSTER, *[arrived(f"r{number}", 100) for number in range(20)])
        last = await beats(bus, 3 * EVERY)
        for name in ("c1", "c2", "c3"):
            await reach(bus, last, name)
        places = (EVERY, 2 * EVERY, 3 * EVERY)

        async def all_said() -> list[Stamped]:
            log = await log_of(bus)
            return log if all(len(said(log).get(place, ())) == 3 for place in places) else []

        log = await eventually(all_said, "each has said its digests")
        expected = digests_of(log)
        assert said(log) == {at_seq: dict.fromkeys(("c1", "c2", "c3"), expected[at_seq]) for at_seq in places}


@pytest.mark.pure
@in_process
async def test_a_conductor_that_starts_late_goes_on_from_a_snapshot_with_the_same_state(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_exchange, "SNAPSHOTS_KEPT", 1)
    every_snapshot = EVERY * SNAPSHOT_DIGESTS
    async with client(url) as bus, conductor(url, "c1", QUIET), conductor(url, "c2", QUIET):
        await say(bus, *CLUSTER, *[arrived(f"r{number}", 100) for number in range(20)])
        for number in (1, 2):
            last = await beats(bus, every_snapshot)
            saved = [number * every_snapshot]

            async def only_it(saved: list[int] = saved) -> bool:
                return [head.seq for head in await snapshots.heads(bus)] == saved

            await eventually(only_it, f"the snapshot of {saved} alone is there", every_s=0.05)
        heads = await snapshots.heads(bus)
        # Both saved both, and each is there once; the older one is gone.
        kept = 2 * every_snapshot
        assert [(head.seq, head.digest) for head in heads] == [(kept, digests_of(await log_of(bus))[kept])]
        stepped: list[int] = []
        async with conductor(url, "late", after_step=lambda stamped, _: stepped.append(stamped.seq)):
            last = await say(bus, arrived("late", 100))
            assert (await reach(bus, last, "late")).digest == (await reach(bus, last, "c1")).digest
            assert (await reach(bus, last, "late")).digest == digests_of(await log_of(bus))[last]
            assert stepped[0] == kept + 1
            assert await decisions_of(bus, 42) == replayed(await log_of(bus))


@pytest.mark.pure
@in_process
async def test_of_three_conductors_the_one_that_is_ill_stops_within_one_round(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        client(url) as bus,
        conductor(url, "c1", QUIET),
        ill_conductor(url, "c2", ill_from=150) as ill,
        conductor(url, "c3", QUIET),
    ):
        await say(bus, *CLUSTER)
        await beats(bus, 3 * EVERY - 20)
        with pytest.raises(Diverged) as diverged:
            await asyncio.wait_for(ill, BOUND_S)
        found = said(await log_of(bus))
        assert set(found) == {EVERY, 2 * EVERY}
        healthy, corrupt = found[2 * EVERY]["c1"], found[2 * EVERY]["c2"]
        assert found[2 * EVERY]["c3"] == healthy == digests_of(await log_of(bus))[2 * EVERY] != corrupt
        differ = f"the conductors' states differ after event {2 * EVERY}: c1, c3: {healthy}; c2: {corrupt}"
        assert str(diverged.value) == f"{differ}; c2 is in the minority and stops deciding"
        healthy_say = {f"{differ}; {name} is in the majority and goes on" for name in ("c1", "c3")}
        await eventually(lambda: healthy_say <= set(loud(caplog)), "c1 and c3 have judged")
        # Nobody judged the round before: who judges it does so first.
        assert [line for line in loud(caplog) if not line.startswith(differ)] == []
        # The others go on, and what they decide is right.
        last = await say(bus, *[arrived(f"r{number}", 100) for number in range(10)])
        await reach(bus, last, "c1")
        assert await decisions_of(bus, 20) == replayed(await log_of(bus))


@pytest.mark.pure
@pytest.mark.parametrize("ill_first", [False, True])
@in_process
async def test_of_two_conductors_the_one_stops_that_a_fresh_reading_of_the_log_refutes(
    url: str, ill_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ill_id, healthy_id = ("c1", "c2") if ill_first else ("c2", "c1")
    async with (
        client(url) as bus,
        conductor(url, healthy_id, QUIET),
        ill_conductor(url, ill_id, ill_from=50) as ill,
    ):
        await say(bus, *CLUSTER)
        await beats(bus, EVERY)
        with pytest.raises(Diverged, match=f"finds [0-9a-f]* there: {ill_id} stops deciding"):
            await asyncio.wait_for(ill, BOUND_S)
        last = await beats(bus, EVERY)
        assert (await reach(bus, last, healthy_id)).seq >= last
        # A third one reads both voices in the log, and is not misled.
        async with conductor(url, "c3"):
            verdict = await eventually(
                lambda: next((line for line in loud(caplog) if "; c3 " in line), ""), "c3 has judged"
            )
            assert re.search(f" differ after event {EVERY}: .*; c3 is in the majority and goes on$", verdict)
            last = await say(bus, arrived())
            assert (await reach(bus, last, "c3")).digest == (await reach(bus, last, healthy_id)).digest
