"""A prompt longer than the engine's cache has the bits of one that fits: its past is attended to in the pool.

Invariant I107 of `docs/invariants.md`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference import prefill

from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.layer_hooks import LayerHooks
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.transformer import Rotary
from halfmoon.workers.prefill.cache_window import CacheWindow

LAYERS = 2


class Shape(NamedTuple):
    block: int
    #: Blocks of a segment, of the cache, of the prompt that are computed already.
    each: int
    room: int
    cached: int
    tokens: int


#: Prompts of several times the cache, whose last chunk is a whole block, a few rows, and one row.
SHAPES = [
    Shape(16, 2, 5, 0, 16 * 11),
    Shape(16, 2, 2, 0, 16 * 8 + 7),
    Shape(24, 3, 7, 0, 24 * 13 + 1),
    Shape(24, 3, 6, 11, 24 * 14 + 5),
    Shape(16, 1, 3, 9, 16 * 10 + 1),
]


@pytest.fixture(scope="module", params=["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    found: LoadedModel = request.getfixturevalue(f"model_{request.param}")
    return replace(found, config=replace(found.config, layers=LAYERS))


def make(model: LoadedModel, shape: Shape, blocks: int) -> Engine:
    segment = shape.block * shape.each
    return Engine(model, num_blocks=blocks, block_tokens=shape.block, exact=True, segment_tokens=segment)


class Spilled:
    """A prompt in an engine with little cache: blocks are put to `pool` `[blocks, layers, bytes]` as computed."""

    def __init__(self, engine: Engine, shape: Shape, pool: NDArray[np.uint8]) -> None:
        self.engine, self.shape, self.pool = engine, shape, pool
        self.window = CacheWindow(len(pool), room=shape.room, each=shape.each)
        self.cache = engine.allocator.allocate(self.window.blocks)
        engine.cache.k.fill_(float("nan"))  # what was never brought there would be seen
        engine.cache.v.fill_(float("nan"))
        self.elsewhere = engine.pooled_segments(lambda number, layer: pool[number, layer])

    def load(self) -> None:
        table = self.window.table(self.cache, self.shape.cached)
        for block in range(self.shape.cached):
            for layer in range(LAYERS):
                if table[block] >= 0:
                    self.engine.cache.write_block(layer, table[block], self.pool[block, layer])

    def compute(self, prompt: list[int]) -> str:
        size, logits = self.shape.block, None
        for block in range(self.shape.cached, len(self.pool)):
            table = self.window.table(self.cache, block)
            self.elsewhere.segments = self.window.away(block)
            chunk = prompt[block * size : (block + 1) * size]

            def store(layer: int, block: int = block, place: int = table[-1]) -> None:
                self.engine.cache.read_block(layer, place, self.pool[block, layer])

            logits = self.engine.prefill_chunk(
                chunk,
                block * size,
                table,
                want_logits=block + 1 == len(self.pool),
                hooks=LayerHooks(
                    after_layer=store, elsewhere=self.elsewhere if self.elsewhere.segments else None
                ),
            )
        assert logits is not None
        return self.engine.logits_digest(logits)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_as_in_a_cache_that_holds_it(model: LoadedModel, shape: Shape) -> None:
    prompt = [(i * i * 31 + 17 * i) % 40000 + 20 for i in range(shape.tokens)]
    blocks = -(-shape.tokens // shape.block)
    large = make(model, shape, blocks)
    table = large.allocator.allocate(blocks)
    expected = large.logits_digest(prefill(large, prompt, table))
    whole = np.zeros((blocks, LAYERS, large.cache.layer_block_bytes), dtype=np.uint8)
    for block in range(blocks):
        for layer in range(LAYERS):
            large.cache.read_block(layer, table[block], whole[block, layer])

    pool = np.full_like(whole, 255)
    pool[: shape.cached] = whole[: shape.cached]
    spilled = Spilled(make(model, shape, shape.room), shape, pool)
    spilled.load()
    assert spilled.compute(prompt) == expected
    last = shape.tokens % shape.block  # what stands behind the prompt's end is nobody's
    full = slice(None, -1 if last else None)
    assert np.array_equal(pool[full], whole[full])


def test_a_planted_difference_in_the_pool_is_seen(model: LoadedModel) -> None:
    shape = SHAPES[3]
    prompt = [(i * i * 31 + 17 * i) % 40000 + 20 for i in range(shape.tokens)]
    blocks = -(-shape.tokens // shape.block)
    found = []
    for planted in (False, True):
        engine = make(model, shape, shape.room)
        pool = np.zeros((blocks, LAYERS, engine.cache.layer_block_bytes), dtype=np.uint8)
        pool[5, LAYERS - 1, 11] = 0x40 if planted else 0  # a number of 2 or more
        spilled = Spilled(engine, shape, pool)
        spilled.load()
        found.append(spilled.compute(prompt))
    assert found[0] != found[1]


def test_a_longer_table_of_positions_begins_with_the_bits_of_a_shorter_one(model: LoadedModel) -> None:
    long = Rotary(model.config, torch.device("cpu"), 5000)
    for positions in (1, 7, 64, 1000, 2500):
        grown = Rotary(model.config, torch.device("cpu"), positions)
        at = torch.arange(positions)
        for ours, theirs in zip(grown.rows(at), long.rows(at), strict=True):
            assert torch.equal(ours, theirs)
        grown.reach(positions + 1)
        at = torch.arange(positions + 1)
        for ours, theirs in zip(grown.rows(at), long.rows(at), strict=True):
            assert torch.equal(ours, theirs)
