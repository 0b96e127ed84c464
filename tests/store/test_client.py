"""`halfmoon.store.client`: any program uses the store; its answers, its refusals, its pins and quotas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from store_harness import Cluster, open_client, tell, until

from halfmoon.store.client import INLINE_BYTES, key_of
from halfmoon.store.errors import (
    BlockMissing,
    BytesCorrupted,
    HolderUnreachable,
    QuotaExceeded,
    StoreError,
    StoreFull,
    TransferError,
    WrongSize,
    WrongTenant,
)

BLOCK = 4 * 8192


def value(number: int) -> np.ndarray:
    """A block of its own for each number."""
    return np.random.default_rng(number).integers(0, 256, BLOCK, np.uint8)


def idle(here: Cluster, node_id: str) -> bool:
    counts = here.agents[node_id].context.guard.counts()
    return (counts.holds, counts.leases, counts.reserved, counts.condemned) == (0, 0, 0, 0)


@pytest.mark.pure
def test_what_is_put_comes_back_into_anything_with_a_buffer_or_is_shown_in_place(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1")
        client = await open_client(here, "n1")
        assert client.block_bytes == BLOCK
        a, b = key_of("a"), key_of("b")
        await client.put(a, value(1))
        tensor = torch.from_numpy(value(2)).view(torch.bfloat16).reshape(4, -1)
        await client.put(b, tensor)
        assert (await client.exists(a), await client.exists(key_of("c"))) == (True, False)
        into = np.zeros(BLOCK // 4, np.float32)
        await client.get_into(a, into, verify=True)
        assert into.tobytes() == value(1).tobytes()
        there = torch.zeros_like(tensor)
        buffer = bytearray(BLOCK)
        assert await client.batch_get_into([b, a], [there, buffer]) == [None, None]
        assert torch.equal(there.view(torch.uint8), tensor.view(torch.uint8))
        assert buffer == value(1).tobytes()
        async with await client.get(b) as held:
            assert np.shares_memory(held.array, client._door.view.blocks)
            assert held.array.tobytes() == value(2).tobytes()
            assert not await client.remove(b)  # somebody holds it
        assert await client.batch_remove([a, b, a]) == [True, True, False]
        assert await client.batch_exists([a, b]) == [False, False]
        assert idle(here, "n1")

    tell(nats_url, story)


@pytest.mark.pure
def test_a_put_of_a_key_that_is_there_keeps_its_value(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1")
        client = await open_client(here, "n1")
        await client.put(key_of("a"), value(1))
        await client.put(key_of("a"), value(2))
        async with await client.get(key_of("a")) as held:
            assert held.array.tobytes() == value(1).tobytes()

    tell(nats_url, story)


@pytest.mark.pure
def test_each_block_that_went_bad_in_memory_is_named_where_copies_are_compared(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        agent = await here.agent("n1")
        client = await open_client(here, "n1")
        # More than are compared at a time.
        names = [key_of(f"block {number}") for number in range(2 * INLINE_BYTES // BLOCK + 3)]
        await client.batch_put({name: value(number) for number, name in enumerate(names)})
        bad = (2, len(names) - 1)
        for number in bad:
            slot = agent.context.guard.find(names[number])
            assert slot is not None
            agent.context.view.blocks[slot, 1, 5] ^= 1
        into = [np.zeros(BLOCK, np.uint8) for _ in names]
        answers = await client.batch_get_into(names, into, verify=True)
        assert [at for at, answer in enumerate(answers) if isinstance(answer, BytesCorrupted)] == list(bad)
        assert await client.batch_get_into(names, into) == [None] * len(names)

    tell(nats_url, story)


def test_a_miss_a_failed_transfer_and_an_unreachable_holder_are_three_answers(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1", transport="tcp")
        other = await here.agent("n2", transport="tcp")
        there = await open_client(here, "n2")
        client = await open_client(here, "n1", peers=("n2",))
        a, b = key_of("a"), key_of("b")
        assert await there.batch_put({a: value(1), b: value(2)}) == [None, None]
        into = bytearray(BLOCK)
        with pytest.raises(BlockMissing):
            await client.get_into(key_of("c"), into)
        await client.get_into(a, into)
        assert into == value(1).tobytes()
        slot = other.context.guard.find(b)
        assert slot is not None
        other.context.view.blocks[slot, 1, 5] ^= (
            1  # the memory of the holder goes bad: what arrives is not what was put
        )
        with pytest.raises(BytesCorrupted) as caught:
            await client.get_into(b, into)
        assert isinstance(caught.value, TransferError)
        await other.stop()
        with pytest.raises(HolderUnreachable):
            await client.get_into(b, into)
        assert isinstance((await client.batch_exists([b]))[0], HolderUnreachable)
        answers = await client.batch_get_into([a, b], [into, bytearray(BLOCK)])
        assert answers[0] is None  # it is here since it was read
        assert isinstance(answers[1], HolderUnreachable)
        assert idle(here, "n1")

    tell(nats_url, story)


@pytest.mark.pure
def test_another_tenant_and_another_size_are_refused_with_a_reason_and_counted(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        agent = await here.agent("n1")
        mine, theirs = await open_client(here, "n1", "acme"), await open_client(here, "n1", "evil")
        key = key_of("a", tenant="acme")
        await mine.put(key, value(1))
        into = bytearray(BLOCK)
        assert not await theirs.exists(key)
        for attempt in (
            theirs.get_into(key, into),
            theirs.put(key, value(2)),
            theirs.remove(key),
            theirs.pin([key], ttl_s=5),
        ):
            with pytest.raises(WrongTenant, match=r"another tenant"):
                await attempt
        assert into == bytearray(BLOCK)
        with pytest.raises(WrongSize, match=r"100 bytes given, a block has 32768"):
            await mine.put(key_of("b"), bytes(100))
        with pytest.raises(WrongSize, match=r"32769 bytes given"):
            await mine.get_into(key, bytearray(BLOCK + 1))
        with pytest.raises(ValueError, match=r"key: b'short' is not 16 bytes"):
            await mine.get_into(b"short", into)
        with pytest.raises(TypeError, match="cannot be written"):
            await mine.get_into(key, bytes(BLOCK))
        counters = agent.context.counters
        assert (counters["answered_wrong_tenant"], counters["answered_wrong_size"]) == (4, 2)
        await mine.get_into(key, into, verify=True)
        assert into == value(1).tobytes()
        assert idle(here, "n1")

    tell(nats_url, story)


@pytest.mark.pure
def test_a_tenant_at_its_quota_gives_up_its_own_blocks_and_nobody_elses(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        agent = await here.agent("n1", slots=8, eviction="lru", quota=(f"small={3 * BLOCK + 5}",))
        small, other = await open_client(here, "n1", "small"), await open_client(here, "n1", "other")
        others = [key_of(f"o{i}", tenant="other") for i in range(4)]
        await other.batch_put({key: value(i) for i, key in enumerate(others)})
        own = [key_of(f"s{i}", tenant="small") for i in range(6)]
        for i, key in enumerate(own):
            await small.put(key, value(10 + i))
        assert await other.batch_exists(others) == [True] * 4
        assert await small.batch_exists(own) == [False] * 3 + [True] * 3
        assert agent.context.guard.counts().free == 1
        with pytest.raises(QuotaExceeded, match=r"the tenant may have 3 and uses 3"):
            _first(await small.batch_put({key_of(f"x{i}"): value(i) for i in range(4)}))
        held = [await small.get(key) for key in own[3:]]
        with pytest.raises(StoreFull):
            await small.put(key_of("y"), value(0))  # all it may have is held
        for one in held:
            await one.release()
        await small.put(key_of("y"), value(0))
        assert agent.context.counters["answered_quota_exceeded"] == 2

    tell(nats_url, story)


def _first(answers: list[StoreError | None]) -> None:
    assert answers[0] is not None
    raise answers[0]


@pytest.mark.pure
def test_a_soft_pin_goes_last_a_hard_pin_stays_and_both_end_by_themselves(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        agent = await here.agent("n1", slots=6, eviction="lru", sweep_ns=20_000_000)
        client = await open_client(here, "n1")
        keys = [key_of(str(i)) for i in range(40)]
        await client.batch_put({keys[i]: value(i) for i in range(6)})
        await client.pin([keys[0]], ttl_s=60)
        await client.pin([keys[1]], ttl_s=60, hard=True)
        with pytest.raises(BlockMissing):
            await client.pin([keys[2], keys[30]], ttl_s=60)
        with pytest.raises(StoreFull, match="no more than half"):
            await client.pin(keys[2:5], ttl_s=60, hard=True)
        for i in range(6, 12):
            await client.put(keys[i], value(i))
        assert await client.batch_exists(keys[:7]) == [True, True] + [False] * 5
        assert await client.batch_put({keys[i]: value(i) for i in range(12, 17)}) == [None] * 5
        assert await client.batch_exists(keys[:2]) == [False, True]  # nothing else was left
        await client.pin([keys[12]], ttl_s=0.05)
        await client.pin([keys[1]], ttl_s=0.05, hard=True)
        await until(lambda: agent.context.guard.counts().holds == 0)
        for i in range(17, 23):
            await client.put(keys[i], value(i))
        assert await client.batch_exists([keys[1], keys[12]]) == [False, False]
        await client.pin(keys[17:20], ttl_s=60, hard=True)
        await client.unpin(keys[17:20], hard=True)
        assert agent.context.guard.counts().holds == 0

    tell(nats_url, story)


@pytest.mark.pure
def test_four_hundred_blocks_into_a_pool_of_two_hundred_with_fifty_leased(nats_url: str) -> None:
    """Every put is served by eviction, the leased blocks keep their bytes, and asking whether they exist
    keeps none.
    """

    async def story(here: Cluster) -> None:
        agent = await here.agent("n1", slots=200, eviction="lru")
        client = await open_client(here, "n1")
        leased = [key_of(f"leased {i}") for i in range(50)]
        await client.batch_put({key: value(i) for i, key in enumerate(leased)})
        held = [await client.get(key) for key in leased]
        keys = [key_of(str(i)) for i in range(400)]
        for first in range(0, 400, 10):
            lease_ends = [hold.expires_ns for hold in agent.context.guard._pool.holds.values()]
            assert all(await client.batch_exists(leased))
            await client.batch_exists(keys[:first][-150:])
            assert lease_ends == [hold.expires_ns for hold in agent.context.guard._pool.holds.values()]
            put = await client.batch_put({keys[i]: value(1000 + i) for i in range(first, first + 10)})
            assert put == [None] * 10
            agent.context.guard.check()
        assert all(one.array.tobytes() == value(i).tobytes() for i, one in enumerate(held))
        # Least recently put goes first, though all of them were asked for just now.
        assert await client.batch_exists(keys) == [False] * 250 + [True] * 150
        into = bytearray(BLOCK)
        for i in (250, 399):
            await client.get_into(keys[i], into, verify=True)
            assert into == value(1000 + i).tobytes()
        assert agent.context.counters["answered_store_full"] == 0
        for one in held:
            await one.release()
        assert idle(here, "n1")

    tell(nats_url, story)
