"""Several holders of the same blocks: one dies, hangs or leaves; copies are made, moved, and the cold ones go
first.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from store_harness import CAUSES, Cluster, tell, until
from test_failures import BIG, node_process

from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import Ordered, ReplicateBlocks
from halfmoon.schemas.events import StoreSuspected
from halfmoon.schemas.keys import join_keys
from halfmoon.schemas.store import Drained, DrainStore, Replicate, Replicated
from halfmoon.store.client import StoreClient
from halfmoon.store.errors import HolderUnreachable, StoreError
from halfmoon.store.locate import find_holders
from halfmoon.store.pool.slots import tenant_mark
from tests.eventually import BOUND_S


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def value(number: int, size: int) -> Any:
    """The whole value depends on the number."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize(
    ("transport", "gets"),
    [
        ("shm", 160),
        ("tcp", 160),
        pytest.param("shm", 1000, marks=pytest.mark.slow),
        pytest.param("tcp", 1000, marks=pytest.mark.slow),
    ],
)
def test_a_holder_killed_in_the_middle_of_many_gets_costs_no_answer(
    nats_url: str, transport: str, gets: int
) -> None:
    """Real processes; four readers at once, whose own node has room for a few of the blocks only."""
    shape, blocks = msgspec.structs.replace(BIG, layers=1), 40

    async def story(here: Cluster) -> None:
        starting = (node_process(here, node, transport, slots=blocks + 2, layers=1) for node in ("n1", "n2"))
        holders = await asyncio.gather(*starting)
        await here.agent("n3", transport=transport, layout=shape, slots=8)
        size = shape.block_bytes
        values = {key(i): value(i, size) for i in range(blocks)}
        for node in ("n1", "n2"):
            async with await StoreClient.connect(here.url, node_id=node) as put:
                answers = await put.batch_put(values)
                assert answers == [None] * blocks
        wrong = []
        done = 0
        killed_at = 0
        numbers = iter(range(gets))
        async with await StoreClient.connect(here.url, node_id="n3", peers=["n1", "n2"]) as reader:

            async def read() -> None:
                nonlocal done, killed_at
                into = np.zeros(size, np.uint8)
                for number in numbers:
                    into[:] = 0
                    await reader.get_into(key(number % blocks), into)
                    if not np.array_equal(into, values[key(number % blocks)]):
                        wrong.append(number)
                    done += 1
                    if done == gets // 2:
                        killed_at = done
                        holders[0].kill()

            await asyncio.gather(*(read() for _ in range(4)))
        assert (done, wrong, killed_at) == (gets, [], gets // 2)
        counters = here.agents["n3"].context.counters
        assert counters["fetched_bytes"] > gets * size // 2  # most came from elsewhere: the pool holds 8
        suspected = [event.node_id for event in await here.log() if isinstance(event, StoreSuspected)]
        assert set(suspected) <= {"n1"}

    tell(nats_url, story)


@pytest.mark.pure
def test_peers_that_named_themselves_too_late_are_asked_again_when_those_that_did_fail(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gone`, which serves nothing any more, is named as the only holder of two blocks; n2 has one of them too."""
    asked: list[list[str]] = []

    async def first_without_answers(
        bus: Bus, node_ids: Sequence[str], block_keys: bytes, tenant: str
    ) -> tuple[dict[int, list[str]], list[str]]:
        asked.append(list(node_ids))
        if len(asked) == 1:
            return {0: ["gone"], 1: ["gone"], 2: ["n2"]}, []
        return await find_holders(bus, node_ids, block_keys, tenant)

    monkeypatch.setattr("halfmoon.store.client.find_holders", first_without_answers)

    async def story(here: Cluster) -> None:
        one, two = await here.agent("n1", slots=4), await here.agent("n2", slots=4)
        size = one.context.config.layout.block_bytes
        values = {key(number): value(number, size) for number in (0, 2)}
        async with await StoreClient.connect(here.url, node_id="n2") as put:
            assert await put.batch_put(values) == [None, None]
        async with await StoreClient.connect(here.url, node_id="n1", peers=["gone", "n2"]) as reader:
            into = np.zeros((3, size), np.uint8)
            answers = await reader.batch_get_into([key(0), key(1), key(2)], list(into))
            assert [type(answer) for answer in answers] == [type(None), HolderUnreachable, type(None)]
            for number in (0, 2):
                assert np.array_equal(into[number], values[key(number)])
            assert asked == [["gone", "n2"], ["n2"]]
        for agent in (one, two):
            guard = agent.context.guard
            await until(lambda guard=guard: (guard.counts().holds, guard.counts().reserved) == (0, 0))

    tell(nats_url, story)


@pytest.mark.pure
def test_copies_are_made_and_moved_by_order_and_leave_nothing_behind(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        agents = {node: await here.agent(node, slots=16) for node in ("n1", "n2", "n3")}
        size = agents["n1"].context.config.layout.block_bytes
        values = {key(i): value(i, size) for i in range(6)}
        async with await StoreClient.connect(here.url, node_id="n1", tenant="t") as one:
            await one.batch_put(values)
            bus = await here.bus("program")
            asked = Replicate(
                block_keys=join_keys([*values, key(99)]), source_node_id="n1", mark=tenant_mark("t")
            )
            done = await bus.request(subjects.store("n2", "replicate"), asked, Replicated, timeout_s=BOUND_S)
            assert done == Replicated(blocks=6)
            done = await bus.request(subjects.store("n2", "replicate"), asked, Replicated, timeout_s=BOUND_S)
            assert done == Replicated(blocks=0)  # it has them
            assert (
                agents["n1"].context.guard.counts().committed
                == agents["n2"].context.guard.counts().committed
                == 6
            )
            moved = msgspec.structs.replace(asked, move=True, source_node_id="n2")
            assert await bus.request(
                subjects.store("n3", "replicate"), moved, Replicated, timeout_s=BOUND_S
            ) == Replicated(blocks=6)
            assert [agent.context.guard.counts().committed for agent in agents.values()] == [6, 0, 6]
        order = ReplicateBlocks(
            node_id="n2", source_node_id="n3", block_keys=join_keys([key(0), key(1)]), tenant="t"
        )
        await (await here.bus("conductor")).order(
            Ordered(cause_seq=next(CAUSES), position=0, decision=order), target_id="n2"
        )
        await until(lambda: agents["n2"].context.guard.counts().committed == 2)
        async with await StoreClient.connect(here.url, node_id="n2", tenant="t") as two:
            into = np.zeros(size, np.uint8)
            await two.get_into(key(1), into, verify=True)
            assert np.array_equal(into, values[key(1)])
        async with await StoreClient.connect(here.url, node_id="n2", tenant="another") as other:
            with pytest.raises(StoreError):
                await other.get_into(key(1), into)
        for agent in agents.values():
            guard = agent.context.guard
            await until(lambda guard=guard: (guard.counts().holds, guard.counts().reserved) == (0, 0))

    tell(nats_url, story)


@pytest.mark.pure
def test_a_drained_node_leaves_nothing_behind_that_fits_elsewhere(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        agents = {"n1": await here.agent("n1", slots=32), "n2": await here.agent("n2", slots=8)}
        agents["n3"] = await here.agent("n3", slots=8)
        size = agents["n1"].context.config.layout.block_bytes
        values = {key(i): value(i, size) for i in range(20)}
        bus = await here.bus("operator")
        async with await StoreClient.connect(here.url, node_id="n1") as one:
            await one.batch_put(values)
            for _ in range(3):  # hot
                await one.batch_get_into([key(3), key(4)], [np.zeros(size, np.uint8)] * 2)
        copy = Replicate(block_keys=join_keys([key(0)]), source_node_id="n1")
        assert await bus.request(
            subjects.store("n2", "replicate"), copy, Replicated, timeout_s=BOUND_S
        ) == Replicated(blocks=1)
        drain = DrainStore(target_node_ids=["n1", "n2", "n3"])
        drained = await bus.request(subjects.store("n1", "drain"), drain, Drained, timeout_s=BOUND_S)
        assert drained == Drained(moved=15, elsewhere=1, left=4)
        await asyncio.wait_for(agents["n1"].drained.wait(), BOUND_S)
        await agents["n1"].stop(reason="drained")
        kept = set(agents["n2"].context.guard.keys()) | set(agents["n3"].context.guard.keys())
        assert len(kept) == 16
        assert kept >= {key(0), key(3), key(4)}  # the hot ones, whatever else had to go
        for node in ("n2", "n3"):
            async with await StoreClient.connect(here.url, node_id=node) as reader:
                for name in agents[node].context.guard.keys():  # noqa: SIM118
                    into = np.zeros(size, np.uint8)
                    await reader.get_into(name, into, verify=True)
                    assert np.array_equal(into, values[name])

    tell(nats_url, story)


@pytest.mark.pure
def test_a_copy_that_nobody_reads_goes_before_what_is_used(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        one, two = await here.agent("n1", slots=16), await here.agent("n2", slots=10)
        size = one.context.config.layout.block_bytes
        bus = await here.bus("program")
        async with (
            await StoreClient.connect(here.url, node_id="n1") as there,
            await StoreClient.connect(here.url, node_id="n2") as here_too,
        ):
            await here_too.batch_put({key(i): value(i, size) for i in range(4)})
            for _ in range(3):
                await here_too.batch_get_into([key(i) for i in range(4)], [np.zeros(size, np.uint8)] * 4)
            await there.batch_put({key(i): value(i, size) for i in range(10, 16)})
            copies = Replicate(
                block_keys=join_keys([key(i) for i in range(10, 16)]), source_node_id="n1", spare=True
            )
            assert (
                await bus.request(subjects.store("n2", "replicate"), copies, Replicated, timeout_s=BOUND_S)
            ).blocks == 6
            await here_too.get_into(key(12), np.zeros(size, np.uint8))  # this one is of use
            await here_too.batch_put({key(i): value(i, size) for i in range(20, 25)})
            assert set(two.context.guard.keys()) == {key(i) for i in (*range(4), 12, *range(20, 25))}

    tell(nats_url, story)


@pytest.mark.slow
def test_a_holder_that_hangs_is_passed_over_and_suspected(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        shape = msgspec.structs.replace(BIG, layers=1)
        hanging = await node_process(here, "n1", "tcp", slots=4, layers=1)
        await node_process(here, "n2", "tcp", slots=4, layers=1)
        agent = await here.agent("n3", transport="tcp", layout=shape, slots=4, control_timeout_s=5.0)
        for node in ("n1", "n2"):
            async with await StoreClient.connect(here.url, node_id=node) as put:
                await put.put(key(1), value(1, shape.block_bytes))
        three = await here.client("n3", "w3")
        await three.open_put("o", key(1), blocks=1)
        hanging.send_signal(signal.SIGSTOP)
        try:
            fetched = await three.fetch("o", "n1", first_block=0, blocks=1, replicas=["n2"])
            assert fetched.source_node_id == "n2"
            await three.release("o")

            async def suspected() -> bool:
                return any(isinstance(e, StoreSuspected) and e.node_id == "n1" for e in await here.log())

            await until(suspected)
            assert agent.context.counters["fetches_from_replicas"] == 1
        finally:
            hanging.send_signal(signal.SIGCONT)

    tell(nats_url, story)
