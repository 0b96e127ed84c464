"""Three conductors, all active: any two are killed at any moment, and no request feels it."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import nats
import pytest

from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import Ordered, SetTimer, StartDecode, StartPrefill
from halfmoon.schemas.events import RequestArrived, RequestFinished, Stamped
from tests.cluster.harness import Cluster, running

NAMES = ("conductor-0", "conductor-1", "conductor-2")
REQUESTS_S = 40
CALM_S = 2.0
ROUNDS = 2
#: Beyond what the machine itself stood still meanwhile.
DELAY_MS_MAX = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("conductors"), "--engine", "null", "--conductors", "3") as one:
        yield one


async def conductors(cluster: Cluster, count: int) -> None:
    """Waits until so many answer."""
    async with asyncio.timeout(30):
        while len(await cluster.conductors()) < count:
            await asyncio.sleep(0.05)


class Load:
    """Requests at a steady pace; `latency_ms` by the time at which they were sent. `late_ms`: by how much the pace was
    missed at most, as a machine that has other things to do lets a process wait.
    """

    def __init__(self, cluster: Cluster, nc: nats.NATS) -> None:
        self.latency_ms: list[tuple[float, float]] = []
        self.late_ms = 0.0
        self._cluster = cluster
        self._nc = nc
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, seconds: float) -> None:
        started = time.monotonic()
        for number in range(int(seconds * REQUESTS_S)):
            due = started + number / REQUESTS_S
            await asyncio.sleep(max(0, due - time.monotonic()))
            self.late_ms = max(self.late_ms, (time.monotonic() - due) * 1e3)
            self._tasks.append(asyncio.create_task(self._one()))

    async def end(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _one(self) -> None:
        started = time.monotonic()
        body = await self._cluster.generate(
            self._nc, timeout=30, prompt="the moon", max_tokens=4, ignore_eos=True
        )
        assert body["usage"]["completion_tokens"] == 4
        self.latency_ms.append((started, (time.monotonic() - started) * 1e3))


async def test_any_two_die_at_any_moment_and_no_request_is_late_lost_or_decided_twice(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(20)
    nc = await cluster.connect()
    await conductors(cluster, 3)
    load = Load(cluster, nc)
    await load.run(0.5)
    calm_from = time.monotonic()
    await load.run(CALM_S)
    killed_from = time.monotonic()
    for _ in range(ROUNDS):
        running_load = asyncio.ensure_future(load.run(1.0))
        await asyncio.sleep(draw.random() * 0.5)
        for name in draw.sample(NAMES, 2):
            cluster.kill(name)
            await asyncio.sleep(draw.choice([0, 0.02, 0.2]))
        await running_load
        await conductors(cluster, 3)
    await load.end()
    await nc.close()
    calm = sorted(ms for at, ms in load.latency_ms if calm_from <= at < killed_from)
    killed = sorted(ms for at, ms in load.latency_ms if at >= killed_from)
    assert len(load.latency_ms) == int(0.5 * REQUESTS_S) + int(CALM_S * REQUESTS_S) + ROUNDS * REQUESTS_S
    log, decisions = await cluster.events(), await cluster.decisions()
    waits_ms = decision_waits_ms(log, await cluster.raw("DECISIONS"), decisions)
    with capsys.disabled():
        print(
            f"\nlatency of {len(calm)} requests in peace: {calm[len(calm) // 2]:.1f} ms, at most {calm[-1]:.1f}; "
            f"of {len(killed)} while {2 * ROUNDS} conductors were killed: {killed[len(killed) // 2]:.1f} ms, at most "
            f"{killed[-1]:.1f}; from arrival to decision, by the server's clock, at most {max(waits_ms):.1f} ms"
        )
    assert killed[-1] - calm[len(calm) // 2] < DELAY_MS_MAX + 5 * load.late_ms
    assert max(waits_ms) < DELAY_MS_MAX + 5 * load.late_ms
    decided_once_and_alike(log, decisions)


def decision_waits_ms(
    log: list[Stamped], raw: list[tuple[int, int, bytes]], decisions: list[Ordered]
) -> list[float]:
    """From RequestArrived to its first StartPrefill, as the server stored them."""
    stored_ns: dict[str, int] = {}
    for (_, at_ns, _), ordered in zip(raw, decisions, strict=False):
        if isinstance(ordered.decision, StartPrefill):
            stored_ns.setdefault(ordered.decision.request_id, at_ns)
    arrived_ns = {s.event.request_id: s.at_ns for s in log if isinstance(s.event, RequestArrived)}
    return [(stored_ns[request_id] - at_ns) / 1e6 for request_id, at_ns in arrived_ns.items()]


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
    await conductors(cluster, 3)
    load = Load(cluster, nc)
    cluster.kill("conductor-1", signal.SIGSTOP)
    try:
        await load.run(1.0)
    finally:
        cluster.kill("conductor-1", signal.SIGCONT)
    await load.run(0.5)
    await load.end()
    # All conductors are at the same place with the same state.
    async with asyncio.timeout(20):
        while True:
            states = await cluster.conductors()
            if len(states) == 3 and len({(state.seq, state.digest) for state in states}) == 1:
                break
            await asyncio.sleep(0.05)
    await nc.close()
    decided_once_and_alike(await cluster.events(), await cluster.decisions())


@pytest.mark.slow
@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_requests_wait_while_every_worker_of_a_role_is_restarted(cluster: Cluster, half: str) -> None:
    """As a rolling restart where there is one worker of a role: nothing is refused, nothing lost."""
    nc = await cluster.connect()
    await conductors(cluster, 3)
    before = (await cluster.events())[-1].seq
    load = Load(cluster, nc)
    running_load = asyncio.ensure_future(load.run(1.0))
    await asyncio.sleep(0.2)
    for place in range(2):
        cluster.kill(f"{half}-{place}", signal.SIGTERM)
    await running_load
    await load.end()
    await nc.close()
    assert len(load.latency_ms) == REQUESTS_S
    arrived = {
        s.event.request_id: s.seq for s in await cluster.events(before) if isinstance(s.event, RequestArrived)
    }
    first = [
        o
        for o in await cluster.decisions()
        if isinstance(o.decision, StartDecode) and o.decision.placement == 1
    ]
    # Some came while there was no worker, and were placed when one joined.
    assert [o for o in first if o.cause_seq > arrived.get(o.decision.request_id, o.cause_seq)]
