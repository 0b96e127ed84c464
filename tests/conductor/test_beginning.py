"""Where a conductor begins: snapshots that are of use, logs whose head is gone."""

from __future__ import annotations

import logging
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from conductor_scripts import S, arrived
from live_conductors import CLUSTER, client, conductor, decisions_of, log_of, reach, replayed, say, status

from halfmoon.bus import snapshots
from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import SnapshotBroken
from halfmoon.conductor.code_version import DECIDING, code_version
from halfmoon.conductor.core.machine import SNAPSHOT_VERSION, Core
from halfmoon.conductor.log_reading import LogUnreadable, check_gap, digest_at
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import AnnounceYourself
from halfmoon.schemas.events import ClusterConfigured, WorkerHeartbeat
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.status import ConductorStatus, StatusRequest
from tests.bus.expiry import expire
from tests.eventually import BOUND_S
from tests.nats_in_process import in_process

QUIET = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S)


async def core_at(bus: Bus, seq: int) -> Core:
    core = Core()
    for stamped in await log_of(bus):
        if stamped.seq <= seq:
            core.step(stamped)
    return core


async def save(bus: Bus, core: Core, *, version: int = SNAPSHOT_VERSION) -> snapshots.SnapshotHead:
    return await snapshots.save(bus, core.seq, core.snapshot(), version=version, code_version="7")


async def first_step(url: str, conductor_id: str = "late") -> int:
    """The first event that a conductor reads that starts now."""
    stepped: list[int] = []
    async with conductor(url, conductor_id, after_step=lambda stamped, _: stepped.append(stamped.seq)):
        pass
    return stepped[0]


@pytest.mark.pure
@in_process
async def test_a_snapshot_of_many_parts_comes_back_as_it_was(url: str) -> None:
    async with client(url) as bus:
        snapshot = bytes(range(256)) * (3 * snapshots.PART_BYTES // 256) + b"tail"
        for _ in range(2):  # as from two conductors
            head = await snapshots.save(bus, 7, snapshot, version=1, code_version="7")
        assert (head.parts, head.size_bytes) == (4, len(snapshot))
        assert await snapshots.heads(bus) == [head]
        assert await snapshots.read(bus, head) == snapshot
        subject = subjects.snapshot(7, head.digest, 2)
        await bus.nc.request(subject, b"other bytes", timeout=BOUND_S)
        with pytest.raises(SnapshotBroken, match="event 7 has other bytes"):
            await snapshots.read(bus, head)


@pytest.mark.pure
@in_process
async def test_snapshots_that_are_broken_or_of_another_version_are_passed_over_with_a_word(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(url) as bus:
        async with conductor(url, policy=QUIET):
            last = await say(bus, *CLUSTER, arrived("r1", 100), arrived("r2", 100))
            expected = await reach(bus, last)
            await decisions_of(bus, 4)
        await save(bus, await core_at(bus, 4))
        foreign = await save(bus, await core_at(bus, 5), version=SNAPSHOT_VERSION + 1)
        broken = await save(bus, await core_at(bus, 6))
        await bus.nc.request(subjects.snapshot(6, broken.digest, 0), b"x", timeout=BOUND_S)
        with caplog.at_level(logging.WARNING):
            assert await first_step(url) == 5
        assert [record.getMessage() for record in caplog.records] == [
            "the snapshot of event 6 is not used: the snapshot of event 6 has other bytes than were saved",
            f"the snapshot of event 5 is of version {foreign.version}, by halfmoon 7; "
            f"this core restores {SNAPSHOT_VERSION}: not used",
        ]
        assert await digest_at(bus, last) == expected.digest
        assert await decisions_of(bus, 4) == replayed(await log_of(bus))


async def test_a_log_whose_head_is_gone_is_read_from_the_snapshot_that_leads_into_it(nats_url: str) -> None:
    async with client(nats_url) as bus:
        async with conductor(nats_url, policy=QUIET):
            last = await say(bus, *CLUSTER, arrived("r1", 100), arrived("r2", 100))
            expected = await reach(bus, last)
        await save(bus, await core_at(bus, 4))
        await save(bus, await core_at(bus, 6))
        await expire(bus, subjects.EVENTS_STREAM, before=7)
        assert await first_step(nats_url) == 7
        async with conductor(nats_url, "c2"):
            assert (await reach(bus, last, "c2")).digest == expected.digest


@pytest.mark.pure
@in_process
async def test_snapshots_of_a_log_that_was_deleted_are_removed(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(url) as bus:
        async with conductor(url, policy=QUIET):
            last = await say(bus, *CLUSTER)
            await reach(bus, last)
        head = await save(bus, await core_at(bus, last))
        await bus.jetstream.ask(f"STREAM.DELETE.{subjects.EVENTS_STREAM}")
        async with conductor(url, "c2", policy=QUIET):  # its connection makes the stream anew
            assert [record.getMessage() for record in caplog.records] == [
                f"the snapshot of event {head.seq} is of a log that is gone: removed"
            ]
            assert await snapshots.heads(bus) == []
            assert (await reach(bus, 1, "c2")).nodes == []


async def test_without_head_and_snapshot_a_conductor_that_is_alone_begins_the_log_anew(nats_url: str) -> None:
    async with client(nats_url) as bus:
        async with conductor(nats_url, policy=QUIET):
            last = await say(bus, *CLUSTER)
            await reach(bus, last)
        await save(bus, await core_at(bus, 3))
        await expire(bus, subjects.EVENTS_STREAM, before=5)  # what leads from event 3 on is gone
        other = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S, seed=5)
        async with conductor(nats_url, "c2", policy=other), conductor(nats_url, "c3", policy=other):
            begun = [s for s in await log_of(bus) if isinstance(s.event, ClusterConfigured)]
            assert [(s.seq, s.event) for s in begun] == [
                (last + 1, ClusterConfigured(code_version=code_version(), log_version=2, policy=other))
            ]
            assert (await status(bus, "c2")).nodes == []
            last = await say(bus, WorkerHeartbeat(worker_id="p0", incarnation="i1"))
            asked = (await decisions_of(bus, 1))[-1]
            assert asked.decision == AnnounceYourself(role="prefill", target_id="p0")
            assert (await reach(bus, last, "c2")).digest == (await reach(bus, last, "c3")).digest
            # A core that had read it all forgets the same.
            core = await core_at(bus, last)
            assert core.digest() == (await status(bus, "c2")).digest


async def test_without_head_and_snapshot_a_conductor_does_not_disturb_one_that_runs(nats_url: str) -> None:
    async with client(nats_url) as bus, conductor(nats_url, policy=QUIET):
        last = await say(bus, *CLUSTER)
        await reach(bus, last)
        core = await core_at(bus, last)
        await expire(bus, subjects.EVENTS_STREAM, before=4)
        with pytest.raises(
            LogUnreadable, match="the log before event 4 is gone, and other conductors have saved no"
        ):
            await first_step(nats_url)
        assert await digest_at(bus, last) is None
        await save(bus, core)
        async with conductor(nats_url, "c2"):
            last = await say(bus, arrived())
            assert (await reach(bus, last, "c2")).digest == (await reach(bus, last)).digest


async def test_a_conductor_that_is_reading_the_log_does_not_speak_for_one_that_has_read_it(
    nats_url: str,
) -> None:
    """The first answer is of one that is still reading: it must not let the late one begin the log anew."""
    told: list[bool] = []

    def answer(_: StatusRequest) -> ConductorStatus:
        told.append(bool(told))
        return ConductorStatus(conductor_id="c0", seq=1, digest="", caught_up=told[-1], policy=QUIET)

    async with client(nats_url) as bus:
        async with conductor(nats_url, policy=QUIET):
            last = await say(bus, *CLUSTER)
            await reach(bus, last)
        await expire(bus, subjects.EVENTS_STREAM, before=4)
        await bus.serve(subjects.status(subjects.CONDUCTORS), StatusRequest, answer)
        with pytest.raises(LogUnreadable, match="other conductors have saved no snapshot"):
            await first_step(nats_url)
        assert told == [False, True]
        assert await bus.last_seq() == last


async def test_events_that_expired_unread_are_told_from_bytes_that_are_no_event(nats_url: str) -> None:
    async with client(nats_url) as bus, conductor(nats_url, policy=QUIET):
        await say(bus, *CLUSTER[:2])
        await bus.nc.request(subjects.event("x", "WorkerHeartbeat"), b"no event", timeout=BOUND_S)
        last = await say(bus, *CLUSTER[2:])
        assert len((await reach(bus, last)).nodes) == 5
        await expire(bus, subjects.EVENTS_STREAM, before=5)
        await check_gap(bus, 4)
        with pytest.raises(LogUnreadable, match="events 3 to 4 expired before they were read"):
            await check_gap(bus, 2)


@pytest.mark.pure
def test_the_code_version_is_of_all_that_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed line anywhere in the core or in the messages is another version; a compiled file is not."""
    folders = {name: tmp_path / name for name in DECIDING}
    for name, folder in folders.items():
        shutil.copytree(str(files(name)), folder)
    monkeypatch.setattr("halfmoon.conductor.code_version.files", folders.__getitem__)
    versions = [code_version.__wrapped__()]
    assert versions == [code_version()]
    (folders["halfmoon.conductor.core"] / "state" / "__pycache__" / "x.pyc").parent.mkdir(exist_ok=True)
    (folders["halfmoon.conductor.core"] / "state" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert code_version.__wrapped__() == versions[0]
    for folder, file in (("halfmoon.conductor.core", "state/cost.py"), ("halfmoon.schemas", "events.py")):
        with (folders[folder] / file).open("a") as source:
            source.write("# another\n")
        versions.append(code_version.__wrapped__())
    assert len(set(versions)) == 3
