"""Behaviour of RDMA alone: queue pairs made, kept, lost and made again; endpoint messages; immediates. Needs two
devices.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import numpy as np
import pytest
from store_harness import layout
from transport_harness import DEVICES, Side, call, noise

from halfmoon.schemas.policy import Layout
from halfmoon.schemas.store import QueuePair
from halfmoon.store.errors import (
    BytesCorrupted,
    HolderUnreachable,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from halfmoon.store.transports.base import Slice
from halfmoon.store.transports.rdma import connection as rdma_connection
from halfmoon.store.transports.rdma import transport as rdma
from tests.eventually import SCENARIO_S, eventually, within

pytestmark = pytest.mark.skipif(len(DEVICES) < 2, reason="needs two RDMA devices: make test-rdma")
Story = Callable[[Side, Side], Awaitable[None]]
ALL = Slice(0, 0, 0, 4)
_numbers = itertools.count(1)


def tell(
    story: Story,
    *,
    shape: Layout | None = None,
    slots: int = 16,
    selector: selectors.BaseSelector | None = None,
    **changes: Any,
) -> None:
    """`changes` are of the calling side."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            one = Side("rdma", "one", shape=shape, slots=slots, **changes)
            stack.push_async_callback(one.close)
            two = Side("rdma", "two", shape=shape, slots=slots)
            stack.push_async_callback(two.close)
            one.meet(two)
            await story(one, two)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(run())


def transport(side: Side) -> rdma.RdmaTransport:
    assert side.rdma is not None
    return side.rdma


async def works(one: Side, two: Side) -> None:
    """A read and a write, of other bytes each time."""
    number = next(_numbers)
    order = f"works-{number}"
    (theirs,) = two.stored(1000 + number, seed=number, order_id=order)
    (mine,), (back,) = one.reserved(1, order_id=order), two.reserved(1, order_id=order)
    await one.transport.read(two.peer, [Slice(mine, theirs, 0, 4)], call(seconds=20))
    assert np.array_equal(one.view.blocks[mine], two.view.blocks[theirs])
    await one.transport.write(two.peer, [Slice(mine, back, 0, 4)], call(order_id=order, seconds=20))
    assert np.array_equal(one.view.blocks[mine], two.view.blocks[back])
    assert one.view.blocks[mine].any()


def test_pairs_are_kept_and_few() -> None:
    async def story(one: Side, two: Side) -> None:
        theirs, mine = two.stored(1)[0], one.reserved(1)[0]
        for _ in range(10):
            await one.transport.read(two.peer, [Slice(mine, theirs, 0, 4)], call())
        assert one.counters["rdma_pairs_made"] == 1
        items = [Slice(mine, theirs, 0, 4)]
        await asyncio.gather(*(one.transport.read(two.peer, items, call(seconds=20)) for _ in range(20)))
        assert one.counters["rdma_pairs_made"] == rdma.PAIRS_PER_PEER
        assert len(transport(two)._served) == rdma.PAIRS_PER_PEER

    tell(story)


def test_the_longest_unused_pair_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "PAIRS", 3)

    async def story(one: Side, two: Side) -> None:
        async with AsyncExitStack() as stack:
            others = [two]
            for name in ("three", "four", "five"):
                others.append(Side("rdma", name))
                stack.push_async_callback(others[-1].close)
                one.meet(others[-1])
            for _ in range(2):
                for other in others:
                    await works(one, other)
            assert one.counters["rdma_pairs_made"] == 8
            assert one.counters["rdma_pairs_evicted"] == 5
            assert len(transport(one)._pairs) == 3

    tell(story)


def test_a_pair_that_died_is_made_anew_and_the_move_succeeds() -> None:
    async def story(one: Side, two: Side) -> None:
        await works(one, two)
        for _ in range(2):
            (served,) = transport(two)._served.values()
            transport(two)._destroy(served)
            await works(one, two)
        assert (one.counters["rdma_pairs_made"], one.counters["rdma_pairs_broken"]) == (3, 2)
        assert len(transport(one)._pairs) == len(transport(two)._pairs) == 1

    tell(story)


def test_a_replayed_endpoint_message_is_refused_and_disturbs_nothing() -> None:
    async def story(one: Side, two: Side) -> None:
        heard: list[QueuePair] = []
        plain = one.exchange

        async def listening(node_id: str, offer: QueuePair) -> QueuePair:
            heard.append(offer)
            return await plain(node_id, offer)

        transport(one)._exchange = listening
        await works(one, two)
        pairs = len(transport(two)._pairs)
        with pytest.raises(TransferRefused, match="was taken already"):
            transport(two).accept(heard[0])
        with pytest.raises(TransferRefused, match="does not know the cluster's secret"):
            transport(two).accept(msgspec.structs.replace(heard[0], number=99))
        with pytest.raises(TransferRefused, match="meant for two"):
            transport(one).accept(heard[0])
        assert (two.counters["refused_rdma_replayed"], two.counters["refused_rdma_proof"]) == (1, 1)
        assert one.counters["refused_rdma_foreign"] == 1
        assert len(transport(two)._pairs) == pairs
        await works(one, two)
        assert one.counters["rdma_pairs_made"] == 1

    tell(story)


def test_an_old_answer_is_refused() -> None:
    async def story(one: Side, two: Side) -> None:
        answers: list[QueuePair] = []
        plain = one.exchange

        async def repeating(node_id: str, offer: QueuePair) -> QueuePair:
            answers.append(await plain(node_id, offer))
            return answers[0]

        transport(one)._exchange = repeating
        await works(one, two)
        one.transport.forget("two")
        with pytest.raises(TransferRefused, match="answers endpoint message 1, not 2"):
            await one.transport.read(two.peer, [ALL], call())
        assert one.counters["refused_rdma_replayed"] == 1

    tell(story)


def test_another_secret() -> None:
    async def story(one: Side, two: Side) -> None:
        with pytest.raises(TransferRefused, match="secret"):
            await one.transport.read(two.peer, [ALL], call())
        assert two.counters["refused_rdma_proof"] == 1
        assert not transport(two)._pairs

    tell(story, cluster_secret="another")


def test_memory_that_is_not_registered_is_out_of_reach() -> None:
    async def story(one: Side, two: Side) -> None:
        plain = one.exchange
        pool = transport(two)._context.pool

        async def without_key(node_id: str, offer: QueuePair) -> QueuePair:
            object.__setattr__(transport(two)._context, "pool", pool._replace(rkey=pool.rkey ^ 0xFF))
            answer = await plain(node_id, offer)
            object.__setattr__(transport(two)._context, "pool", pool)
            return answer

        transport(one)._exchange = without_key
        with pytest.raises(TransferRefused, match="REM_ACCESS_ERR"):
            await one.transport.read(two.peer, [ALL], call())
        transport(one)._exchange = plain
        await works(one, two)

    tell(story)


def test_a_write_without_a_reservation_is_refused_and_counted() -> None:
    async def story(one: Side, two: Side) -> None:
        with pytest.raises(TransferRefused, match="no reservation"):
            await one.transport.write(two.peer, [ALL], call(party="other"))
        assert two.counters["refused_no_reservation"] == 1
        await works(one, two)

    tell(story)


def test_a_write_whose_bytes_change_on_the_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(one: Side, two: Side) -> None:
        theirs = two.reserved(1)
        monkeypatch.setattr(rdma_connection, "run_sums", lambda *run: [1] * run[3])
        with pytest.raises(BytesCorrupted, match="not what was sent"):
            await one.transport.write(two.peer, [Slice(0, theirs[0], 0, 4)], call())
        monkeypatch.undo()
        assert two.counters["refused_corrupted"] == 1
        await works(one, two)

    tell(story)


def test_a_peer_that_receives_and_does_not_answer() -> None:
    async def story(one: Side, two: Side) -> None:
        await works(one, two)
        theirs = two.reserved(1)
        fd = transport(two)._verbs.fd
        asyncio.get_running_loop().remove_reader(fd)
        with pytest.raises(TransferTimeout, match="nothing from two for 1000 ms"):
            await one.transport.write(two.peer, [Slice(0, theirs[0], 0, 4)], call(seconds=30))
        asyncio.get_running_loop().add_reader(fd, transport(two)._completed)
        await works(one, two)

    tell(story, stall_ns_max=1_000_000_000)


def test_a_deadline_ends_a_move_and_nothing_is_touched_afterwards() -> None:
    shape = layout(layers=16, block_tokens=1024, kv_heads=2, head_dim=64)  # 16 MiB a block

    async def story(one: Side, two: Side) -> None:
        theirs, mine = two.stored(1, 2, 3), one.reserved(3)
        await one.transport.read(two.peer, [Slice(mine[0], theirs[0], 0, 1)], call())
        with pytest.raises(TransferTimeout):
            await one.transport.read(
                two.peer, [Slice(mine[i], theirs[i], 0, 16) for i in range(3)], call(seconds=0.1)
            )
        assert not transport(one)._pairs
        one.view.blocks[mine] = 0
        # What was still on the cable has come before a whole block that is read now.
        (later,) = one.reserved(1, order_id="later")
        await one.transport.read(two.peer, [Slice(later, theirs[0], 0, 16)], call(seconds=20))
        assert np.array_equal(one.view.blocks[later], two.view.blocks[theirs[0]])
        assert not one.view.blocks[mine].any()

    tell(story, shape=shape, slots=4)


class CountedSelector(selectors.DefaultSelector):
    """Counts how often the event loop wakes up."""

    wakeups = 0

    def select(self, timeout: float | None = None) -> Any:
        self.wakeups += 1
        return super().select(timeout)


def test_waiting_wakes_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    selector, looks = CountedSelector(), itertools.count()
    completions = rdma.Verbs.completions

    def counted(verbs: rdma.Verbs) -> Any:
        next(looks)
        return completions(verbs)

    monkeypatch.setattr(rdma.Verbs, "completions", counted)

    async def story(one: Side, two: Side) -> None:
        await works(one, two)
        theirs = two.reserved(1)
        fd = transport(two)._verbs.fd
        asyncio.get_running_loop().remove_reader(fd)
        wakeups, looked = selector.wakeups, next(looks)
        with pytest.raises(TransferTimeout, match="nothing from two for 2000 ms"):
            await one.transport.write(two.peer, [Slice(0, theirs[0], 0, 4)], call(seconds=30))
        # A few for the message, its completion, a thread that hashes, and the end of the wait.
        assert selector.wakeups - wakeups < 50
        assert next(looks) - looked < 20
        asyncio.get_running_loop().add_reader(fd, transport(two)._completed)

    tell(story, stall_ns_max=2_000_000_000, selector=selector)


def test_a_link_that_goes_down_and_comes_back() -> None:
    def link(state: str) -> None:
        subprocess.run(["ip", "link", "set", "veth0", state], check=True)

    async def story(one: Side, two: Side) -> None:
        await works(one, two)
        (theirs,), (mine,) = two.stored(1), one.reserved(1)
        items = [Slice(mine, theirs, 0, 4)]
        link("down")
        try:
            for _ in range(2):
                with pytest.raises(HolderUnreachable, match="port 1 of rxe0 is DOWN"):
                    # Its deadline is behind the bound: that does not end it.
                    await within(
                        one.transport.read(two.peer, items, call(seconds=SCENARIO_S)),
                        "a read over a link that is down is given up",
                    )
        finally:
            link("up")

        async def read_again() -> bool:
            try:
                await one.transport.read(two.peer, items, call())
            except TransferError:
                return False
            return True

        await eventually(read_again, "a read over the link that is back ends well", every_s=0.1)
        assert np.array_equal(one.view.blocks[mine], two.view.blocks[theirs])
        await works(one, two)

    tell(story)


def test_packets_really_go_over_the_cable() -> None:
    def packets() -> int:
        with open("/sys/class/net/veth0/statistics/tx_bytes") as file:
            return int(file.read())

    async def story(one: Side, two: Side) -> None:
        theirs = two.reserved(4)
        one.view.blocks[:4] = noise(one.view.blocks[:4].shape, 1)
        before = packets()
        await one.transport.write(two.peer, [Slice(i, theirs[i], 0, 4) for i in range(4)], call())
        assert packets() - before > 4 * 4 * 8192

    tell(story)
