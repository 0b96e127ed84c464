"""A store agent in a process of its own: `python node_process.py URL CLUSTER NODE …`; prints "ready"."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))

from store_harness import Cluster


async def main(
    url: str, cluster: str, node_id: str, transport: str, encryption: str, slots: str, layers: str
) -> None:
    from contextlib import AsyncExitStack

    from store_harness import layout

    async with AsyncExitStack() as stack:
        here = Cluster(url, stack)
        here.name = cluster
        shape = layout(layers=int(layers), block_tokens=512, kv_heads=2, head_dim=64)
        await here.agent(node_id, transport=transport, encryption=encryption, slots=int(slots), layout=shape)
        print("ready", flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
