"""The live shell on a real nats-server: one log, any number of conductors, each decision once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from conductor_scripts import S, arrived, finished, keys, prefilled, stored
from live_conductors import (
    CLUSTER,
    POLICY,
    client,
    conductor,
    decisions_of,
    log_of,
    reach,
    replayed,
    say,
    status,
)

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.conductor import log_reading
from halfmoon.conductor.code_version import LOG_VERSION, code_version
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.live.shell import Shell
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.events import (
    ClusterConfigured,
    FrontendHeartbeat,
    Stamped,
    TimerFired,
    WorkerHeartbeat,
)
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.status import ConductorStatus, StatusRequest
from tests.eventually import BOUND_S, eventually
from tests.nats_in_process import in_process

#: What the loss timer of each process of CLUSTER is called.
LOST = (
    "lost:prefill:p0:i1",
    "lost:store:n-p0:i1",
    "lost:decode:d0:i1",
    "lost:store:n-d0:i1",
    "lost:frontend:f1:i1",
)


def losses(log: list[Stamped]) -> dict[str, int]:
    """The names of the timers at whose firing somebody was lost, and the time of the log then."""
    core, found = Core(), {}
    for stamped in log:
        before = members(core)
        core.step(stamped)
        if isinstance(stamped.event, TimerFired) and members(core) < before:
            found[stamped.event.key] = stamped.at_ns
    return found


def members(core: Core) -> set[str]:
    return {*core.state.workers, *core.state.stores, *core.state.frontends}


@pytest.mark.pure
@in_process
async def test_the_first_conductor_writes_the_policy_into_the_log_and_later_ones_do_not(
    url: str,
) -> None:
    other = Policy(name="random")
    async with client(url) as bus, conductor(url), conductor(url, "c2", other):
        log = await log_of(bus)
        assert [stamped.event for stamped in log] == [
            ClusterConfigured(code_version=code_version(), log_version=LOG_VERSION, policy=POLICY)
        ]
        assert (await reach(bus, 1, "c2")).policy == POLICY


@pytest.mark.pure
@in_process
async def test_a_log_of_another_version_is_not_read(url: str) -> None:
    async with client(url) as bus:
        await say(bus, ClusterConfigured(code_version="9.1", log_version=9, policy=POLICY))
        with pytest.raises(
            log_reading.LogUnreadable, match=r"version 9, begun by halfmoon 9.1, which can read it"
        ):
            async with conductor(url):
                pass


@pytest.mark.pure
@in_process
async def test_a_log_whose_last_message_is_no_event_is_read_to_its_end(url: str) -> None:
    quiet = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S)
    async with client(url) as bus:
        begun = ClusterConfigured(code_version=code_version(), log_version=LOG_VERSION, policy=quiet)
        last = await say(bus, begun, *CLUSTER)
        await bus.nc.request(subjects.event("up", "WorkerLeft"), b"broken", timeout=BOUND_S)
        assert await bus.last_seq() == last + 1
        assert [stamped.seq for stamped in await log_of(bus)] == list(range(1, last + 1))
        expected = Core()
        for stamped in await log_of(bus):
            expected.step(stamped)
        assert await log_reading.digest_at(bus, last + 1) == expected.digest()
        async with conductor(url, policy=quiet):
            last = await say(bus, arrived())
            assert (await reach(bus, last)).requests_in_flight == 1


@pytest.mark.pure
@in_process
async def test_a_request_is_ordered_and_its_log_replays_to_the_same_decisions(url: str) -> None:
    quiet = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S)
    async with client(url) as bus, conductor(url, policy=quiet):
        await say(bus, *CLUSTER, stored("p0", keys(5)), arrived())
        first, second = await decisions_of(bus, 2)
        assert (first.cause_seq, first.position, second.position) == (8, 0, 1)
        assert isinstance(first.decision, StartPrefill)
        assert (first.decision.order_id, first.decision.local_blocks) == ("8-1", 5)
        last = await say(bus, prefilled("8-1"), finished("8-1"))
        now = await reach(bus, last)
        assert (now.seq, now.requests_in_flight, now.counts.finished, now.ready) == (last, 0, 1, True)
        assert (now.model, now.block_tokens, now.index_blocks) == ("m", 100, 5)
        assert [(node.id, node.role, node.state, node.kv_total) for node in now.nodes] == [
            ("d0", "decode", "ready", 1_000),
            ("p0", "prefill", "ready", 1_000),
            ("n-d0", "store", "ready", 1_000),
            ("n-p0", "store", "ready", 1_000),
            ("f1", "frontend", "ready", 0),
        ]
        log = await log_of(bus)
        assert await decisions_of(bus, 2) == replayed(log)
        core = Core()
        for stamped in log:
            core.step(stamped)
        assert core.digest() == now.digest


async def test_three_conductors_decide_everything_once(nats_url: str) -> None:
    quiet = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S)
    async with (
        client(nats_url) as bus,
        conductor(nats_url, "c1", quiet) as first,
        conductor(nats_url, "c2", quiet) as second,
        conductor(nats_url, "c3", quiet) as third,
    ):
        await say(bus, *CLUSTER)
        last = await say(bus, *[arrived(f"r{number}", 100) for number in range(50)])
        digests = [(await reach(bus, last, name)).digest for name in ("c1", "c2", "c3")]
        assert len(dict.fromkeys(digests)) == 1
        # All second copies have come, and were dropped: the server has answered to each.
        for each in (first, second, third):
            assert await each.flush(BOUND_S)
        assert await decisions_of(bus, 100) == replayed(await log_of(bus))


@pytest.mark.pure
@in_process
async def test_a_conductor_that_starts_decides_what_was_left_undecided(url: str) -> None:
    quiet = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S)
    async with client(url) as bus:
        async with conductor(url, policy=quiet):
            await say(bus, *CLUSTER, arrived("r1", 100))
            await decisions_of(bus, 2)
        # Nobody is there; one decision of the next request is stored by hand, as if its conductor had died in
        # between.
        seq = await say(bus, arrived("r2", 100), arrived("r3", 100)) - 1
        expected = replayed(await log_of(bus))
        assert len(expected) == 6
        await bus.order(expected[2], target_id="p0")
        async with conductor(url, "c2"):
            assert await decisions_of(bus, 6) == expected
            assert expected[3].cause_seq == seq


@pytest.mark.pure
@in_process
async def test_the_state_is_digested_for_those_alone_that_ask_for_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others ask every second, and a large state would cost them and the log."""
    snapshots: list[int] = []
    plain = Core.snapshot

    def counted(core: Core) -> bytes:
        snapshots.append(core.seq)
        return plain(core)

    async with client(url) as bus, conductor(url):
        seq = await say(bus, *CLUSTER)
        assert len((await reach(bus, seq)).digest) == 32
        monkeypatch.setattr(Core, "snapshot", counted)
        subject = subjects.status("c1")
        plainly = await bus.request(subject, StatusRequest(), ConductorStatus, timeout_s=BOUND_S)
        assert (plainly.digest, plainly.seq, snapshots) == ("", seq, [])
        assert (await status(bus)).digest
        assert snapshots == [seq]


async def test_a_worker_that_falls_silent_is_lost_once_whatever_the_number_of_conductors(
    nats_url: str,
) -> None:
    silent = {"p0", "n-p0", "n-d0"}
    async with client(nats_url) as bus, conductor(nats_url, "c1"), conductor(nats_url, "c2"):
        await say(bus, *CLUSTER)

        async def the_silent_are_lost() -> bool:
            last = await say(
                bus,
                WorkerHeartbeat(worker_id="d0", incarnation="i1"),
                FrontendHeartbeat(frontend_id="f1", incarnation="i1"),
            )
            return not silent & {node.id for node in (await reach(bus, last)).nodes}

        await eventually(the_silent_are_lost, "who says nothing is lost", every_s=0.05)
        log = await log_of(bus)
        fired = [s.event for s in log if isinstance(s.event, TimerFired)]
        assert len(fired) == len(dict.fromkeys((event.key, event.at_ns) for event in fired))
        lost = losses(log)
        # d0 and f1 are there, unless this test itself stood still for too long: then the log says so.
        said = {
            "lost:decode:d0:i1": [s.at_ns for s in log if getattr(s.event, "worker_id", "") == "d0"],
            "lost:frontend:f1:i1": [s.at_ns for s in log if getattr(s.event, "frontend_id", "") == "f1"],
        }
        spoke_in_time = {
            key
            for key, times in said.items()
            if max(later - at for at, later in pairwise([*times, log[-1].at_ns])) < POLICY.lost_after_ns
        }
        assert sorted(lost.keys() & spoke_in_time) == []
        assert sorted(set(LOST) - said.keys()) == sorted(lost.keys() - said.keys())


async def test_conductors_go_on_when_the_server_was_away_and_nobody_is_lost_by_it(
    nats_server: EmbeddedServer,
) -> None:
    url = nats_server.url
    shells: list[Shell] = []
    async with client(url) as bus, conductor(url, shells=shells):
        before = await say(bus, *CLUSTER)
        await reach(bus, before)
        nats_server.stop()
        (only,) = shells
        last_ns = max(only.core.timers[key] for key in LOST)
        await eventually(lambda: only._now_ns() > last_ns, "each loss timer is due for the conductor")
        again = EmbeddedServer.start(nats_server.directory, port=int(url.rsplit(":", 1)[1]))
        try:

            async def all_fired() -> bool:
                fired = {s.event.key for s in await log_of(bus) if isinstance(s.event, TimerFired)}
                return fired >= set(LOST)

            await eventually(all_fired, "every loss timer that was set before has fired")
            # In one breath: whoever has been lost since is there when the request arrives.
            for event in (*CLUSTER, arrived()):
                bus.append_soon(event, source_id="up")
            assert await bus.flush(BOUND_S)

            async def placed() -> bool:
                kinds = [type(o.decision) for o in await decisions_of(bus, 1)]
                return [kind for kind in kinds if kind in (StartPrefill, StartDecode)] == [
                    StartPrefill,
                    StartDecode,
                ]

            await eventually(placed, "the request is placed")
            log = await log_of(bus)
        finally:
            again.stop()
    times = {stamped.seq: stamped.at_ns for stamped in log}
    away_ns = times[before + 1] - times[before]
    assert away_ns > POLICY.lost_after_ns
    for key, lost_ns in losses(log).items():
        assert lost_ns - times[1] - away_ns >= POLICY.lost_after_ns, f"{key}: the server's silence counted"
