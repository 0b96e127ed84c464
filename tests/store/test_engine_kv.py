"""KV of an engine's prompts on its way to another engine, layer by layer, through real store agents."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from store_harness import PATIENT, Cluster, cluster, until

from halfmoon.schemas.policy import Layout
from halfmoon.store.adapters.kv_link import KvLink, KvOptions, KvShape
from halfmoon.store.adapters.kv_receiver import Ended, KvLoad, KvReceiver
from halfmoon.store.adapters.kv_sender import KvSender, Sent, SentOrder
from tests.eventually import BOUND_S

LAYERS, BLOCKS = 3, 8
SHAPE = KvShape(layers=LAYERS, layer_bytes=5000, name="engine")
#: A prompt of three whole blocks of 16 tokens and a part of the fourth.
TOKENS, WHOLE = 50, [b"a", b"b", b"c"]


class Engine:
    """The KV of an engine, u8 `[layers, blocks, layer_bytes]`, and its connector's two halves."""

    def __init__(self, link: KvLink) -> None:
        self.kv = np.zeros((LAYERS, BLOCKS, SHAPE.layer_bytes), np.uint8)
        self.copied = 0
        self.orders: dict[str, SentOrder] = {}
        self.link = link
        self.sender = KvSender(link, namespace=b"engine")
        self.receiver = KvReceiver(link, self._copy)

    def _copy(self, layer: int, block_id: int, slot: np.ndarray) -> None:
        self.kv[layer, block_id] = slot
        self.copied += 1

    async def begin(self, order_id: str, *, tokens: int = TOKENS, keys: Sequence[bytes] = ()) -> bool:
        order = await asyncio.to_thread(self.sender.begin, Sent(order_id, tokens, 4, keys))
        if order is not None:
            self.orders[order_id] = order
        return order is not None

    def compute(self, order_id: str, layer: int, first: int = 0, blocks: int = 4) -> None:
        """A layer of blocks of the prompt, which lie in the engine's last ones."""

        def fill(block: int, slot: np.ndarray) -> None:
            slot[:] = self.kv[layer, BLOCKS - 1 - block]

        self.sender.write(self.orders[order_id], layer, first, blocks, fill)

    def end(self, order_id: str) -> None:
        self.sender.end(self.orders[order_id])

    def drop(self, order_id: str, reason: str) -> None:
        self.sender.drop(self.orders[order_id], reason)

    def want(self, order_id: str, source: str = "p", *, first: int = 0, tokens: int = TOKENS) -> None:
        """Into its blocks 2, 3, ..., but those that it has already."""
        blocks = list(range(2 + first, 6))
        self.receiver.want(KvLoad(f"request of {order_id}", order_id, source, tokens, first, blocks))

    async def ended(self) -> Ended:
        found: list[Ended] = []
        await until(lambda: bool(found.extend(self.receiver.ended()) or found))
        (ended,) = found
        return ended


@asynccontextmanager
async def engine(
    here: Cluster, name: str, *, shape: KvShape = SHAPE, **options: Any
) -> AsyncIterator[Engine]:
    given = {"nats": here.url, "node": name, "worker": name, "kept_s": BOUND_S, "wait_s": BOUND_S}
    made = Engine(
        KvLink(KvOptions.of({**given, **PATIENT, **options}), shape, me=options.get("worker", name))
    )
    made.kv[:] = np.random.default_rng(1).integers(1, 256, made.kv.shape, np.uint8) if name == "p" else 0
    try:
        await asyncio.to_thread(made.link.start)
        yield made
    finally:
        await asyncio.to_thread(made.link.close)


@asynccontextmanager
async def pair(url: str, **options: Any) -> AsyncIterator[tuple[Cluster, Engine, Engine]]:
    """Two engines, `p` and `d`, each with an agent."""
    async with cluster(url) as here, AsyncExitStack() as stack:
        for name in ("p", "d"):
            await here.agent(name, layout=Layout.opaque(SHAPE.block_bytes, LAYERS), data_port=-1)
        made = [await stack.enter_async_context(engine(here, name, **options)) for name in ("p", "d")]
        yield here, made[0], made[1]


def same(p: Engine, d: Engine, first: int = 0) -> bool:
    """The prompt's blocks, of which `d` had the first ones, are in `d` as in `p`, and nothing else is."""
    there = [2 + block for block in range(first, 4)]
    mine = np.stack([p.kv[:, BLOCKS - 1 - block] for block in range(first, 4)], axis=1)
    others = np.delete(d.kv, there, axis=1)
    return bool((d.kv[:, there] == mine).all() and not others.any())


def test_the_kv_of_a_prompt_comes_layer_by_layer_whichever_engine_is_asked_first(nats_url: str) -> None:
    async def story() -> None:
        async with pair(nats_url) as (here, p, d):
            d.want("early")
            assert await p.begin("early")
            # A layer comes while the next ones are not computed: first of two blocks, then of the others.
            p.compute("early", 0, 0, 2)
            await until(lambda: (d.kv[0, 2:4] == p.kv[0, [7, 6]]).all())
            assert not d.kv[1:].any()
            assert not d.receiver.ended()
            p.compute("early", 1, 0, 2)
            p.compute("early", 2, 0, 2)
            for layer in range(LAYERS):
                p.compute("early", layer, 2, 2)
            p.end("early")
            assert await d.ended() == Ended("request of early", True, [2, 3, 4, 5])
            assert same(p, d)

            # All is computed before anybody asks; of a block that the other one has nothing is copied.
            d.kv[:], d.copied = 0, 0
            assert await p.begin("late", keys=WHOLE)
            for layer in range(LAYERS):
                p.compute("late", layer)
            p.end("late")
            d.want("late", first=1)
            assert (await d.ended()).loaded
            assert same(p, d, 1)
            assert d.copied == LAYERS * 3

            # Blocks with keys stay in both stores: where they are there already nothing is written, nor moved.
            assert await moved(p, d, "again", WHOLE) == SHAPE.block_bytes
            # Those that only the first engine's node has move once.
            others = [b"d", b"e", b"f"]
            assert await p.begin("unwanted", keys=others)
            for layer in range(LAYERS):
                p.compute("unwanted", layer)
            p.end("unwanted")
            await until(lambda: here.agents["p"].context.guard.counts().committed == 6)
            p.drop("unwanted", "nobody wants it")
            assert await moved(p, d, "known", others) == 4 * SHAPE.block_bytes

    asyncio.run(story())


async def moved(p: Engine, d: Engine, order_id: str, keys: Sequence[bytes]) -> int:
    """Bytes of a prompt's KV that moved; it came whole."""
    await until(lambda: all(not order.ended for order in p.sender._orders.values()))
    p.link.counts()
    d.kv[:] = 0
    assert await p.begin(order_id, keys=keys)
    d.want(order_id)
    for layer in range(LAYERS):
        p.compute(order_id, layer)
    p.end(order_id)
    assert (await d.ended()).loaded
    assert same(p, d)
    counts = p.link.counts()
    await until(lambda: bool(counts.update(p.link.counts()) or counts["prompts_sent"]))
    return counts["bytes_sent"]


async def refused_or_cut_off(url: str) -> None:
    async with pair(url) as (here, p, d):

        async def refused(order_id: str, *, source: str = "p", tokens: int = TOKENS) -> None:
            d.want(order_id, source, tokens=tokens)
            assert await d.ended() == Ended(f"request of {order_id}", False, [2, 3, 4, 5])

        # Nobody is there; more tokens are asked for than there are, before it begins and afterwards.
        await refused("one", source="nobody")
        assert await p.begin("two")
        await refused("two", tokens=TOKENS + 1)
        d.want("three", tokens=TOKENS - 1)
        assert await p.begin("three")
        assert not (await d.ended()).loaded
        # The prompt is not computed to its end: before it is asked for, and while it comes.
        p.drop("two", "the request has ended")
        await until(lambda: "two" in p.sender._gone)
        await refused("two")
        d.want("four")
        assert await p.begin("four")
        p.compute("four", 0)
        await until(lambda: d.kv[0].any())
        p.drop("four", "the request has ended")
        assert not (await d.ended()).loaded
        # Nobody wants it any more.
        d.want("five")
        assert await p.begin("five")
        p.compute("five", 0)
        d.receiver.drop("request of five")
        assert not (await d.ended()).loaded
        # Nor did anybody when the load began: the link's loop finds both at once.
        hold = threading.Event()
        d.link.call(hold.wait)
        d.want("at-once")
        d.receiver.drop("request of at-once")
        hold.set()
        assert not (await d.ended()).loaded
        p.drop("three", "the test ends")
        p.drop("five", "the test ends")

        def free() -> bool:
            counts = [one.context.guard.counts() for one in here.agents.values()]
            return all(count.holds == 0 and count.reserved == 0 for count in counts)

        await until(free)

        # Engines whose KV is laid out in another way.
        strange = KvShape(layers=LAYERS, layer_bytes=SHAPE.layer_bytes, name="other")
        async with engine(here, "d", shape=strange, worker="e") as other:
            assert await p.begin("six")
            other.want("six")
            assert not (await other.ended()).loaded


async def given_up(url: str) -> None:
    async with pair(url, kept_s=0.01, wait_s=0.01) as (here, p, d):
        d.want("never begun")
        assert not (await d.ended()).loaded
        assert await p.begin("unwanted", keys=WHOLE)
        for layer in range(LAYERS):
            p.compute("unwanted", layer)
        p.end("unwanted")
        await until(lambda: here.agents["p"].context.guard.counts().holds == 0)
        # Of what was computed the blocks with keys stay.
        assert here.agents["p"].context.guard.counts().committed == len(WHOLE)
        d.want("unwanted")
        assert not (await d.ended()).loaded


async def without_an_agent(url: str) -> None:
    async with pair(url, lookup_s=1.0) as (here, p, d):
        await here.agents["p"].stop()
        assert not await p.begin("one")
        d.want("one")
        assert not (await d.ended()).loaded


async def no_room(url: str) -> None:
    """A full pool is no store that is away: the next prompt for which there is room is sent."""
    async with pair(url) as (_, p, d):
        for number in range(8):
            assert await p.begin(f"{number}")
        d.want("more")
        assert not await p.begin("more")
        assert not (await d.ended()).loaded
        p.drop("0", "the test needs its slots")
        await until(lambda: len(p.sender._orders) == 7)
        assert await moved(p, d, "last", WHOLE) == 4 * SHAPE.block_bytes


async def one_name_twice(url: str) -> None:
    """A name is one prompt's, and its KV goes to one engine."""
    async with pair(url) as (here, p, d):
        d.want("one")
        assert await p.begin("one")
        assert not await p.begin("one")
        await until(lambda: p.sender._orders["one"].want is not None)
        async with engine(here, "d", worker="e") as other:
            other.want("one")
            assert not (await other.ended()).loaded
        d.want("one")
        assert not (await d.ended()).loaded
        for layer in range(LAYERS):
            p.compute("one", layer)
        p.end("one")
        assert (await d.ended()).loaded
        assert same(p, d)


def test_kv_that_does_not_come_ends_the_load_and_leaves_no_slot_behind(nats_url: str) -> None:
    for story in (refused_or_cut_off, given_up, without_an_agent, no_room, one_name_twice):
        asyncio.run(story(nats_url))


@pytest.mark.pure
def test_a_connector_names_what_is_wrong_with_its_options() -> None:
    for given, fault in (
        ({"worker": "w"}, "node"),
        ({"node": "n" * 49}, "worker: give a name of at most 48 letters"),
        ({"node": "n", "worker": "a b"}, "worker"),
        ({"node": "n", "worker": "w", "kept_s": 0.0}, "kept_s: 0.0 is not in 0..3600"),
        ({"node": "n", "worker": "w", "wait": 3}, "wait"),
    ):
        with pytest.raises(ValueError, match=fault):
            KvOptions.of(given)
