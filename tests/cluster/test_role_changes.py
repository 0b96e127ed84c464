"""Prefill and decode workers change roles again and again while clients ask: no request is lost, none is served twice.

Eight changes are made among the slow tests, all 200 by `make test-roles`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from halfmoon.conductor.core.machine import Core
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import ChangeRole, RejectRequest, StartDecode
from halfmoon.schemas.events import RequestArrived, RequestFinished, RoleWanted, WorkerJoined
from halfmoon.schemas.roles import ELASTIC_ROLES, WorkerRole
from halfmoon.schemas.status import ConductorStatus
from tests.chaos.live import FLAGS, PATIENCE, come_to_rest, replayed
from tests.chaos.live_load import Load
from tests.chaos.live_watch import Watch
from tests.cluster.harness import Cluster, children, running
from tests.cluster.test_roles import change, roles

CHANGES = int(os.environ.get("HALFMOON_TEST_ROLES", "8"))
#: One in so many is ordered by the command, the others by its event: a Python that starts takes the cores of the load.
BY_COMMAND = 5
#: Prompts that compute for seconds are among the load, and the machine may do other things.
CHANGE_S_MAX = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600 + 30 * CHANGES)]
Change = tuple[str, WorkerRole]


def drawn(draw: random.Random, now: dict[str, str]) -> list[Change]:
    """What may be ordered at once: a worker of a role that has another, and in every third turn one of each role."""
    found: list[Change] = []
    for place, role in enumerate(ELASTIC_ROLES):
        those = sorted(worker for worker, has in now.items() if has == role)
        if len(those) > 1:
            found.append((draw.choice(those), ELASTIC_ROLES[1 - place]))
    draw.shuffle(found)
    return found if draw.random() < 0.33 else found[:1]


async def order(cluster: Cluster, changes: list[Change]) -> None:
    """Returns when all have their new role."""
    bus = await cluster.bus()
    for worker, role in changes:
        await bus.append(RoleWanted(target_id=worker, role=role), source_id=subjects.OPERATOR)
    await bus.close()
    deadline = time.monotonic() + CHANGE_S_MAX
    states: list[ConductorStatus] = []
    while time.monotonic() < deadline:
        states = await cluster.conductors(1)
        # A worker's store agent has the same name.
        nodes = [node for state in states for node in state.nodes if node.role in ELASTIC_ROLES]
        now = {node.id: (node.role, node.state) for node in nodes}
        if all(now.get(worker) == (role, "ready") for worker, role in changes):
            return
        await asyncio.sleep(0.1)
    raise AssertionError((changes, states))


async def change_under_load(cluster: Cluster, draw: random.Random, load: Load) -> list[Change]:
    """All changes, as they were ordered."""
    made: list[Change] = []
    while len(made) < CHANGES:
        changes = drawn(draw, await roles(cluster))[: CHANGES - len(made)]
        before = sum(load.ended.values())
        if len(changes) == 1 and len(made) % BY_COMMAND == 0:
            done = await change(cluster, *changes[0])
            assert done.returncode == 0, (changes, done.stdout, done.stderr)
        else:
            await order(cluster, changes)
        made += changes
        async with asyncio.timeout(CHANGE_S_MAX):
            while sum(load.ended.values()) == before:  # an answer comes between any two changes
                await asyncio.sleep(0.05)
    return made


async def busy_changes(cluster: Cluster) -> int:
    """Changes whose worker still had requests when it was told."""
    core, busy = Core(), 0
    for stamped in await cluster.events():
        for decision in core.step(stamped):
            if isinstance(decision, ChangeRole):
                busy += bool(core.state.workers[decision.worker_id].orders)
    return busy


async def served_once(cluster: Cluster, learned: int, load: Load) -> None:
    """By the log: each request was placed once and finished once, and nothing but the clients' requests is there."""
    events = [stamped.event for stamped in await cluster.events()]
    arrived = Counter(event.request_id for event in events if isinstance(event, RequestArrived))
    finished = Counter(event.request_id for event in events if isinstance(event, RequestFinished))
    decided = [ordered.decision for ordered in await cluster.decisions()]
    placed = Counter(one.request_id for one in decided if isinstance(one, StartDecode))
    assert (arrived, placed) == (finished, finished)
    assert set(finished.values()) == {1}
    assert len(finished) == learned + sum(load.ended.values())
    assert not any(isinstance(one, RejectRequest) for one in decided)


async def test_no_request_is_lost_or_repeated_while_roles_change(tmp_path: Path) -> None:
    draw = random.Random(15)
    # The planner only advises: who changes is drawn here.
    assert FLAGS[-1] == "--elastic"
    with running(tmp_path, *FLAGS, "advise", *PATIENCE) as cluster:
        processes = sorted(children(cluster.process.pid))
        load, watch = Load(cluster, draw, clients=4, gives_up=False), Watch(cluster)
        await load.learn()
        learned = sum(isinstance(one.event, RequestArrived) for one in await cluster.events())
        loading, watching = asyncio.create_task(load.run()), asyncio.create_task(watch.run())
        made = await change_under_load(cluster, draw, load)
        load.stop()
        await loading
        watching.cancel()
        assert (load.wrong, list(load.ended)) == ([], ["finished"]), load.ended
        await served_once(cluster, learned, load)
        assert await come_to_rest(cluster) == ""
        assert sorted(children(cluster.process.pid)) == processes, "a process was started anew"
        ordered = [one.decision for one in await cluster.decisions() if isinstance(one.decision, ChangeRole)]
        assert sorted((each.worker_id, each.role) for each in ordered) == sorted(made)
        joined = [one.event for one in await cluster.events() if isinstance(one.event, WorkerJoined)]
        # A worker may say once more that it is there.
        assert len({one.incarnation for one in joined}) == 4 + len(made), "nobody was lost"
        busy = await busy_changes(cluster)
        assert 4 * busy >= len(made), "the clients asked too little"
        assert watch.grown() == []
        same = replayed(cluster, tmp_path)
    print(f"{len(made)} changes, {busy} of them with requests; {load.ended['finished']} requests; {same}")
