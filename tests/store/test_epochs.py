"""Slots that are given away while somebody reads them: the reader finds out, whoever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from lease_clock import LEASE_NS, LEASES, LeaseClock
from store_harness import cluster, keys
from test_agent import same, stored
from transport_harness import Side

from halfmoon.store.errors import LeaseLost
from halfmoon.store.pool.slots import Owner
from halfmoon.workers.decode.actions import CopyLayers
from halfmoon.workers.decode.cache_copies import copy_layers


class Cache:
    """Keeps what is written; `during` runs before each write, once."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], np.ndarray] = {}
        self.during = lambda: None

    def write_block(self, layer: int, block: int, memory: np.ndarray, tokens: int = 0) -> None:
        self.during()
        self.blocks[layer, block] = memory.copy()


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side("shm", "one", slots=2)
    yield side
    side.executor.shutdown()
    side.segment.close()


def test_a_decode_worker_that_copied_past_its_lease_says_so(side: Side) -> None:
    slots = side.stored(1, 2)
    owner = Owner("o", "store")
    hold = side.guard.hold(owner)
    copies = tuple((layer, slot, i) for layer in range(4) for i, slot in enumerate(slots))
    order = CopyLayers(1, copies, tuple(zip(hold.slots, hold.epochs, strict=True)))
    cache = Cache()
    assert copy_layers(cache, side.view, order) == ""
    assert np.array_equal(cache.blocks[3, 1], side.view.blocks[slots[1], 3])

    def give_away() -> None:
        cache.during = lambda: None
        side.guard.release(owner, writers=["worker"])
        side.guard.open_put(Owner("other", "w"), [], 1, writer="w")

    cache.during = give_away
    assert "was given to another order" in copy_layers(cache, side.view, order)


def test_a_slot_that_was_let_go_and_taken_by_nobody_is_unchanged(side: Side) -> None:
    slots = side.stored(1, 2)
    epochs = side.guard.hold(Owner("o", "store")).epochs
    side.guard.release(Owner("o", "store"), writers=["worker"])
    side.view.require_unchanged(slots, epochs)
    side.guard.remove([keys(1)], "")
    side.view.require_unchanged(slots, epochs)


@pytest.mark.realtime
async def test_a_worker_looks_at_the_slots_that_it_was_told(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a prefill worker does after it computed, an attention worker after it loaded, a mixed one after its step."""
    clock = LeaseClock(monkeypatch)
    async with cluster(nats_url) as here:
        agent = await here.agent("n1", slots=2, **LEASES)
        one, two = await here.client("n1", "w1"), await here.client("n1", "w2")
        await stored(one, "o1", keys(1, 2), seed=3)
        opened = await one.open_put("o2", keys(1, 2), blocks=2)
        one.require_unchanged("o2")
        orders, one._orders = one._orders, {}
        await clock.passes(2 * LEASE_NS, agent)
        one.require_unchanged("o2")  # the lease ended, and nobody was given the slots
        assert same(one, opened.slots, 3)
        await stored(two, "o3", keys(8, 9), seed=4)
        assert not same(one, opened.slots, 3)
        with pytest.raises(LeaseLost, match="given to another order"):
            one.require_unchanged("o2")
        one._orders = orders
        await one.release("o2")
        with pytest.raises(LeaseLost, match="has no slots"):
            one.require_unchanged("o2")


@pytest.mark.realtime
async def test_a_copy_within_the_pool_that_outlasted_its_lease_is_thrown_away(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two orders wanted a block; one has committed it, and the other takes it from there."""
    clock = LeaseClock(monkeypatch)
    async with cluster(nats_url) as here:
        agent = await here.agent("n1", slots=4, **LEASES)
        await here.agent("n2", slots=4, **LEASES)
        one, two = await here.client("n1", "w1"), await here.client("n1", "w2")
        await one.open_put("o1", keys(1), blocks=1)
        await stored(two, "o2", keys(1), seed=3)

        async def slow(executor: Any, copy: Callable[[], None], cancellation: Any) -> None:
            copy()
            await clock.passes(2 * LEASE_NS, agent, renewed=[Owner("o1", "w1")])

        monkeypatch.setattr("halfmoon.store.agent.fetch.in_thread", slow)
        with pytest.raises(LeaseLost, match="while it was copied"):
            await one.fetch("o1", "n2", first_block=0, blocks=1)
        await one.release("o1")
