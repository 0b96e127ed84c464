"""The allocator against a model of it, and copies of single layers in and out of the cache."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halfmoon.workers.model.loading.config import ModelConfig
from halfmoon.workers.model.paged_cache import BlockAllocator, PagedCache
from tests.lengths import examples

NUM_BLOCKS = 24


class AllocatorAgainstModel(RuleBasedStateMachine):
    """The model is a set of free blocks; tables are what sequences hold."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.free = set(range(NUM_BLOCKS))
        self.tables: list[list[int]] = []

    def longest_run(self) -> int:
        longest = run = 0
        for block in range(NUM_BLOCKS):
            run = run + 1 if block in self.free else 0
            longest = max(longest, run)
        return longest

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        assert self.allocator.can_allocate(count) == (count <= len(self.free))
        if count > len(self.free):
            with pytest.raises(AssertionError):
                self.allocator.allocate(count)
            return
        run_exists = count <= self.longest_run()
        table = self.allocator.allocate(count)
        assert len(set(table)) == count
        assert set(table) <= self.free
        if run_exists:
            assert table == list(range(table[0], table[0] + count)) if table else count == 0
        self.free -= set(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables and self.free)
    @rule(pick=st.integers(0, 99), wanted=st.integers(1, 4))
    def extend(self, pick: int, wanted: int) -> None:
        table = self.tables[pick % len(self.tables)]
        before, count = list(table), min(wanted, len(self.free))
        next_free = bool(before) and before[-1] + 1 in self.free
        added = self.allocator.extend(table, count)
        assert table == before + added
        assert set(added) <= self.free
        assert len(set(added)) == count
        if next_free:
            assert added[0] == before[-1] + 1
        self.free -= set(added)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99))
    def free_table(self, pick: int) -> None:
        table = self.tables.pop(pick % len(self.tables))
        self.allocator.free(table)
        self.free |= set(table)
        if table:
            with pytest.raises(AssertionError, match="freed twice"):
                self.allocator.free(table[:1])

    @invariant()
    def counts_agree(self) -> None:
        assert self.allocator.free_blocks == len(self.free)
        self.allocator.check()


AllocatorAgainstModel.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestTheAllocatorAgainstItsModel = AllocatorAgainstModel.TestCase


def test_the_smallest_run_that_fits_is_taken() -> None:
    allocator = BlockAllocator(10)
    table = allocator.allocate(10)
    allocator.free(table[0:4] + table[6:8])
    assert allocator.allocate(2) == [6, 7]
    assert allocator.allocate(3) == [0, 1, 2]


def test_two_sequences_that_grow_by_turns_both_stay_in_one_run() -> None:
    allocator = BlockAllocator(64)
    tables = [allocator.allocate(1), allocator.allocate(1)]
    for _ in range(10):
        for table in tables:
            allocator.extend(table)
    pieces = [sum(b != a + 1 for a, b in pairwise(table)) for table in tables]
    assert pieces == [1, 0]  # the first has to move once, to where both can grow


def config(layers: int = 3) -> ModelConfig:
    return ModelConfig(
        layers=layers, hidden=8, heads=2, kv_heads=2, head_dim=4, intermediate=8, vocab=9, rope_base=1e4,
        rope_scaling=None, rms_eps=1e-5, context_tokens_max=64, tied=True, attention_bias=False, bos_token_id=None,
        eos_token_ids=(2,),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tensor", "array", "bytearray", "memoryview"])
def test_a_block_in_the_pools_layout_goes_into_the_cache_and_back(dtype: torch.dtype, kind: str) -> None:
    cache = PagedCache(config(), 5, 16, dtype)
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    assert cache.layer_block_bytes == 2 * 16 * 2 * 4 * element_bytes
    assert cache.block_bytes == 3 * cache.layer_block_bytes
    cache.k.zero_()
    cache.v.zero_()
    pool = torch.randn(3, 2, 16, 2, 4).to(dtype)
    raw = pool.view(torch.uint8).numpy()
    back = np.zeros_like(raw)
    for layer in range(3):
        sources = {
            "tensor": pool[layer], "array": raw[layer], "bytearray": bytearray(raw[layer].tobytes()),
            "memoryview": memoryview(raw[layer].tobytes()),
        }  # fmt: skip
        cache.write_block(layer, 4, sources[kind])
        cache.read_block(layer, 4, torch.from_numpy(back[layer]) if kind == "tensor" else back[layer])
        assert torch.equal(cache.k[layer, 4], pool[layer, 0])
        assert torch.equal(cache.v[layer, 4], pool[layer, 1])
    assert back.tobytes() == raw.tobytes()
    assert not cache.k[:, :4].any()
    assert not cache.v[:, :4].any()


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_of_a_block_that_is_filled_in_part_its_first_tokens_are_copied(kind: str) -> None:
    cache = PagedCache(config(1), 2, 16, torch.float32)
    for each in (cache.k, cache.v):
        each.fill_(7)
    pool = torch.randn(2, 16, 2, 4)
    cache.write_block(0, 1, pool if kind == "tensor" else pool.view(torch.uint8).numpy(), 3)
    for each, came in ((cache.k, pool[0]), (cache.v, pool[1])):
        assert torch.equal(each[0, 1, :3], came[:3])
        assert (each[0, 1, 3:] == 7).all()
        assert (each[0, 0] == 7).all()
    back = torch.zeros(2, 16, 2, 4)
    cache.read_block(0, 1, back if kind == "tensor" else back.view(torch.uint8).numpy(), 2)
    assert torch.equal(back[:, :2], pool[:, :2])
    assert not back[:, 2:].any()


def test_bits_that_are_no_number_pass_unharmed() -> None:
    cache = PagedCache(config(1), 1, 16, torch.bfloat16)
    source = np.random.default_rng(1).integers(0, 256, cache.layer_block_bytes, dtype=np.uint8)
    cache.write_block(0, 0, source)
    back = bytearray(cache.layer_block_bytes)
    cache.read_block(0, 0, back)
    assert bytes(back) == source.tobytes()


def test_a_buffer_of_another_size_is_refused() -> None:
    cache = PagedCache(config(1), 1, 16, torch.float32)
    with pytest.raises(AssertionError):
        cache.write_block(0, 0, bytes(cache.layer_block_bytes - 1))
    with pytest.raises(AssertionError):
        cache.read_block(0, 0, torch.zeros(cache.layer_block_bytes + 4, dtype=torch.uint8))
