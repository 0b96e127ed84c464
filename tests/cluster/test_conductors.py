"""Three conductors, all active: any two are killed at any moment, and no request feels it."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import Ordered, SetTimer, StartDecode, StartPrefill
from halfmoon.schemas.events import RequestArrived, RequestFinished, Stamped, WorkerLeft
from tests.cluster.harness import PATIENT, Cluster, children, command_of, running
from tests.cluster.steering import nobody_is_started_again
from tests.eventually import BOUND_S, eventually

NAMES = ("conductor-0", "conductor-1", "conductor-2")
CLIENTS = 8
#: Requests of each client.
IN_PEACE = 2
MEANWHILE = 10
BY_THE_SURVIVOR = 5
ROUNDS = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # A worker that is started again on a busy machine is waited for.
    flags = ("--engine", "null", "--conductors", "3", "--worker-wait-s", "120", *PATIENT)
    with running(tmp_path_factory.mktemp("conductors"), *flags) as one:
        yield one


class Load:
    """Clients that each send the next request when the last one is answered; `asked` and `answered` of them all."""

    def __init__(self, cluster: Cluster, nc: nats.NATS) -> None:
        self.asked = self.answered = 0
        self._cluster = cluster
        self._nc = nc

    async def run(self, requests: int) -> None:
        """So many of each client; returns when the last one is answered."""
        await asyncio.gather(*(self._one_by_one(requests) for _ in range(CLIENTS)))

    async def run_until(self, over: asyncio.Event) -> None:
        """As many as it takes: however fast they are answered, there is load until then."""
        await asyncio.gather(*(self._until(over) for _ in range(CLIENTS)))

    async def _one_by_one(self, requests: int) -> None:
        for _ in range(requests):
            await self._one()

    async def _until(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await self._one()

    async def _one(self) -> None:
        self.asked += 1
        body = await self._cluster.generate(
            self._nc, timeout=BOUND_S, prompt="the moon", max_tokens=4, ignore_eos=True
        )
        assert body["usage"]["completion_tokens"] == 4
        self.answered += 1


def dead(pid: int) -> bool:
    """Its parent need not have heard of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def conductors_alive(cluster: Cluster) -> int:
    return sum("conductor" in command_of(pid)[:5] for pid in children(cluster.process.pid))


async def test_any_two_die_at_any_moment_and_no_request_is_lost_or_decided_twice(cluster: Cluster) -> None:
    """Nor does any wait for a conductor to come back: all are answered while the two are dead."""
    draw = random.Random(20)
    nc = await cluster.connect()
    load = Load(cluster, nc)
    await load.run(IN_PEACE)
    for _ in range(ROUNDS):
        await cluster.all_conductors(3)
        with nobody_is_started_again(cluster):
            over = asyncio.Event()
            running_load = asyncio.ensure_future(load.run_until(over))
            for name in draw.sample(NAMES, 2):
                goal = load.answered + draw.choice([0, 3, 20])
                await eventually(lambda goal=goal: load.answered >= goal, f"{goal} answers")  # type: ignore[misc]
                pid = cluster.kill(name)
                await eventually(lambda pid=pid: dead(pid), f"{name} is dead")  # type: ignore[misc]
            await load.run(BY_THE_SURVIVOR)
            over.set()
            await running_load
            assert conductors_alive(cluster) == 1
    await cluster.all_conductors(3)
    await nc.close()
    assert load.answered == load.asked > ROUNDS * CLIENTS * BY_THE_SURVIVOR
    decided_once_and_alike(await cluster.events(), await cluster.decisions())


def decided_once_and_alike(log: list[Stamped], decisions: list[Ordered]) -> None:
    """The stream holds what a core decides on the log, each once; every request was placed and finished once."""
    core = Core()
    expected = [
        Ordered(cause_seq=stamped.seq, position=position, decision=decision)
        for stamped in log
        for position, decision in enumerate(core.step(stamped))
        if not isinstance(decision, SetTimer)
    ]
    assert decisions == expected[: len(decisions)]
    placed = Counter(o.decision.request_id for o in decisions if isinstance(o.decision, StartPrefill))
    finished = Counter(s.event.request_id for s in log if isinstance(s.event, RequestFinished))
    arrived = Counter(s.event.request_id for s in log if isinstance(s.event, RequestArrived))
    assert placed == finished == arrived
    assert set(arrived.values()) == {1}


async def test_a_conductor_that_was_stopped_for_a_while_disturbs_nobody(cluster: Cluster) -> None:
    nc = await cluster.connect()
    await cluster.all_conductors(3)
    load = Load(cluster, nc)
    cluster.kill("conductor-1", signal.SIGSTOP)
    try:
        await load.run(MEANWHILE)
    finally:
        cluster.kill("conductor-1", signal.SIGCONT)
    await load.run(IN_PEACE)

    async def at_one_place() -> bool:
        states = await cluster.all_conductors(3)
        return len({(state.seq, state.digest) for state in states}) == 1

    await eventually(at_one_place, "all conductors are at the same place with the same state")
    await nc.close()
    decided_once_and_alike(await cluster.events(), await cluster.decisions())


@pytest.mark.slow
@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_requests_wait_while_every_worker_of_a_role_is_restarted(cluster: Cluster, half: str) -> None:
    """As a rolling restart where there is one worker of a role: nothing is refused, nothing lost."""
    nc = await cluster.connect()
    await cluster.all_conductors(3)
    before = (await cluster.events())[-1].seq
    load = Load(cluster, nc)

    async def logged(kind: type[RequestArrived | WorkerLeft]) -> list[Stamped]:
        return [stamped for stamped in await cluster.events(before) if isinstance(stamped.event, kind)]

    async def both_left() -> bool:
        return len(await logged(WorkerLeft)) == 2

    async def all_arrived() -> bool:
        return len(await logged(RequestArrived)) == CLIENTS

    with nobody_is_started_again(cluster):
        for place in range(2):
            cluster.kill(f"{half}-{place}", signal.SIGTERM)
        await eventually(both_left, "both workers have left")
        running_load = asyncio.ensure_future(load.run(1))
        await eventually(all_arrived, "the requests are in the log")
        assert load.answered == 0
    await running_load
    await nc.close()
    assert load.answered == CLIENTS
    arrived = {stamped.event.request_id: stamped.seq for stamped in await logged(RequestArrived)}
    first = {
        o.decision.request_id: o.cause_seq
        for o in await cluster.decisions()
        if isinstance(o.decision, StartDecode) and o.decision.placement == 1
    }
    # All came while there was no worker, and were placed when one joined.
    assert all(first[request_id] > seq for request_id, seq in arrived.items())
