"""KV moves between decode workers while they decode: a request that waits for room joins, and every text is its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import pytest

from halfmoon.conductor.core.invariants import check
from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import MoveKv, SetTimer
from halfmoon.schemas.events import DecodeStarted, KvMoved, KvMoveRefused, RequestArrived
from halfmoon.workers.hold_points import MOVE
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.holding import Holds, running_with_holds
from tests.cluster.prompts import prompt
from tests.cluster.steering import nobody_is_started_again, patient_with_restarts
from tests.cluster.test_lending import nothing_is_held
from tests.eventually import eventually
from tests.lengths import by_make_test_attention

#: Blocks of 256 tokens, segments of four: a cache holds one long prompt with its answer, and little more.
SIZES = ("--decode-kv-blocks", "12", "--prefill-kv-blocks", "12", "--prefill", "1", "--decode", "2")
#: Queued, and by turns: the long one and the one that waits are at one worker.
SKEW = ("--policy", "round_robin", "--admission", "none", "--move-period-s", "0.2")
MOVING = ("--lend", "--dtype", "float32", *SIZES, *SKEW, "--worker-wait-s", "120", *PATIENT)
LONG, SHORT, ANSWER = 2200, 900, 200
#: 1,024 tokens of 30 layers with 3 heads of 64 numbers of K and of V.
SEGMENT_BYTES = 1024 * 30 * 2 * 3 * 64 * 4
T = TypeVar("T")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(390), by_make_test_attention]


async def ask(cluster: Cluster, nc: Any, tokens: int, max_tokens: int) -> list[int]:
    answer = await cluster.generate(
        nc, prompt=prompt(tokens), max_tokens=max_tokens, temperature=0, ignore_eos=True, timeout=400
    )
    found: list[int] = answer["token_ids"]
    return found


async def skewed(cluster: Cluster, nc: Any) -> list[asyncio.Task[list[int]]]:
    """A long answer at decode-0, a short one to a prompt as long at decode-1, and one that waits for room."""
    asked: list[asyncio.Task[list[int]]] = []

    async def all_arrived() -> bool:
        return len(await events_of(cluster, RequestArrived)) == len(asked)

    for tokens, max_tokens in ((LONG, ANSWER), (LONG - 1, 8), (SHORT, 12)):
        asked.append(asyncio.create_task(ask(cluster, nc, tokens, max_tokens)))
        await eventually(all_arrived, "it has arrived, and is the last one", every_s=0.1)
    return asked


async def events_of(cluster: Cluster, kind: type[T]) -> list[T]:
    return [one.event for one in await cluster.events() if isinstance(one.event, kind)]


async def moves_of(cluster: Cluster) -> list[MoveKv]:
    return [one.decision for one in await cluster.decisions() if isinstance(one.decision, MoveKv)]


async def in_mid_move(cluster: Cluster, holds: Holds) -> MoveKv:
    """Some tokens are at the lender; the owner sends no more. MOVE is armed."""
    lender_id = await holds.held(MOVE)
    (ordered,) = await eventually(lambda: moves_of(cluster), "the move is stored", every_s=0.1)
    assert ordered.lender_id == lender_id
    assert await events_of(cluster, KvMoved) == []
    return ordered


async def test_kv_that_moves_lets_another_request_join_and_changes_no_text(tmp_path: Path) -> None:
    with running(tmp_path, *MOVING) as cluster:
        nc = await cluster.connect()
        answers = await asyncio.gather(*await skewed(cluster, nc))
        (ordered,) = await moves_of(cluster)
        assert (ordered.worker_id, ordered.lender_id, ordered.segments) == ("decode-0", "decode-1", 1)
        (moved,) = await events_of(cluster, KvMoved)
        assert moved.moved_bytes == SEGMENT_BYTES
        # Who waited joined before the long answer was over.
        order = {one.order_id: number for number, one in enumerate(await events_of(cluster, DecodeStarted))}
        assert len(order) == 3
        assert [len(answer) for answer in answers] == [ANSWER, 8, 12]
        await nothing_is_held(cluster)
        # Alone, where nothing moves, the texts are the same.
        assert [await ask(cluster, nc, LONG, ANSWER), await ask(cluster, nc, SHORT, 12)] == answers[::2]
        assert len(await moves_of(cluster)) == 1
        await nc.close()


@pytest.mark.parametrize("of", ["lender", "owner"])
async def test_a_worker_that_dies_in_mid_move_costs_no_text(tmp_path: Path, of: str) -> None:
    with running_with_holds(tmp_path, *MOVING) as cluster:
        nc, holds = await cluster.connect(), Holds(cluster)
        await patient_with_restarts(cluster)
        holds.arm(MOVE, 1)
        asked = await skewed(cluster, nc)
        ordered = await in_mid_move(cluster, holds)
        if of == "owner":
            cluster.kill(ordered.worker_id)
        else:
            await lost_to_its_owner(cluster, holds, ordered)
        answers = await asyncio.gather(*asked)
        assert [len(answer) for answer in answers] == [ANSWER, 8, 12]
        told = [one.reason for one in await events_of(cluster, KvMoveRefused)]
        assert bool(told) == (of == "lender"), told
        await nothing_is_held(cluster)
        assert await ask(cluster, nc, LONG, ANSWER) == answers[0]
        await nothing_is_held(cluster)
        await nc.close()


async def lost_to_its_owner(cluster: Cluster, holds: Holds, ordered: MoveKv) -> None:
    """The lender dies, and the owner sends on; the conductor hears of it from the owner first."""
    with nobody_is_started_again(cluster):
        cluster.kill(ordered.lender_id)
        holds.go_on()
        await eventually(lambda: events_of(cluster, KvMoveRefused), "the owner says so", every_s=0.1)


@pytest.mark.parametrize("conductors", [1, 2])
async def test_the_planners_conductor_dies_in_mid_move(tmp_path: Path, conductors: int) -> None:
    """The only one is started again and goes on from the log; with two, the other one goes on."""
    with running_with_holds(tmp_path, *MOVING, "--conductors", str(conductors)) as cluster:
        nc, holds = await cluster.connect(), Holds(cluster)
        holds.arm(MOVE, 1)
        asked = await skewed(cluster, nc)
        ordered = await in_mid_move(cluster, holds)
        cluster.kill("conductor-0")
        holds.go_on()
        answers = await asyncio.gather(*asked)
        assert [len(answer) for answer in answers] == [ANSWER, 8, 12]
        # It was ordered once, and done.
        assert await moves_of(cluster) == [ordered]
        (moved,) = await events_of(cluster, KvMoved)
        assert (moved.plan_id, moved.moved_bytes) == (ordered.plan_id, SEGMENT_BYTES)
        await nothing_is_held(cluster)
        assert await ask(cluster, nc, LONG, ANSWER) == answers[0]
        await nothing_is_held(cluster)
        await the_ledger_is_right(cluster, conductors)
        await nc.close()


async def the_ledger_is_right(cluster: Cluster, conductors: int) -> None:
    """The log gives the decisions that were stored, each once, and a state in which nothing is lent."""
    core, events = Core(), await cluster.events()
    made = [((one.seq, at), it) for one in events for at, it in enumerate(core.step(one))]
    stored = [((one.cause_seq, one.position), one.decision) for one in await cluster.decisions()]
    assert stored == [
        (identity, decision) for identity, decision in made if not isinstance(decision, SetTimer)
    ]
    check(core.state)
    assert core.state.orders == {}
    assert [worker.lent for worker in core.state.workers.values() if worker.lent] == []
    assert len(await cluster.all_conductors(conductors)) == conductors
