"""The store with nothing else of halfmoon: a nats-server, a store agent with an SSD tier, and a client, in
one program.

python examples/store_client.py
"""

import asyncio
import tempfile
from pathlib import Path

import numpy as np

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.schemas.policy import Layout
from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.client import StoreClient, key_of
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import BlockMissing

# 8 layers of 128 KiB a block: 1 MiB. An engine gives the shape of its own KVCache here.
LAYOUT = Layout(
    model="any", model_fingerprint="1", layers=8, kv_heads=4, head_dim=128, block_tokens=64, dtype="bfloat16"
)


async def use(url: str) -> None:
    async with await StoreClient.connect(url, node_id="n1", tenant="acme") as client:
        blocks = {
            key_of(f"block {i}", tenant="acme"): np.full(client.block_bytes, i, np.uint8) for i in range(48)
        }
        for key, block in blocks.items():  # three times as many as the pool holds
            await client.put(key, block)
            await asyncio.sleep(0.02)
        keys = list(blocks)
        print("of 48 blocks there:", sum(answer is True for answer in await client.batch_exists(keys)))

        into = np.empty((8, 2, 64, 4, 128), np.uint16)
        await client.get_into(keys[0], into, verify=True)
        print("the first one, from the SSD, is right:", bool((into.view(np.uint8) == 0).all()))

        await client.pin([keys[47]], ttl_s=60)  # goes last of all, for a minute or until `unpin`
        async with await client.get(keys[47]) as held:  # in place: no byte is copied, nothing evicts it
            print("the last one, in the pool's own memory:", held.array[:4])
        await client.unpin([keys[47]])

        try:
            await client.get_into(key_of("nobody put this"), into)
        except BlockMissing as problem:
            print("a miss:", problem)


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer.start(Path(directory) / "nats")
        bus = await Bus.connect(BusConfig(url=server.url), name="agent")
        config = StoreConfig(
            node_id="n1",
            layout=LAYOUT,
            slots=16,
            ssd=f"{directory}/tier",
            ssd_bytes=64 << 20,
            cluster="example",
            cluster_secret="example",
            data_port=-1,
        )
        agent = StoreAgent(bus, config)
        await agent.start()
        try:
            await use(server.url)
        finally:
            await agent.stop()
            await bus.close()
            server.stop()


if __name__ == "__main__":
    asyncio.run(main())
