"""Processes that die, are cut off, release or lie: a typed answer in time, and nothing left behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from lease_clock import GRACE_NS, LEASE_NS, LEASES, SECOND_NS, LeaseClock
from store_harness import CAUSES, Cluster, cluster, keys, layers_told, layout, until
from test_agent import fill, same, stored

from halfmoon.schemas.decisions import AnnounceYourself, Ordered, ReleaseOrder
from halfmoon.schemas.events import BlocksEvicted, BlocksStored, StoreInventory, StoreJoined, StoreSuspected
from halfmoon.schemas.kv import KvLoaded, TransferFailed
from halfmoon.schemas.store import StoreStatus
from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.errors import (
    AgentUnreachable,
    BytesCorrupted,
    HolderUnreachable,
    LayoutMismatch,
    NotAttached,
    OrderUnknown,
    StoreError,
    StoreFull,
    TransferError,
    TransferRefused,
)
from halfmoon.store.pool.segment import SHM, SegmentError, remove_stale
from halfmoon.store.pool.slots import Owner
from tests.bus.proxy import Proxy
from tests.eventually import BOUND_S, Late, eventually
from tests.lengths import sizes
from tests.nats_in_process import run_at

BIG = layout(layers=16, block_tokens=512, kv_heads=2, head_dim=64)  # 8 MiB a block


def tell(url: str, story: Callable[[Cluster], Awaitable[None]]) -> None:
    async def run() -> None:
        async with cluster(url) as here:
            await story(here)
        assert not list(SHM.glob(f"halfmoon-{here.name}-*"))

    run_at(url, run())


async def node_process(
    here: Cluster, node_id: str, transport: str, *, slots: int = 26, layers: int = BIG.layers
) -> subprocess.Popen[bytes]:
    """An agent of the BIG layout (or of fewer layers) in a process of its own; killed at the end."""
    path = Path(__file__).parent / "node_process.py"
    command = [
        sys.executable,
        str(path),
        here.url,
        here.name,
        node_id,
        transport,
        "auto",
        str(slots),
        str(layers),
    ]
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"

    def end() -> None:
        process.kill()
        process.wait()
        remove_stale(here.name)

    here.stack.callback(end)
    return process


async def empty(agent: StoreAgent) -> None:
    """No lease, no reservation, nothing condemned."""

    def clean() -> bool:
        counts = agent.context.guard.counts()
        return (counts.reserved, counts.leases, counts.condemned, counts.holds) == (0, 0, 0, 0)

    try:
        await until(clean)
    except Late:
        raise Late(f"left behind: {agent.context.guard.counts()}") from None
    agent.context.guard.check()


@pytest.mark.parametrize("transport", sizes("tcp", "shm"))
def test_blocks_move_between_two_processes(nats_url: str, transport: str) -> None:
    async def story(here: Cluster) -> None:
        await asyncio.gather(*(node_process(here, node, transport, slots=6) for node in ("n1", "n2")))
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        await stored(one, "o1", keys(1, 2), seed=1)
        opened = await two.open_put("o2", keys(1, 2), blocks=3)
        await two.fetch("o2", "n1", first_block=0, blocks=2)
        assert same(two, opened.slots[:2], 1)
        fill(two, opened.slots[2:], 3)
        await two.open_push("o2", "r", target_node_id="n1", decode_worker_id="w1")
        for layer in range(16):
            two.push("o2", layer=layer, first_block=0, blocks=3)
        assert (await two.close_push("o2")).bytes == BIG.block_bytes
        await until(lambda: len(layers_told(here.heard["w1"])) == 16)
        first: Any = here.heard["w1"][0]
        assert first.present == [0, 1]
        assert same(one, first.slots, 1)
        await two.release("o2")
        await one.release("o2")
        for client in (one, two):

            async def clean(client: Any = client) -> bool:
                status: StoreStatus = await client.status()
                return (status.slots_reserved, status.leases, status.holds, status.slots_condemned) == (
                    0,
                    0,
                    0,
                    0,
                )

            await until(clean)

    tell(nats_url, story)


@pytest.mark.parametrize("transport", sizes("tcp", "shm"))
def test_a_peer_killed_in_the_middle_of_a_fetch(nats_url: str, transport: str) -> None:
    async def story(here: Cluster) -> None:
        process = await node_process(here, "n1", transport)
        await here.agent("n2", transport=transport, layout=BIG, slots=26)
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        await stored(one, "o1", keys(*range(24)), seed=1)
        await two.open_put("o2", keys(*range(24)), blocks=24)
        fetching = asyncio.create_task(two.fetch("o2", "n1", first_block=0, blocks=24))
        while not here.heard["w2"]:
            await asyncio.sleep(0)
        process.kill()
        process.wait()  # holds the loop, so that at most the groups under way go on
        with pytest.raises(HolderUnreachable):  # a lease that only its own end would take lives for minutes
            await fetching
        assert len([m for m in here.heard["w2"] if isinstance(m, KvLoaded)]) < 16
        assert here.agents["n2"].context.guard.counts().committed == 0
        with pytest.raises(HolderUnreachable):
            await two.fetch("o2", "n1", first_block=0, blocks=24)
        await two.release("o2")
        await empty(here.agents["n2"])
        suspected = [e for e in await here.log() if isinstance(e, StoreSuspected)]
        assert (suspected[0].node_id, suspected[0].reporter_id) == ("n1", "n2")

    tell(nats_url, story)


def test_a_hanging_peer_is_found_by_the_stall(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        process = await node_process(here, "n1", "tcp")
        await here.agent(
            "n2", transport="tcp", layout=BIG, slots=26, stall_ns_max=4_000_000_000, control_timeout_s=4.0
        )
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        await stored(one, "o1", keys(*range(24)), seed=1)
        await two.open_put("o2", keys(*range(24)), blocks=24)
        fetching = asyncio.create_task(two.fetch("o2", "n1", first_block=0, blocks=24))
        await until(lambda: bool(here.heard["w2"]))
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferError):  # a lease that only its own end would take lives for minutes
            await fetching
        process.send_signal(signal.SIGCONT)
        await two.release("o2")
        await empty(here.agents["n2"])

    tell(nats_url, story)


@pytest.mark.parametrize("transport", sizes("shm", "tcp"))
def test_a_push_whose_target_dies_fails_and_says_so(nats_url: str, transport: str) -> None:
    async def story(here: Cluster) -> None:
        process = await node_process(here, "n1", transport)
        await here.agent("n2", transport=transport, layout=BIG, slots=26)
        await here.client("n1", "w1")
        two = await here.client("n2", "w2")
        await two.open_put("o1", keys(1), blocks=2)
        await two.open_push("o1", "r1", target_node_id="n1", decode_worker_id="w1")
        two.push("o1", layer=0, first_block=0, blocks=2)
        await until(lambda: len(here.heard["w1"]) == 2)
        process.kill()
        process.wait()
        two.push("o1", layer=1, first_block=0, blocks=2)
        with pytest.raises(HolderUnreachable):
            await two.close_push("o1")
        await until(lambda: any(isinstance(m, TransferFailed) for m in here.heard["w1"]))
        await two.release("o1")
        await empty(here.agents["n2"])

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize("away", ["agent", "worker"])
def test_a_push_while_one_of_the_two_is_away_from_the_bus_is_not_lost(nats_url: str, away: str) -> None:
    async def story(here: Cluster) -> None:
        proxy = Proxy(nats_url)
        direct, here.url = here.url, await proxy.start()
        if away == "agent":
            await here.agent("n1")
            here.url = direct
            one = await here.client("n1", "w1")
        else:
            here.url, through = direct, here.url
            await here.agent("n1")
            here.url = through
            one = await here.client("n1", "w1")
            here.url = direct
        await here.agent("n2")
        two = await here.client("n2", "w2")
        opened = await one.open_put("o1", keys(1, 2), blocks=3)
        fill(one, opened.slots, 5)
        await one.open_push("o1", "r1", target_node_id="n2", decode_worker_id="w2")
        proxy.drop()
        for layer in range(4):
            one.push("o1", layer=layer, first_block=0, blocks=3)
        await until(lambda: proxy.refused > 0)  # whoever is away has tried to come back
        proxy.cut = False
        closed = await one.close_push("o1")
        assert closed.bytes == 3 * 4 * 8192, "each layer once"
        await until(lambda: here.heard["w2"])
        message: Any = here.heard["w2"][0]
        assert same(two, message.slots, 5)
        for client in (one, two):
            await client.release("o1")
        for agent in here.agents.values():
            await empty(agent)
        proxy.server.close()

    tell(nats_url, story)


@pytest.mark.parametrize("transport", sizes("shm", "tcp"))
def test_a_release_at_any_moment_leaves_nothing(nats_url: str, transport: str) -> None:
    async def story(here: Cluster) -> None:
        agents = [await here.agent(n, transport=transport, layout=BIG, slots=14) for n in ("n1", "n2")]
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        await stored(one, "o0", keys(*range(4)), seed=1)

        done: list[str] = []

        async def work(order_id: str) -> None:
            await two.open_put(order_id, keys(*range(5)), blocks=6)
            done.append("put opened")
            await two.fetch(order_id, "n1", first_block=0, blocks=4)
            await two.open_push(order_id, "r", target_node_id="n1", decode_worker_id="w1")
            done.append("push opened")
            for layer in range(16):
                two.push(order_id, layer=layer, first_block=0, blocks=6)
            await two.close_push(order_id)

        # Of an order: its put, its fetch's groups of layers, its push and the layers of that.
        for moment in range(20):
            order_id = f"o{moment + 1}"
            for list_of_it in (done, here.heard["w1"], here.heard["w2"]):
                list_of_it.clear()
            working = asyncio.create_task(work(order_id))

            def reached(moment: int = moment, working: asyncio.Task[None] = working) -> bool:
                return working.done() or len(done) + len(here.heard["w1"]) + len(here.heard["w2"]) >= moment

            await eventually(reached, f"{moment} of its parts are done", every_s=0)
            await asyncio.gather(two.release(order_id), two.release(order_id))
            result = (await asyncio.gather(working, return_exceptions=True))[0]
            assert result is None or isinstance(result, StoreError), result
            await two.release(order_id)
            await one.release(order_id)
            for agent in agents:
                await empty(agent)

    tell(nats_url, story)


@pytest.mark.pure
def test_a_decode_worker_that_lets_go_first_leaves_nothing_at_its_node(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        agents = [await here.agent(n) for n in ("n1", "n2")]
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        await one.open_put("o1", keys(1), blocks=2)
        await two.release("o1")
        with pytest.raises(OrderUnknown):
            await one.open_push("o1", "r1", target_node_id="n2", decode_worker_id="w2")
        await empty(agents[1])
        await one.release("o1")
        await one.open_put("o2", keys(1), blocks=2)
        await one.open_push("o2", "r1", target_node_id="n2", decode_worker_id="w2")
        await two.release("o2")
        await one.release("o2")
        for agent in agents:
            await empty(agent)

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize("target", ["n1", "n2"])
def test_nothing_is_pushed_to_a_worker_that_has_not_mapped_its_node(nats_url: str, target: str) -> None:
    async def story(here: Cluster) -> None:
        agents = [await here.agent(n) for n in ("n1", "n2")]
        one = await here.client("n1", "w1")
        await one.open_put("o1", keys(1), blocks=2)
        with pytest.raises(NotAttached):
            await one.open_push("o1", "r1", target_node_id=target, decode_worker_id="w2")
        two = await here.client(target, "w2")
        await one.open_push("o1", "r1", target_node_id=target, decode_worker_id="w2")
        await one.close_push("o1")
        await one.release("o1")
        await two.release("o1")
        for agent in agents:
            await empty(agent)

    tell(nats_url, story)


@pytest.mark.pure
def test_slots_that_a_late_worker_may_write_are_not_given_away(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time in which a reader hears of it (`tests/store/test_guard.py`), too."""
    monkeypatch.setattr("halfmoon.store.pool.guard.READER_GRACE_NS", 0)

    async def story(here: Cluster) -> None:
        agent = await here.agent("n1", slots=4)
        one = await here.client("n1", "w1")
        late = await one.open_put("o1", b"", blocks=3)
        bus = await here.bus("conductor")
        await bus.order(
            Ordered(cause_seq=next(CAUSES), position=0, decision=ReleaseOrder(order_id="o1", node_id="n1")),
            target_id="n1",
        )
        await until(lambda: agent.context.guard.counts().condemned == 3)
        with pytest.raises(StoreFull):
            await one.open_put("o2", b"", blocks=2)
        fill(one, late.slots, 9)
        with pytest.raises(OrderUnknown):
            await one.commit("o1", first_block=0, blocks=3)
        with pytest.raises(OrderUnknown):
            await one.open_put("o1", b"", blocks=1)
        await one.release("o1")
        assert agent.context.guard.counts().free == 4

    tell(nats_url, story)


@pytest.mark.pure
def test_what_is_not_renewed_expires_and_what_waits_is_kept(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LeaseClock(monkeypatch)

    async def story(here: Cluster) -> None:
        agent = await here.agent("n1", **LEASES)
        waits, dies = await here.client("n1", "w1"), await here.client("n1", "w2")
        await waits.open_put("o1", keys(1), blocks=2)
        await dies.open_put("o2", keys(2), blocks=2)
        await dies.close()
        kept = [Owner("o1", "w1")]
        for elapsed_ns, reserved, condemned in (
            (LEASE_NS - SECOND_NS, 4, 0),
            (SECOND_NS, 2, 2),
            (GRACE_NS, 2, 0),
            (2 * LEASE_NS, 2, 0),
        ):
            await clock.passes(elapsed_ns, agent, renewed=kept)
            counts = agent.context.guard.counts()
            assert (counts.reserved, counts.condemned) == (reserved, condemned)
        await waits.release("o1")
        await empty(agent)

    tell(nats_url, story)


@pytest.mark.pure
def test_the_log_hears_everything_in_order_and_again_when_asked(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        agent = await here.agent("n1", slots=4)
        one = await here.client("n1", "w1")
        for number in range(0, 12, 2):
            await stored(one, f"o{number}", keys(number, number + 1), seed=number)
        owner = Owner("late", "w1")
        agent.context.guard.open_put(owner, [keys(99)], 1, writer="worker")
        agent.context.guard.commit(owner, {0: 0})
        agent.context.announcer.announce()  # with changes still waiting to be told
        bus = await here.bus("conductor")
        order = Ordered(
            cause_seq=next(CAUSES), position=0, decision=AnnounceYourself(role="store", target_id="n1")
        )
        await bus.order(order, target_id="n1")

        async def asked() -> bool:
            return sum(isinstance(e, StoreJoined) for e in await here.log()) == 3

        await until(asked)
        assert await agent.context.bus.flush(BOUND_S)
        held: set[bytes] = set()
        seen: list[type] = []
        for event in await here.log():
            names = getattr(event, "block_keys", b"")
            names = [names[i : i + 16] for i in range(0, len(names), 16)]
            match event:
                case BlocksStored():
                    assert not held & set(names)
                    held |= set(names)
                case BlocksEvicted():
                    assert held >= set(names)
                    held -= set(names)
                case StoreInventory():
                    assert held == set(names)
            seen.append(type(event))
        assert held == {keys(n) for n in (8, 10, 11, 99)}
        assert seen.index(StoreInventory) == seen.index(StoreJoined) + 1

    tell(nats_url, story)


@pytest.mark.pure
def test_three_answers_for_three_failures(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1")
        agent = await here.agent("n2")
        await here.agent("n3", layout=layout(layers=5))
        await here.agent("n4", cluster_secret="another")
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        await stored(one, "o1", keys(1), seed=1)
        await two.open_put("o2", keys(1), blocks=1)
        slot = here.agents["n1"].context.guard.find(keys(1))
        assert slot is not None
        one.view.blocks[slot, 1, 5] ^= 1
        for node, kind in (
            ("n1", BytesCorrupted),
            ("nobody", HolderUnreachable),
            ("n3", LayoutMismatch),
            ("n4", TransferRefused),
        ):
            with pytest.raises(kind):
                await two.fetch("o2", node, first_block=0, blocks=1)
        assert agent.context.guard.counts().committed == 0
        assert here.agents["n4"].context.counters["refused_hello"] == 1
        one.view.blocks[slot, 1, 5] ^= 1
        await two.fetch("o2", "n1", first_block=0, blocks=1)
        await two.release("o2")
        for name in ("n1", "n2"):
            await empty(here.agents[name])

    tell(nats_url, story)


def test_an_agent_that_was_killed_is_replaced_and_its_worker_maps_the_new_memory(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        process = await node_process(here, "n1", "shm", slots=4)
        one = await here.client("n1", "w1")
        pool = one.view
        await one.open_put("o1", keys(1), blocks=1)
        with pytest.raises(SegmentError, match="alive"):
            await here.agent("n1", layout=BIG, slots=4)
        process.kill()
        process.wait()
        with pytest.raises(AgentUnreachable):
            await one.commit("o1", first_block=0, blocks=1)
        assert [path.name for path in SHM.glob(f"halfmoon-{here.name}-*")] == [f"halfmoon-{here.name}-n1"]
        await here.agent("n1", layout=BIG, slots=4)
        with pytest.raises(StoreError):
            await one.open_put("o2", keys(2), blocks=1)
        await one.release("o1")
        opened = await one.open_put("o2", keys(2), blocks=1)
        fill(one, opened.slots, 4)
        assert one.view is pool
        assert (here.agents["n1"].context.view.blocks[opened.slots[0]] == pool.blocks[opened.slots[0]]).all()
        await one.release("o2")

    tell(nats_url, story)


def test_stale_segments_are_removed_and_live_ones_are_not(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        process = await node_process(here, "n1", "shm", slots=2)
        await here.agent("n2")
        assert remove_stale(here.name) == []
        process.kill()
        process.wait()
        assert remove_stale(here.name) == [f"halfmoon-{here.name}-n1"]
        with pytest.raises(SegmentError, match="MiB"):
            await here.agent("n3", layout=layout(layers=10_000, block_tokens=65536, head_dim=128))

    tell(nats_url, story)


def test_an_agent_that_cannot_start_says_why_in_a_line(nats_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        tries = {
            ("--pool-mib", "1000000"): "/dev/shm has ",
            ("--pool-mib", "64", "--data-port", port, "--bind", "127.0.0.1"): port,
            ("--data-port", "70000"): "data_port: 70000",
        }
        command = [sys.executable, "-m", "halfmoon.cli.main", "store", "--nats", nats_url]
        started = [
            subprocess.Popen(
                [*command, "--node", f"n{number}", *flags],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, flags in enumerate(tries)
        ]
        for process, why in zip(started, tries.values(), strict=True):
            _, said = process.communicate(timeout=BOUND_S)
            assert process.returncode in (1, 78)  # 78: a restart does not mend it
            assert said.startswith("halfmoon: ")
            assert said.count("\n") == 1, said
            assert why in said
