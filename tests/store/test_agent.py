"""Agents and clients together over a real nats-server: put, fetch, push, release."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from store_harness import Cluster, keys, layers_told, tell, until

from halfmoon.schemas.kv import KvLoaded, TransferOpened
from halfmoon.schemas.store import QueuePair, RemoteMemory, ReserveBlocks, Reserved
from halfmoon.store.agent.serving.serve_peers import PeerService
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.errors import BlockMissing, StoreError, TransferError, TransferRefused


def fill(client: AgentClient, slots: list[int], seed: int) -> None:
    """Random bytes, equal for equal seeds."""
    for i, slot in enumerate(slots):
        shape = client.view.blocks[slot].shape
        client.view.blocks[slot] = np.random.default_rng(seed + i).integers(0, 256, shape, np.uint8)


def same(client: AgentClient, slots: list[int], seed: int) -> bool:
    shape = client.view.blocks[0].shape
    return all(
        np.array_equal(
            client.view.blocks[slot], np.random.default_rng(seed + i).integers(0, 256, shape, np.uint8)
        )
        for i, slot in enumerate(slots)
    )


async def stored(client: AgentClient, order_id: str, block_keys: bytes, seed: int) -> None:
    """Puts whole blocks and lets go of them."""
    opened = await client.open_put(order_id, block_keys, blocks=len(block_keys) // 16)
    fill(client, opened.slots, seed)
    await client.commit(order_id, first_block=0, blocks=len(opened.slots))
    await client.release(order_id)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_fetch_brings_the_bytes_and_tells_of_layers_in_order(nats_url: str, transport: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1", transport=transport)
        await here.agent("n2", transport=transport)
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        await stored(one, "o1", keys(1, 2, 3), seed=7)
        opened = await two.open_put("o2", keys(1, 2, 3, 4), blocks=5)
        assert opened.present == []
        fetched = await two.fetch("o2", "n1", first_block=0, blocks=3)
        assert (fetched.bytes, fetched.blocks) == (3 * 4 * 8192, 3)
        assert same(two, opened.slots[:3], 7)
        await until(lambda: bool(here.heard["w2"]))
        loaded = [m for m in here.heard["w2"] if isinstance(m, KvLoaded)]
        assert loaded[-1] == KvLoaded(order_id="o2", layer=3, first_block=0, blocks=3)
        with pytest.raises(BlockMissing) as caught:
            await two.fetch("o2", "n1", first_block=2, blocks=2)
        assert caught.value.held in (0, 1)
        await two.release("o2")
        await until(lambda: here.agents["n1"].context.guard.counts().leases == 0)
        counts = here.agents["n2"].context.guard.counts()
        assert (counts.committed, counts.reserved, counts.holds, counts.condemned) == (3, 0, 0, 0)

    tell(nats_url, story)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_push_is_readable_layer_by_layer_and_committed_at_its_close(nats_url: str, transport: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1", transport=transport)
        await here.agent("n2", transport=transport)
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        await stored(two, "o0", keys(1), seed=3)
        opened = await one.open_put("o1", keys(1, 2, 3), blocks=4)
        fill(one, opened.slots, 3)
        await one.open_push("o1", "r1", target_node_id="n2", decode_worker_id="w2")
        for layer in range(4):
            one.push("o1", layer=layer, first_block=0, blocks=4)
        pushed = await one.close_push("o1")
        assert pushed.bytes == 3 * 4 * 8192
        await until(lambda: len(layers_told(here.heard["w2"])) == 4)
        first = here.heard["w2"][0]
        assert isinstance(first, TransferOpened)
        assert first.present == [0]
        assert layers_told(here.heard["w2"]) == [(i, 3 * 8192) for i in range(4)]
        assert same(two, first.slots, 3)
        await one.commit("o1", first_block=0, blocks=4)
        await one.release("o1")
        assert here.agents["n2"].context.guard.counts().holds == 1
        await two.release("o1")
        for node, committed in (("n1", 3), ("n2", 3)):
            counts = here.agents[node].context.guard.counts()
            assert (counts.committed, counts.reserved, counts.holds, counts.condemned) == (committed, 0, 0, 0)

    tell(nats_url, story)


@pytest.mark.parametrize("takes_part", [True, False], ids=["", "a peer that is older"])
@pytest.mark.parametrize("transport", ["shm", "tcp", "tls"])
@pytest.mark.parametrize("tokens", [2, 16 + 3, 3 * 16])
def test_of_the_block_that_a_prompt_ends_in_its_tokens_are_pushed(
    nats_url: str, transport: str, tokens: int, takes_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not takes_part:
        reserve = PeerService.reserve

        async def reserve_as_before(self: PeerService, request: ReserveBlocks) -> Reserved:
            return msgspec.structs.replace(await reserve(self, request), takes_part=False)

        monkeypatch.setattr(PeerService, "reserve", reserve_as_before)
    way: dict[str, Any] = {"transport": "shm" if transport == "shm" else "tcp"}
    way["encryption"] = "always" if transport == "tls" else "never"

    async def story(here: Cluster) -> None:
        await here.agent("n1", **way)
        there = await here.agent("n2", **way)
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        shape = there.context.config.layout
        blocks, (whole, filled) = shape.blocks(tokens), divmod(tokens, shape.block_tokens)
        opened = await one.open_put("o1", keys(*range(whole)), blocks=blocks)
        fill(one, opened.slots, 3)
        two.view.blocks[:] = 0xA5
        await one.open_push("o1", "r1", target_node_id="n2", decode_worker_id="w2", tokens=tokens)
        for layer in range(shape.layers):
            one.push("o1", layer=layer, first_block=0, blocks=blocks)
        moved = tokens if takes_part else blocks * shape.block_tokens
        total = shape.layers * moved * shape.token_layer_bytes
        assert (await one.close_push("o1")).bytes == total
        assert (await one.status()).counters["pushed_bytes"] == total
        written = (await two.status()).counters.get("tcp_written_bytes", 0)
        assert written == (0 if transport == "shm" else total)
        await until(lambda: len(layers_told(here.heard["w2"])) == shape.layers)
        place = here.heard["w2"][0]
        assert isinstance(place, TransferOpened)
        assert [moved for _, moved in layers_told(here.heard["w2"])] == [total // shape.layers] * shape.layers
        for block, slot in enumerate(place.slots):
            sent, came = (
                view.blocks[at].reshape(shape.layers, 2, shape.block_tokens, -1)
                for view, at in ((one.view, opened.slots[block]), (two.view, slot))
            )
            here_of_it = min(moved - block * shape.block_tokens, shape.block_tokens)
            assert np.array_equal(came[:, :, :here_of_it], sent[:, :, :here_of_it])
            assert (came[:, :, here_of_it:] == 0xA5).all()
        # What was not sent is in no block that others can find, and what they can find is whole.
        assert there.context.guard.counts().committed == whole
        await two.release("o1")
        if filled:
            assert there.context.guard.counts().free == 32 - whole
        await one.release("o1")

    tell(nats_url, story)


@pytest.mark.pure
def test_a_push_of_parts_of_blocks_that_others_could_find_is_refused(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1")
        there = await here.agent("n2")
        one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
        await one.open_put("o1", keys(1, 2), blocks=2)
        for tokens, told in ((2, "2 are not 2 blocks of 16"), (16 + 3, "it has a key"), (33, "33 are not 2")):
            with pytest.raises(StoreError, match=told):
                await one.open_push("o1", "r1", target_node_id="n2", decode_worker_id="w2", tokens=tokens)
        assert there.context.guard.counts().reserved == 0
        await one.open_push("o1", "r1", target_node_id="n2", decode_worker_id="w2", tokens=32)
        await one.release("o1")
        await two.release("o1")

    tell(nats_url, story)


@pytest.mark.pure
def test_a_push_to_the_own_node_moves_nothing_and_both_workers_hold_the_slots(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1")
        one, two = await here.client("n1", "w1"), await here.client("n1", "w2")
        opened = await one.open_put("o1", keys(1, 2), blocks=3)
        fill(one, opened.slots, 5)
        await one.open_push("o1", "r1", target_node_id="n1", decode_worker_id="w2")
        for layer in range(4):
            one.push("o1", layer=layer, first_block=0, blocks=3)
        assert (await one.close_push("o1")).bytes == 0
        await one.release("o1")
        await until(lambda: len(layers_told(here.heard["w2"])) == 4)
        message: Any = here.heard["w2"][0]
        assert message.slots == opened.slots
        assert same(two, message.slots, 5)
        assert here.agents["n1"].context.guard.counts().reserved == 1
        await two.release("o1")
        counts = here.agents["n1"].context.guard.counts()
        assert (counts.free, counts.committed, counts.holds) == (30, 2, 0)

    tell(nats_url, story)


def test_rdma_that_is_not_there_is_reported_and_another_transport_is_taken(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        await here.agent("n1", rdma="none0")
        two = await here.agent("n2", transport="tcp")
        assert two.context.transports.absent["rdma"] == "transport is tcp"
        one = await here.client("n1", "w1")
        absent = (await one.status()).absent["rdma"]
        assert absent.startswith("no RDMA device")
        peer = await two.context.peers.get("n1")
        assert "rdma" not in [at.transport for at in peer.endpoints]
        engine = two.context.transports.engine_for(peer)
        assert [path.kind for path in engine.paths(peer)] == ["tcp"]
        memory = RemoteMemory(address="0", size=1, rkey=1)
        offer = QueuePair(
            node_id="n2",
            incarnation=two.context.incarnation,
            to_node_id="n1",
            to_incarnation=peer.incarnation,
            number=1,
            answer=False,
            qpn=1,
            psn=1,
            gid="::1",
            lid=0,
            ethernet=True,
            mtu=1024,
            region=memory,
            mailbox=memory,
        )
        with pytest.raises(TransferRefused, match=f"n1 has no RDMA: {absent}"):
            await two.context.peers.ask("n1", "pair", offer, QueuePair)
        with pytest.raises(TransferError, match="RDMA is not to be had: no RDMA device"):
            await here.agent("n3", rdma="none0", transport="rdma")

    tell(nats_url, story)
