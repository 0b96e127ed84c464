"""KV events in vLLM's wire form, read by a plain ZMQ subscriber with a plain msgpack decoder."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from store_harness import cluster, layout, until

from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.client import StoreClient, key_of
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import TransferError
from tests.eventually import BOUND_S

BLOCK = 4 * 8192


def read(frames: list[bytes]) -> tuple[int, list[Any]]:
    topic, seq, payload = frames
    assert topic == b""
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert (type(ts), rank) == (float, 0)
    return int.from_bytes(seq, "big"), events


def test_a_subscriber_knows_what_the_node_holds_and_a_late_one_asks_for_the_rest(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon.store.tiers.ssd.IDLE_S", 0.002)

    async def story() -> None:
        context = zmq.asyncio.Context()
        try:
            async with asyncio.timeout(BOUND_S):
                await listen(context)
        finally:
            context.destroy(linger=0)

    async def listen(context: zmq.asyncio.Context) -> None:
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe(b"")
        async with cluster(nats_url) as here:
            agent = await here.agent(
                "n1",
                slots=3,
                ssd=str(tmp_path / "tier"),
                ssd_bytes=6 * BLOCK + 12288,
                ssd_ahead_percent=100,
                kv_events="tcp://127.0.0.1:0",
                kv_events_replay="tcp://127.0.0.1:0",
            )
            events_at, replay_at = addresses(agent)
            client = await StoreClient.connect(nats_url, node_id="n1")
            here.stack.push_async_callback(client.close)
            tier = agent.context.tier
            assert tier is not None
            numbers = itertools.count()

            async def put() -> None:
                number = next(numbers)
                await client.put(key_of(str(number)), np.full(BLOCK, number % 256, np.uint8))
                await until(lambda: tier.find(key_of(str(number))) is not None)

            await put()
            subscriber.connect(events_at)
            while not await subscriber.poll(50):  # the publisher does not know of it yet
                await put()
            first, _ = read(await subscriber.recv_multipart())
            assert first > 1
            for _ in range(16):
                await put()

            dealer = context.socket(zmq.DEALER)
            dealer.connect(replay_at)
            await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            told: dict[int, list[Any]] = {}
            while True:
                empty, *frames = await dealer.recv_multipart()
                assert empty == b""
                if frames == [b"", (-1).to_bytes(8, "big", signed=True), b""]:
                    break
                seq, events = read(frames)
                told[seq] = events
            assert sorted(told) == list(range(len(told)))
            assert told[0] == [{"type": "AllBlocksCleared"}]
            assert held(told) == {
                "CPU": set(agent.context.guard.keys()),
                "STORAGE": set(tier.keys()),
            }
            for expected in range(first + 1, len(told)):
                seq, events = read(await subscriber.recv_multipart())
                assert (seq, events) == (expected, told[expected])
            with pytest.raises(TransferError, match="in use"):
                await here.agent("n2", kv_events=events_at)

    asyncio.run(story())


def addresses(agent: StoreAgent) -> list[str]:
    """At which its events are told, and told again."""
    events = agent.context.kv_events
    return [at.getsockopt_string(zmq.LAST_ENDPOINT) for at in (events._pub, events._router) if at is not None]


def held(told: dict[int, list[Any]]) -> dict[str, set[bytes]]:
    """What a subscriber knows of the node after all that it was told, by medium."""
    holds: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
    for event in itertools.chain.from_iterable(told[seq] for seq in sorted(told)):
        if event["type"] == "BlockStored":
            hashes = set(event["block_hashes"])
            assert (event["block_size"], event["token_ids"], event["lora_id"]) == (16, [], None)
            assert not hashes & holds[event["medium"]]
            holds[event["medium"]] |= hashes
        elif event["type"] == "BlockRemoved":
            hashes = set(event["block_hashes"])
            assert hashes <= holds[event["medium"]]
            holds[event["medium"]] -= hashes
        else:
            assert event == {"type": "AllBlocksCleared"}
    return holds


@pytest.mark.pure
@pytest.mark.parametrize(
    "address",
    ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://10.1.2.3:5557", "tcp://eth0:5557"],
)
def test_kv_events_ask_for_no_key_and_so_are_read_on_this_host_only_unless_told_otherwise(
    address: str,
) -> None:
    for field in ("kv_events", "kv_events_replay"):
        fields: dict[str, Any] = {"node_id": "n1", "layout": layout(), "slots": 3, "cluster_secret": "s"}
        with pytest.raises(ValueError, match=f"^{field}: "):
            StoreConfig(**fields, **{field: address})
        StoreConfig(**fields, **{field: address}, kv_events_public=True)
        for local in (
            "",
            "ipc:///run/events",
            "tcp://127.0.0.1:5557",
            "tcp://[::1]:5557",
            "tcp://localhost:5557",
        ):
            StoreConfig(**fields, **{field: local})
