"""KV events with tokens and parents, decoded by classes of vLLM's form, as another router's index reads them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from store_harness import cluster, keys, until

from halfmoon.schemas.keys import pack_tokens, split_keys
from halfmoon.store.agent.kv_events import KvEvents, KvEventsOptions
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.pool.slots import Change

BLOCK = 4
ALL = KvEventsOptions(address="inproc://events", tokens=True)


class Event(msgspec.Struct, omit_defaults=True, tag=True, forbid_unknown_fields=True):
    """vLLM 0.32's, fields that have no default there have none here."""


class BlockStored(Event):
    """vLLM 0.32's."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    """vLLM 0.32's."""

    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(Event):
    """vLLM 0.32's."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """vLLM 0.32's."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Feed(KvEvents):
    """Keeps what it would send."""

    def __init__(self, options: KvEventsOptions = ALL, slots: int = 8) -> None:
        super().__init__(options, block_tokens=BLOCK, slots=slots)
        self.sent: list[Any] = []

    def _send(self, events: list[Any]) -> None:
        self.sent += msgspec.msgpack.decode(msgspec.msgpack.encode([0.0, events]), type=Batch).events


def stored(*numbers: int, tier: Any = "dram") -> list[Change]:
    return [Change("stored", key, tier) for key in split_keys(keys(*numbers))]


def evicted(*numbers: int, tier: Any = "dram") -> list[Change]:
    return [Change("evicted", key, tier) for key in split_keys(keys(*numbers))]


def told(first: int, last: int, parent: int | None, medium: str = "CPU") -> BlockStored:
    """Blocks `first` to `last` of a chain whose block n has the tokens 4n to 4n + 3."""
    hashes = split_keys(keys(*range(first, last + 1)))
    above = None if parent is None else keys(parent)
    tokens = list(range(BLOCK * first, BLOCK * (last + 1)))
    return BlockStored(list(hashes), above, tokens, BLOCK, None, medium, None)


def chain(first: int, last: int) -> tuple[bytes, bytes]:
    return keys(*range(first, last + 1)), pack_tokens(list(range(BLOCK * first, BLOCK * (last + 1))))


def test_blocks_have_their_tokens_and_the_block_before_them() -> None:
    feed = Feed()
    feed.learn(*chain(0, 2))
    feed.add(stored(0, 1))
    feed.add(stored(2))
    feed.learn(*chain(3, 4), head_keys=keys(0, 1, 2))
    feed.add(stored(3, 4))
    feed.add(evicted(4, 3))
    assert feed.sent == [
        told(0, 1, None), told(2, 2, 1), told(3, 4, 2), BlockRemoved([keys(4), keys(3)], "CPU"),
    ]  # fmt: skip


def test_two_chains_in_one_batch_are_two_events() -> None:
    feed = Feed()
    feed.learn(*chain(0, 1))
    feed.learn(*chain(5, 5))
    feed.add(stored(0, 5, 1))
    assert feed.sent == [told(0, 0, None), told(5, 5, None), told(1, 1, 0)]


def test_a_block_of_unknown_tokens_is_not_told_of_and_neither_is_its_end() -> None:
    feed = Feed()
    feed.learn(*chain(1, 1))
    feed.add([*stored(0), *stored(1), *evicted(0)])
    assert feed.sent == [told(1, 1, None)]


def test_a_block_is_known_as_long_as_any_medium_has_it() -> None:
    feed = Feed()
    feed.learn(*chain(0, 0))
    feed.add([*stored(0), *stored(0, tier="ssd"), *evicted(0), *stored(0), *evicted(0)])
    feed.add(evicted(0, tier="ssd"))
    feed.add(stored(0))
    assert feed.sent == [
        told(0, 0, None), told(0, 0, None, "STORAGE"), BlockRemoved([keys(0)], "CPU"),
        told(0, 0, None), BlockRemoved([keys(0)], "CPU"), BlockRemoved([keys(0)], "STORAGE"),
    ]  # fmt: skip


def test_tokens_that_are_put_and_never_come_are_forgotten() -> None:
    feed = Feed(slots=3)
    for number in range(9):
        feed.learn(*chain(number, number))
    feed.add(stored(*range(9)))
    assert [event.block_hashes for event in feed.sent] == [[keys(6)], [keys(7)], [keys(8)]]


def test_no_tokens_are_told_unless_they_are_asked_for() -> None:
    feed = Feed(KvEventsOptions(address="inproc://events"))
    assert not feed.wants_tokens
    feed.learn(*chain(0, 1))
    feed.add(stored(0, 1))
    assert feed.sent == [BlockStored([keys(0), keys(1)], None, [], BLOCK, None, "CPU", None)]
    assert feed.tokens_of(split_keys(keys(0, 1))) == b""


def test_tokens_are_as_many_as_the_blocks_have() -> None:
    with pytest.raises(ValueError, match="token_ids: 16 bytes are not those of 2 blocks"):
        Feed().learn(keys(0, 1), pack_tokens([1, 2, 3, 4]))


@pytest.mark.realtime
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_worker_and_another_agent_tell_the_tokens(nats_url: str, host: str) -> None:
    async def story() -> None:
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.IPV6, 1)
        subscribers = [context.socket(zmq.SUB) for _ in range(2)]
        try:
            async with cluster(nats_url) as here:
                for number, subscriber in enumerate(subscribers):
                    options = {
                        "kv_events": f"tcp://{host}:0",
                        "kv_events_topic": "kv",
                        "kv_events_tokens": True,
                    }
                    agent = await here.agent(f"n{number}", **options)
                    publisher = agent.context.kv_events._pub
                    assert publisher is not None
                    subscriber.subscribe(b"kv")
                    subscriber.connect(publisher.getsockopt_string(zmq.LAST_ENDPOINT))
                worker, decode = [await here.client(f"n{number}", f"w{number}") for number in range(2)]
                for client, subscriber in zip((worker, decode), subscribers, strict=True):
                    await until_heard(client, subscriber)
                tokens = list(range(40))  # two blocks of 16, and a tail without a key
                await worker.open_put("o1", keys(1, 2), blocks=3, token_ids=pack_tokens(tokens))
                await worker.open_push("o1", "r1", target_node_id="n1", decode_worker_id="w1")
                for layer in range(4):
                    worker.push("o1", layer=layer, first_block=0, blocks=3)
                await worker.close_push("o1")
                await worker.commit("o1", first_block=0, blocks=2)
                expected = BlockStored([keys(1), keys(2)], None, tokens[:32], 16, None, "CPU", None)
                for subscriber in subscribers:
                    heard: list[Any] = []

                    async def all_heard(subscriber: Any = subscriber, heard: list[Any] = heard) -> bool:
                        topic, _, payload = await subscriber.recv_multipart()
                        assert topic == b"kv"
                        heard += msgspec.msgpack.decode(payload, type=Batch).events
                        return expected in heard

                    await until(all_heard)
                await decode.release("o1")
                await worker.release("o1")
        finally:
            context.destroy(linger=0)

    asyncio.run(story())


async def until_heard(client: AgentClient, subscriber: Any) -> None:
    """The publisher of the client's node knows of the subscriber: a block that is put is told."""
    numbers = itertools.count(100)

    async def heard() -> bool:
        number = next(numbers)
        await client.open_put(f"probe{number}", keys(number), blocks=1, token_ids=pack_tokens([number] * 16))
        await client.commit(f"probe{number}", first_block=0, blocks=1)
        await client.release(f"probe{number}")
        return bool(await subscriber.poll(50))

    await until(heard)
