"""Exact mode gives the same bits however a request is served; a planted difference is seen.

Invariant I106 of `docs/invariants.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import flip_a_bit, sum_in_two_halves
from reference import prefill

from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.layer_hooks import LayerHooks
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.self_test import invariant_row_counts

BLOCK_TOKENS = 64
LENGTHS = (300, 64, 129, 5)
PROMPTS = [
    [(i * i * 31 + 17 * i + 1000 * seed) % 40000 + 20 for i in range(n)] for seed, n in enumerate(LENGTHS)
]
STEPS = 6


#: All layers run the same code in the same shapes: the first ones stand for all, but in `make test-slow`.
LAYERS = 3
KINDS = ["f32", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bf16", "f32 whole", "bf16 whole"))]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    kind, _, whole = request.param.partition(" ")
    found: LoadedModel = request.getfixturevalue(f"model_{kind}")
    return found if whole else replace(found, config=replace(found.config, layers=LAYERS))


@pytest.fixture(scope="module")
def engine(model: LoadedModel) -> Engine:
    engine = Engine(model, num_blocks=160, block_tokens=BLOCK_TOKENS, exact=True)
    engine.product_rows = invariant_row_counts(engine)  # as a worker has them
    return engine


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def serve(engine: Engine, prompts: list[list[int]], tables: list[list[int]]) -> list[list[str]]:
    """Prefills each prompt, then decodes all as one batch: every digest of every row of logits, by prompt."""
    logits = [prefill(engine, prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    return go_on(engine, [len(prompt) for prompt in prompts], logits, tables)


def go_on(
    engine: Engine, lengths: list[int], logits: list[torch.Tensor], tables: list[list[int]]
) -> list[list[str]]:
    digests = [[engine.logits_digest(row)] for row in logits]
    tokens = [engine.argmax(row)[0] for row in logits]
    for step in range(STEPS):
        rows = engine.decode(tokens, [length + step for length in lengths], tables)
        tokens = engine.argmax(rows)
        for found, row in zip(digests, rows, strict=True):
            found.append(engine.logits_digest(row))
    return digests


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[str]]:
    """Each prompt served alone, cold, in one run of blocks."""
    found = []
    for prompt in PROMPTS:
        table = engine.allocator.allocate(blocks(len(prompt) + STEPS))
        assert table == list(range(table[0], table[0] + len(table)))
        found += serve(engine, [prompt], [table])
        engine.allocator.free(table)
    return found


def test_every_prompt_and_step_has_bits_of_its_own(alone: list[list[str]]) -> None:
    flat = [digest for found in alone for digest in found]
    assert len(set(flat)) == len(flat) == len(PROMPTS) * (STEPS + 1)


def test_a_batch_gives_the_bits_of_each_alone(engine: Engine, alone: list[list[str]]) -> None:
    tables = [engine.allocator.allocate(blocks(len(prompt) + STEPS)) for prompt in PROMPTS]
    assert serve(engine, PROMPTS, tables) == alone
    engine.cache.k.zero_()  # what other tests left must not be what this one reads
    engine.cache.v.zero_()
    assert serve(engine, PROMPTS[::-1], tables[::-1]) == alone[::-1]
    for table in tables:
        engine.allocator.free(table)


def test_batches_beyond_one_group_of_rows_give_the_same_bits(engine: Engine, alone: list[list[str]]) -> None:
    prompts = [PROMPTS[i % 3 + 1] for i in range(19)]
    tables = [engine.allocator.allocate(blocks(len(prompt) + STEPS)) for prompt in prompts]
    assert serve(engine, prompts, tables) == [alone[i % 3 + 1] for i in range(19)]
    for table in tables:
        engine.allocator.free(table)


def test_scattered_blocks_give_the_bits_of_a_run(engine: Engine, alone: list[list[str]]) -> None:
    assert engine.allocator.free_blocks == 160
    everything = np.random.default_rng(3).permutation(160).tolist()
    tables = []
    for prompt in PROMPTS:
        need = blocks(len(prompt) + STEPS)
        tables.append(everything[:need])
        everything = everything[need:]
    assert serve(engine, PROMPTS, tables) == alone


def test_a_cached_prefix_gives_the_bits_of_a_cold_start(engine: Engine, alone: list[list[str]]) -> None:
    """The prefix is computed by another engine, for a longer prompt, and moves as raw bytes between the
    caches.
    """
    prompt = PROMPTS[0]
    other = engine.allocator.allocate(6)
    prefill(engine, [*prompt[:256], 9, 9, 9], other)
    for cached in (1, 2, 4):
        table = engine.allocator.allocate(blocks(len(prompt) + STEPS))[::-1]
        buffer = np.empty(engine.cache.layer_block_bytes, dtype=np.uint8)
        for layer in range(engine.config.layers):
            for theirs, ours in zip(other[:cached], table, strict=False):
                engine.cache.read_block(layer, theirs, buffer)
                engine.cache.write_block(layer, ours, buffer)
        logits = prefill(engine, prompt, table, start=cached * BLOCK_TOKENS)
        assert go_on(engine, [len(prompt)], [logits], [table]) == alone[:1]
        engine.allocator.free(table)
    engine.allocator.free(other)


@pytest.mark.slow
def test_another_engine_gives_the_same_bits(model: LoadedModel, alone: list[list[str]]) -> None:
    engine = Engine(model, num_blocks=7, block_tokens=BLOCK_TOKENS, exact=True)
    table = engine.allocator.allocate(6)
    assert serve(engine, [PROMPTS[0]], [table]) == alone[:1]


def test_a_request_resumed_by_replaying_its_tokens_goes_on_with_the_same_bits(
    engine: Engine, alone: list[list[str]]
) -> None:
    """Prefill of the prompt alone, then decode steps over the tokens that are known: not a longer prompt."""
    for moved_after in (1, STEPS - 1):
        table = engine.allocator.allocate(6)
        logits = prefill(engine, PROMPTS[0], table)
        known = engine.argmax(logits)
        digests = [engine.logits_digest(logits)]
        for step in range(STEPS):
            if step == moved_after:
                engine.allocator.free(table)
                table = engine.allocator.allocate(6)[::-1]
                prefill(engine, PROMPTS[0], table)
                for i, token in enumerate(known[:-1]):
                    engine.decode([token], [len(PROMPTS[0]) + i], [table])
            row = engine.decode(known[-1:], [len(PROMPTS[0]) + step], [table])
            known += engine.argmax(row)
            digests.append(engine.logits_digest(row))
        assert digests == alone[0]
        engine.allocator.free(table)


def test_exact_mode_refuses_chunks_off_its_grid(engine: Engine) -> None:
    with pytest.raises(AssertionError, match="off the grid"):
        engine.prefill_chunk([5] * 10, 10, [0, 1])


@pytest.mark.parametrize(("scattered", "segment_blocks"), [(False, 2), (True, 2), (False, 0)])
def test_blocks_computed_together_have_the_bits_of_each_alone(
    model: LoadedModel, *, scattered: bool, segment_blocks: int
) -> None:
    """Logits and KV, in chunks of several blocks, which begin and end anywhere in the segments, if there are any; of
    some prompts the last block has one token.
    """
    engine = Engine(
        model,
        num_blocks=16,
        block_tokens=BLOCK_TOKENS,
        exact=True,
        segment_tokens=segment_blocks * BLOCK_TOKENS,
    )
    order = np.random.default_rng(5).permutation(16).tolist() if scattered else list(range(16))
    for tokens in (300, 321, 129, 130):
        prompt, table, other = (PROMPTS[0] * 2)[:tokens], order[:8], order[8:]
        engine.cache.k.fill_(float("nan"))  # what is read before it is written would be seen
        engine.cache.v.fill_(float("nan"))
        alone = prefill(engine, prompt, table)
        for begin, blocks_each in ((0, 2), (0, 3), (0, 8), (1, 2), (1, 8)):
            start = begin * BLOCK_TOKENS
            for i in range(begin):
                engine.cache.k[:, other[i]] = engine.cache.k[:, table[i]]
                engine.cache.v[:, other[i]] = engine.cache.v[:, table[i]]
            chunk_tokens = blocks_each * BLOCK_TOKENS
            found = prefill(engine, prompt, other, start=start, chunk_tokens=chunk_tokens)
            assert torch.equal(found, alone), (tokens, begin, blocks_each)
            for cache in (engine.cache.k, engine.cache.v):
                ours, theirs = (cache[:, blocks].flatten(1, 2)[:, :tokens] for blocks in (other, table))
                assert torch.equal(ours, theirs), (tokens, begin, blocks_each)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["chunks", "batch"])
def test_fast_mode_is_close_to_itself_where_it_may_differ(model_bf16: LoadedModel, changed: str) -> None:
    """Whether it differs at all is the CPU's affair."""
    engine = Engine(model_bf16, num_blocks=16, block_tokens=BLOCK_TOKENS, exact=False)
    prompt, table, other = PROMPTS[0], engine.allocator.allocate(6), engine.allocator.allocate(6)
    whole = prefill(engine, prompt, table, chunk_tokens=len(prompt))
    if changed == "chunks":
        close_to, found = whole, prefill(engine, prompt, other)
    else:
        prefill(engine, prompt, other, chunk_tokens=len(prompt))
        close_to = engine.decode([7], [300], [table])[0]
        found = engine.decode([7] * 3, [300, 300, 300], [other, table, table])[0]
    torch.testing.assert_close(close_to, found, atol=1.5, rtol=0.0)


def test_one_flipped_bit_of_a_cached_prefix_is_seen(engine: Engine, alone: list[list[str]]) -> None:
    """The comparison of bits can fail: the tests above would see a difference if there were one."""
    table = engine.allocator.allocate(blocks(len(PROMPTS[0]) + STEPS))
    prefill(engine, PROMPTS[0], table)
    logits = prefill(engine, PROMPTS[0], table, start=256)
    assert go_on(engine, [len(PROMPTS[0])], [logits], [table]) == alone[0:1]
    flip_a_bit(engine, table[0])
    logits = prefill(engine, PROMPTS[0], table, start=256)
    differing = go_on(engine, [len(PROMPTS[0])], [logits], [table])[0]
    assert all(found != expected for found, expected in zip(differing, alone[0], strict=True))
    engine.allocator.free(table)


def test_another_order_of_summation_is_seen(model: LoadedModel, alone: list[list[str]]) -> None:
    engine = Engine(model, num_blocks=2, block_tokens=BLOCK_TOKENS, exact=True)
    sum_in_two_halves(engine, model)
    assert serve(engine, [PROMPTS[3]], [engine.allocator.allocate(2)]) != alone[3:]


def test_layers_are_announced_in_order_and_a_stop_ends_between_two(engine: Engine) -> None:
    table = engine.allocator.allocate(1)
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[int], None]:
        return lambda layer: seen.append((name, layer))

    engine.prefill_chunk(
        [3, 4, 5], 0, table, hooks=LayerHooks(before_layer=note("load"), after_layer=note("store"))
    )
    layers = engine.config.layers
    assert seen == [(name, layer) for layer in range(layers) for name in ("load", "store")]
    seen.clear()
    stopped = engine.prefill_chunk(
        [3, 4, 5],
        0,
        table,
        want_logits=True,
        hooks=LayerHooks(after_layer=note("store"), should_stop=lambda: len(seen) == 2),
    )
    assert stopped is None
    assert seen == [("store", layer) for layer in range(2)]
    engine.allocator.free(table)


def test_the_layer_announced_is_in_the_cache(engine: Engine) -> None:
    table = engine.allocator.allocate(1)
    engine.prefill_chunk(PROMPTS[1], 0, table)
    expected = engine.cache.k[:, table[0]].clone()
    engine.cache.k[:, table[0]] = 0
    for_layer: list[bool] = []
    engine.prefill_chunk(
        PROMPTS[1], 0, table,
        hooks=LayerHooks(
            after_layer=lambda i: for_layer.append(torch.equal(engine.cache.k[i, table[0]], expected[i]))
        ),
    )  # fmt: skip
    assert for_layer == [True] * engine.config.layers
    engine.allocator.free(table)
