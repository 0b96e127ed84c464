"""Random clusters: invariants after every event, equal decisions from equal logs, an end for every accepted
request.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from random_clusters import Cluster, digest

from halfmoon.conductor.core.machine import Core, SnapshotInvalid
from halfmoon.schemas.codec import decode, encode
from halfmoon.schemas.decisions import ReleaseOrder, SetTimer
from halfmoon.schemas.events import Event, RequestArrived, Stamped, WorkerHeartbeat
from tests.conductor.conductor_scripts import nothing_reserved
from tests.lengths import seeds, sizes

ORDERS = 10


def answer_lost(stamped: Stamped) -> bool:
    """A frontend asks again for a request that has ended, because its client never got the end."""
    return isinstance(stamped.event, RequestArrived) and stamped.event.answer_lost


@pytest.mark.parametrize("seed", seeds(2, of=10))
def test_after_the_faults_have_stopped_every_accepted_request_ends(seed: int) -> None:
    cluster = Cluster(seed)
    cluster.run(chaos_s=30, calm_s=120)
    state = cluster.core.state
    assert len(cluster.log) > 500
    assert len(state.workers) + len(state.stores) + len(state.frontends) == len(cluster.processes)
    assert (state.requests, state.orders, state.parked, state.leaving) == ({}, {}, {}, {})
    assert [key for key in state.timers if not key.startswith("lost:")] == []
    for worker in state.workers.values():
        assert nothing_reserved(worker), worker
    for process in cluster.processes.values():
        assert process.under_way() == "", (
            "a client that was told nothing, or a worker that goes on for nobody"
        )


@pytest.mark.parametrize("seed", seeds(2, of=10))
def test_nothing_is_decided_on_a_request_after_its_end(seed: int) -> None:
    cluster = Cluster(1_000 + seed, checked=False)
    cluster.run(chaos_s=20, calm_s=60)
    lost = {getattr(stamped.event, "request_id", "") for stamped in cluster.log if answer_lost(stamped)}
    for request_id, told in cluster.told().items():
        ends = [word for word in told if word in ("RejectRequest", "FailRequest")]
        if ends and "finished" not in told and request_id not in lost:
            assert told.index(ends[0]) == len(told) - 1, (request_id, told)


@pytest.mark.parametrize("count", sizes(1, 10))
@pytest.mark.parametrize("lossy", [True, False])
def test_orders_are_missed_where_messages_are_lost_and_nowhere_else(lossy: bool, count: int) -> None:
    missed = 0
    for seed in range(count):
        cluster = Cluster(4_000 + seed, checked=False, lossy=lossy)
        cluster.run(chaos_s=30, calm_s=0)
        for stamped, decisions in zip(cluster.log, cluster.decided, strict=True):
            if isinstance(stamped.event, WorkerHeartbeat):
                missed += sum(isinstance(decision, ReleaseOrder) for decision in decisions)
    assert (missed > 0) == lossy


@pytest.mark.parametrize("seed", seeds(2, of=10))
def test_the_same_log_gives_the_same_decisions_also_through_snapshots(seed: int) -> None:
    cluster = Cluster(2_000 + seed, checked=False)
    cluster.run(chaos_s=15, calm_s=5)
    expected = digest(cluster.log, cluster.decided, cluster.core)
    draw = random.Random(seed)
    core = Core()
    decided = []
    for stamped in cluster.log:
        # As the log is read: decoded anew.
        again = Stamped(seq=stamped.seq, at_ns=stamped.at_ns, event=decode(encode(stamped.event), Event))
        decided.append(core.step(again))
        if draw.random() < 0.02:
            before = core.digest()
            core = Core.restore(core.snapshot())
            assert core.digest() == before
    assert decided == cluster.decided
    assert digest(cluster.log, decided, core) == expected


def printed_by(*words: str) -> list[list[str]]:
    """What fresh interpreters say of the same seeds, each with another PYTHONHASHSEED."""
    program = Path(__file__).parent / "random_clusters.py"
    running = []
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        running.append(
            subprocess.Popen(
                [sys.executable, str(program), *words], env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    printed = [process.communicate()[0].splitlines() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    return printed


@pytest.mark.parametrize("count", sizes(1, 10))
def test_interpreters_with_different_hash_seeds_decide_alike(count: int) -> None:
    printed = printed_by(*(str(3_000 + seed) for seed in range(count)))
    assert len(printed[0]) == count
    assert printed[0] == printed[1] == printed[2]
    assert len(dict.fromkeys(printed[0])) == count


@pytest.mark.slow
def test_a_core_that_chose_by_hash_would_be_found() -> None:
    first, second, third = printed_by("--by-hash", "3000", "3001", "3002")
    assert first != second or second != third


def in_another_order(log: list[Stamped], draw: random.Random) -> list[Stamped]:
    """The same events, but for neighbours that may swap; places and times stay where they are."""
    events = [stamped.event for stamped in log]
    for place in range(1, len(events) - 1):
        if draw.random() < 0.5:
            events[place], events[place + 1] = events[place + 1], events[place]
    return [Stamped(seq=s.seq, at_ns=s.at_ns, event=event) for s, event in zip(log, events, strict=True)]


def test_each_order_of_the_events_has_its_own_decisions_and_always_the_same() -> None:
    cluster = Cluster(6, checked=False)
    cluster.run(chaos_s=10, calm_s=0)
    digests = []
    for seed in range(ORDERS):
        log = in_another_order(cluster.log, random.Random(seed))
        twice = []
        for _ in range(2):
            core = Core(checked=True)
            twice.append(digest(log, [core.step(stamped) for stamped in log], core))
        assert twice[0] == twice[1]
        digests.append(twice[0])
    assert len(dict.fromkeys(digests)) == ORDERS


def test_an_explanation_is_what_then_happens_and_changes_nothing() -> None:
    cluster = Cluster(5)
    cluster.run(chaos_s=10, calm_s=0)
    core = Core()
    explained = 0
    for stamped, decisions in zip(cluster.log, cluster.decided, strict=True):
        event = stamped.event
        if type(event).__name__ == "RequestArrived" and decisions and core.state.policy.name != "random":
            before = core.digest()
            # The server's clock may be set just there: what time it is for the log, a step alone says.
            then = Core.restore(core.snapshot())
            then.step(stamped)
            verdict = core.explain(event, then.state.at_ns).verdict  # type: ignore[arg-type]
            assert core.digest() == before
            if verdict is None:  # it waits for a worker
                assert [type(decision) for decision in decisions] == [SetTimer]
            else:
                assert verdict.predicted == decisions[0].predicted  # type: ignore[union-attr]
            explained += 1
        core.step(stamped)
    assert explained > 10


def test_what_is_no_snapshot_is_refused() -> None:
    for broken in (b"", b"nonsense", Core().snapshot()[:-1]):
        with pytest.raises(SnapshotInvalid):
            Core.restore(broken)


def test_a_log_that_runs_backwards_is_our_own_fault() -> None:
    cluster = Cluster(1)
    cluster.run(chaos_s=1, calm_s=0)
    with pytest.raises(AssertionError, match="backwards"):
        cluster.core.step(cluster.log[-1])
