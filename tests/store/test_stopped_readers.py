"""A reader that stands still for longer than its lease, at any place, gets its block's bytes or an error."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lease_clock import SECOND_NS, LeaseClock
from store_harness import Cluster, cluster
from test_late_writers import Process
from transport_harness import DEVICES, ENCRYPTION, KINDS

from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.client import StoreClient, key_of
from halfmoon.store.errors import LeaseLost, StoreError, TransferError, TransferTimeout
from halfmoon.store.transports.base import Call, Peer, Slice

BLOCK = 4 * 8192
SLOTS = 6
LEASE_NS = 4 * SECOND_NS
LEASES = {"lease_ttl_ns": LEASE_NS, "transfer_ns_max": LEASE_NS // 2, "sweep_ns": 5_000_000}
Stop = Callable[[str], Awaitable[None]]


def value(name: str) -> np.ndarray:
    """The block of that name, and of no other."""
    return np.full(BLOCK, int.from_bytes(key_of(name)[:1], "little"), np.uint8)


async def nothing(place: str) -> None:
    """No stop."""


class StoppingClient(StoreClient):
    """Stands still where `stop` says: before, between and after the halves of a copy, after the slots were told."""

    stop: Stop = staticmethod(nothing)

    async def _find(self, keys: Sequence[bytes], block_bytes: int) -> Any:
        found = await super()._find(keys, block_bytes)
        await self.stop("told")
        return found

    async def _copy(self, pairs: Any, *, into: Sequence[int] = (), order_id: str = "") -> None:
        if into:
            return await super()._copy(pairs, into=into, order_id=order_id)
        for to, source in pairs:
            half = len(to) // 2
            await super()._copy([(to[:half], source[:half])])
            await self.stop("half")
            await super()._copy([(to[half:], source[half:])])
        await self.stop("copied")


class StoppingMover:
    """A node's way to others; the node stands still before and after a read."""

    def __init__(self, mover: Any, stop: Stop) -> None:
        self._mover, self._stop = mover, stop

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        await self._stop("leased")
        await self._mover.read(peer, items, call)
        await self._stop("read")


class Readers:
    """A node `n1` with a client that stops, and a node `n2` that holds blocks too; each has room for `SLOTS`."""

    def __init__(self, here: Cluster, clock: LeaseClock) -> None:
        self.here, self.clock = here, clock
        self.stops = 0
        self.other = 0

    async def open(self, kind: str) -> None:
        agents = [await self.agent(node_id, kind) for node_id in ("n1", "n2")]
        self.one, self.two = agents
        self.client = await StoppingClient.connect(self.here.url, node_id="n1", peers=("n2",))
        self.here.stack.push_async_callback(self.client.close)
        self.writers = [await StoreClient.connect(self.here.url, node_id=at) for at in ("n1", "n2")]
        for writer in self.writers:
            self.here.stack.push_async_callback(writer.close)
        engine_for = self.one.context.transports.engine_for

        def stopping(peer: Peer) -> Any:
            return StoppingMover(engine_for(peer), self.stop)

        self.one.context.transports.engine_for = stopping  # type: ignore[method-assign,assignment]
        self.stop: Stop = nothing

    async def agent(self, node_id: str, kind: str) -> StoreAgent:
        return await self.here.agent(
            node_id,
            slots=SLOTS,
            transport="tcp" if kind == "tls" else kind,
            encryption=ENCRYPTION[kind],
            rdma=DEVICES[node_id != "n1"] if kind == "rdma" else "off",
            **LEASES,
        )

    async def stand_still(self, place: str = "") -> None:
        """The client renews nothing for longer than a lease, and meanwhile others fill the pools. Where the whole node
        stands still, only the other's.
        """
        self.stops += 1
        orders, self.client._door._orders = self.client._door._orders, {}
        if whole := place in ("leased", "read"):
            self.one.context.guard._pool.postpone(LEASE_NS + SECOND_NS)  # as its sweep does when it goes on
        await self.clock.passes(LEASE_NS + SECOND_NS, self.one, self.two)
        for writer in self.writers[whole:]:
            await self.fill(writer, SLOTS)
        self.client._door._orders = orders

    async def fill(self, writer: StoreClient, room: int) -> None:
        """Puts other blocks, as many at once as the pool takes."""
        for count in range(room, 0, -1):
            names = [f"other {self.other + i}" for i in range(count)]
            self.other += count
            if await writer.batch_put({key_of(name): value(name) for name in names}) == [None] * count:
                return

    def stop_at(self, *places: str) -> None:
        """Once, at the first of these that is come to."""

        async def stop(place: str) -> None:
            if place in places and self.stop is stop:
                self.stop = self.client.stop = nothing
                await self.stand_still(place)

        self.stop = self.client.stop = stop


@asynccontextmanager
async def opened(nats_url: str, clock: LeaseClock, kind: str = "shm") -> AsyncIterator[Readers]:
    """Readers whose nodes reach each other over `kind`."""
    async with cluster(nats_url) as here:
        readers = Readers(here, clock)
        await readers.open(kind)
        yield readers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LeaseClock:
    clock = LeaseClock(monkeypatch)
    monkeypatch.setattr("halfmoon.store.agent.fetch.time", clock)
    monkeypatch.setattr("halfmoon.store.transports.base.time", clock)
    return clock


@pytest.mark.parametrize("place", ["told", "half"])
async def test_a_copy_that_outlasted_its_lease_is_an_error(
    nats_url: str, clock: LeaseClock, place: str
) -> None:
    async with opened(nats_url, clock) as readers:
        await readers.writers[0].put(key_of("a"), value("a"))
        into = np.zeros(BLOCK, np.uint8)
        readers.stop_at(place)
        with pytest.raises(LeaseLost, match="was given to another order") as caught:
            await readers.client.get_into(key_of("a"), into)
        assert isinstance(caught.value, TransferError)
        assert readers.stops == 1
        assert not np.array_equal(into, value("a"))  # it was needed


async def test_one_key_of_a_batch_may_fail_alone(nats_url: str, clock: LeaseClock) -> None:
    """The pool was not filled: what was not given away is still there."""
    async with opened(nats_url, clock) as readers:
        names = ["a", "b"]
        await readers.writers[0].batch_put({key_of(name): value(name) for name in names})

        async def stop(place: str) -> None:
            readers.client.stop = nothing
            orders, readers.client._door._orders = readers.client._door._orders, {}
            await clock.passes(LEASE_NS + SECOND_NS, readers.one, readers.two)
            assert await readers.writers[0].remove(key_of("a"))
            await readers.fill(readers.writers[0], SLOTS - 1)
            readers.client._door._orders = orders

        readers.client.stop = stop
        into = [np.zeros(BLOCK, np.uint8) for _ in names]
        first, second = await readers.client.batch_get_into([key_of(name) for name in names], into)
        assert isinstance(first, LeaseLost)
        assert second is None
        assert np.array_equal(into[1], value("b"))


async def test_what_is_shown_in_place_says_when_it_is_another_block(nats_url: str, clock: LeaseClock) -> None:
    async with opened(nats_url, clock) as readers:
        await readers.writers[0].put(key_of("a"), value("a"))
        held = await readers.client.get(key_of("a"))
        held.check()
        assert np.array_equal(held.array, value("a"))
        await readers.stand_still()
        assert not np.array_equal(held.array, value("a"))
        with pytest.raises(LeaseLost):
            held.check()
        with pytest.raises(LeaseLost):
            await held.release()
        await held.release()  # a second time it does nothing
        assert readers.one.context.guard.counts().holds == 0


async def test_the_error_of_who_read_another_block_gives_way_to_the_reason(
    nats_url: str, clock: LeaseClock
) -> None:
    async with opened(nats_url, clock) as readers:
        await readers.writers[0].put(key_of("a"), value("a"))

        async def read() -> None:
            async with await readers.client.get(key_of("a")):
                await readers.stand_still()
                raise ValueError("what I read makes no sense")

        with pytest.raises(LeaseLost) as caught:
            await read()
        assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("holder", ["n1", "n2"])
async def test_what_is_held_is_kept_for_as_long_as_the_process_runs(
    nats_url: str, clock: LeaseClock, holder: str
) -> None:
    """An hour, in a store that others want to fill; in the node's own pool or brought there from another."""
    async with opened(nats_url, clock) as readers:
        await readers.writers[holder == "n2"].put(key_of("a"), value("a"))
        async with await readers.client.get(key_of("a")) as held:
            (owner,) = readers.one.context.guard._pool.holds
            # Past what workers' orders are renewed for, with a renewal after each step of time.
            for _ in range(40):
                clock.now_ns += 90 * SECOND_NS
                readers.one.context.guard._swept_ns = clock.now_ns
                hold = readers.one.context.guard._pool.holds[owner]
                hold.expires_ns += 90 * SECOND_NS
                await clock.passes(SECOND_NS, readers.one, renewed=[owner])
            await readers.fill(readers.writers[0], SLOTS)
            held.check()
            assert np.array_equal(held.array, value("a"))
        assert readers.one.context.guard.counts().holds == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_that_read_past_its_lease_at_another_throws_it_away(
    nats_url: str, clock: LeaseClock, kind: str
) -> None:
    """Also when all of it had arrived: it cannot know."""
    async with opened(nats_url, clock, kind) as readers:
        for place in ("leased", "read"):
            await readers.writers[1].put(key_of(place), value(place))
            into = np.zeros(BLOCK, np.uint8)
            readers.stop_at(place)
            with pytest.raises(TransferTimeout):
                await readers.client.get_into(key_of(place), into)
            assert not readers.one.context.guard.probe([key_of(place)], "")[0]
        assert readers.stops == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
async def test_a_reader_that_stops_anywhere_never_gets_other_bytes(
    nats_url: str, clock: LeaseClock, kind: str, seed: int
) -> None:
    drawn = random.Random(seed)
    places = ["told", "half", "copied", "leased", "read", "held"]
    async with opened(nats_url, clock, kind) as readers:
        answers: list[str] = []
        for number in range(12):
            name = f"{seed}-{number}"
            await drawn.choice(readers.writers).put(key_of(name), value(name))
            if drawn.random() < 0.8:
                readers.stop_at(*drawn.sample(places, 2))
            read = np.zeros(BLOCK, np.uint8)
            try:
                if drawn.random() < 0.5:
                    await readers.client.get_into(key_of(name), read)
                else:
                    async with await readers.client.get(key_of(name)) as held:
                        await readers.client.stop("held")
                        read[:] = held.array
                        await readers.client.stop("held")
            except StoreError as problem:
                answers.append(problem.code)
                continue
            finally:
                readers.stop = readers.client.stop = nothing
            answers.append("right")
            assert np.array_equal(read, value(name)), (number, answers)
        assert {"right", LeaseLost.code} <= set(answers), answers


async def test_a_client_process_that_is_stopped_in_the_middle_of_a_copy(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal, as a debugger, a full machine or a moved virtual machine stops it."""
    clock = LeaseClock(monkeypatch)
    async with cluster(nats_url) as here:
        agent = await here.agent("n1", slots=SLOTS, **LEASES)
        writer = await StoreClient.connect(here.url, node_id="n1")
        here.stack.push_async_callback(writer.close)
        await writer.put(key_of("a"), value("a"))
        command = [sys.executable, str(Path(__file__).with_name("late_reader.py")), here.url, "n1"]
        late = Process(here, command)
        await late.until_it_says("told")
        late.process.send_signal(signal.SIGSTOP)
        await clock.passes(2 * LEASE_NS, agent)
        names = [f"other {number}" for number in range(SLOTS)]
        assert await writer.batch_put({key_of(name): value(name) for name in names}) == [None] * SLOTS
        late.process.send_signal(signal.SIGCONT)
        late.go_on()
        assert await late.says() == "LeaseLost, other bytes"
