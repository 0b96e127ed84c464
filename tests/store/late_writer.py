"""A prefill worker's writes, in a process: `python late_writer.py URL NODE`. A line on its input lets it go on.

It says "in BLOCK" when it is inside a copy of layer 0 and "layer N" when it has stored one; then how it ended.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))

from store_harness import layout

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.errors import OrderUnknown
from halfmoon.workers.model.layer_hooks import LayerHooks
from halfmoon.workers.prefill.actions import ComputePrompt
from halfmoon.workers.prefill.cache_window import CacheWindow, PromptMemory
from halfmoon.workers.prefill.computation import PromptComputation

BLOCKS = 2
LATE = 66


class Engine:
    """Computes nothing, and has a cache of one value."""

    @property
    def cache(self) -> Engine:
        return self

    def read_block(self, layer: int, block: int, destination: np.ndarray, tokens: int = 0) -> None:
        if layer == 0:
            say(f"in {block}")
        destination[:] = LATE

    def prefill_chunk(self, *_: Any, hooks: LayerHooks, **__: Any) -> None:
        for layer in range(layout().layers):
            assert hooks.after_layer is not None
            hooks.after_layer(layer)
            say(f"layer {layer}")


def say(words: str) -> None:
    """And waits for a line."""
    print(words, flush=True)
    sys.stdin.readline()


async def main(url: str, node_id: str) -> None:
    bus = await Bus.connect(BusConfig(url=url), name="late")
    client = AgentClient(bus, node_id=node_id, worker_id="late")
    view = await client.attach()
    put = await client.open_put("o1", b"", blocks=BLOCKS)
    tokens = BLOCKS * layout().block_tokens
    prompt = ComputePrompt(
        order_id="o1",
        token_ids=[1] * tokens,
        chunks=[range(tokens)],
        prefix_blocks=0,
        slots=put.slots,
        present=[],
        fetched_layer=-1,
    )
    threads = ThreadPoolExecutor(1)
    computation = PromptComputation(
        prompt,
        PromptMemory(
            engine=Engine(), pool=view, layout=layout(), window=CacheWindow(BLOCKS, room=BLOCKS, each=0)
        ),
        copies=threads,
        tell=lambda _: None,
    )
    try:
        await asyncio.to_thread(computation.run, list(range(BLOCKS)))
        print("all written", flush=True)
    except OrderUnknown:
        print("refused", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
