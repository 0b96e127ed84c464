"""Of the block that a prompt ends in its tokens are copied, into the pool by who computed them, out of it by who
decodes.

What else lies in those blocks is another request's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from halfmoon.schemas.policy import Layout
from halfmoon.workers.decode.actions import CopyLayers
from halfmoon.workers.decode.cache_copies import copy_layers
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.prefill.actions import ComputePrompt
from halfmoon.workers.prefill.cache_window import CacheWindow, PromptMemory
from halfmoon.workers.prefill.computation import PromptComputation

LAYERS, BLOCK = 2, 32
FOREIGN = 0xA5


class Memory:
    """Slots of a pool, full of what another request left."""

    def __init__(self, slots: int, layer_block_bytes: int) -> None:
        self.blocks = np.full((slots, LAYERS, layer_block_bytes), FOREIGN, np.uint8)

    def layer_block(self, slot: int, layer: int) -> np.ndarray:
        return self.blocks[slot, layer]

    @contextlib.contextmanager
    def writing(self, slot: int, order_id: str) -> Iterator[None]:
        yield

    def require_unchanged(self, slots: Sequence[int], epochs: Sequence[int]) -> None:
        """They are."""


@pytest.fixture(scope="module")
def engine(model_f32: LoadedModel) -> Engine:
    few = replace(model_f32, config=replace(model_f32.config, layers=LAYERS))
    return Engine(few, num_blocks=8, block_tokens=BLOCK, exact=True)


@pytest.mark.parametrize("tokens", [2, BLOCK + 3, 2 * BLOCK])
def test_the_rest_of_a_block_is_copied_by_nobody(engine: Engine, tokens: int) -> None:
    config, cache = engine.config, engine.cache
    layout = Layout(
        model="m",
        model_fingerprint="f",
        layers=LAYERS,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_tokens=BLOCK,
        dtype="float32",
    )
    pool, blocks = Memory(4, layout.layer_block_bytes), layout.blocks(tokens)
    for half in (cache.k, cache.v):
        half.fill_(3)
    prompt = ComputePrompt(
        order_id="1-1",
        token_ids=[(i * 31) % 40000 + 20 for i in range(tokens)],
        chunks=[range(start, min(start + BLOCK, tokens)) for start in range(0, tokens, BLOCK)],
        prefix_blocks=0,
        fetched_layer=LAYERS - 1,
        slots=[3, 1][:blocks],
        present=[],
    )
    with ThreadPoolExecutor(1) as copies:
        memory = PromptMemory(
            engine=engine,
            pool=pool,  # type: ignore[arg-type]
            layout=layout,
            window=CacheWindow(blocks, room=8, each=0),
        )
        PromptComputation(prompt, memory, copies=copies, tell=lambda _: None).run(list(range(blocks)))
    # A decode worker copies them into other blocks of a cache.
    order = CopyLayers(
        1,
        tuple((layer, slot, 4 + i) for i, slot in enumerate(prompt.slots) for layer in range(LAYERS)),
        tuple((slot, 1) for slot in prompt.slots),
        (prompt.slots[-1], tokens % BLOCK) if tokens % BLOCK else (-1, 0),
    )
    assert copy_layers(cache, pool, order) == ""  # type: ignore[arg-type]
    for i, slot in enumerate(prompt.slots):
        here = min(BLOCK, tokens - i * BLOCK)
        stored = pool.blocks[slot].reshape(LAYERS, 2, BLOCK, -1)
        assert (stored[:, :, here:] == FOREIGN).all()
        for half, mine in enumerate((cache.k, cache.v)):
            raw = mine.numpy().view(np.uint8).reshape(LAYERS, 8, BLOCK, -1)
            assert np.array_equal(stored[:, half, :here], raw[:, i, :here])
            assert np.array_equal(raw[:, 4 + i, :here], raw[:, i, :here])
            assert (mine[:, 4 + i, here:] == 3).all()
