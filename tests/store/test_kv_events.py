"""KV events in vLLM's wire form, read by a plain ZMQ subscriber with a plain msgpack decoder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from store_harness import cluster, layout, until

from halfmoon.bus.embedded import free_port
from halfmoon.store.client import StoreClient, key_of
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import TransferError

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
    events_at, replay_at = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))

    async def story() -> None:
        context = zmq.asyncio.Context()
        try:
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
                ssd_path=str(tmp_path / "tier"),
                ssd_bytes=6 * BLOCK + 12288,
                ssd_ahead_percent=100,
                kv_events=events_at,
                kv_events_replay=replay_at,
            )
            subscriber.connect(events_at)
            await asyncio.sleep(0.3)  # until it is known to the publisher; what was before comes by replay
            client = await StoreClient.connect(nats_url, node_id="n1")
            here.stack.push_async_callback(client.close)
            assert agent.context.tier is not None
            for number in range(16):
                await client.put(key_of(str(number)), np.full(BLOCK, number, np.uint8))
                await until(lambda n=number: agent.context.tier.find(key_of(str(n))) is not None)
            holds: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
            heard: dict[int, list[Any]] = {}
            while await subscriber.poll(300):
                seq, events = read(await subscriber.recv_multipart())
                heard[seq] = events
                for event in events:
                    hashes = set(event["block_hashes"])
                    if event["type"] == "BlockStored":
                        assert (event["block_size"], event["token_ids"], event["lora_id"]) == (16, [], None)
                        assert not hashes & holds[event["medium"]]
                        holds[event["medium"]] |= hashes
                    else:
                        assert event["type"] == "BlockRemoved"
                        assert hashes <= holds[event["medium"]]
                        holds[event["medium"]] -= hashes
            assert holds == {
                "CPU": set(agent.context.guard.keys()),
                "STORAGE": set(agent.context.tier.keys()),
            }
            assert sorted(heard) == list(range(1, len(heard) + 1))

            dealer = context.socket(zmq.DEALER)
            dealer.connect(replay_at)
            await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            again = {}
            while True:
                assert await dealer.poll(5000), "no end marker"
                empty, *frames = await dealer.recv_multipart()
                assert empty == b""
                if frames == [b"", (-1).to_bytes(8, "big", signed=True), b""]:
                    break
                seq, events = read(frames)
                again[seq] = events
            assert again.pop(0) == [{"type": "AllBlocksCleared"}]
            assert again == heard
            with pytest.raises(TransferError, match="in use"):
                await here.agent("n2", kv_events=events_at)

    asyncio.run(story())


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
