"""The canonical split: a row's bits depend on its own keys alone, wherever they lie and whoever attends to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import flash_attn_reference
import numpy as np
import pytest
import torch

from halfmoon.workers.model.attention import kernel
from halfmoon.workers.model.attention import states as states_module
from halfmoon.workers.model.attention.exact import ExactAttention, ExactPlan
from halfmoon.workers.model.attention.flash import FlashAttention
from halfmoon.workers.model.attention.kernel import Attention, LayerCache, SdpaAttention, StepRuns, runs_of
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.paged_cache import PagedCache
from halfmoon.workers.model.pooled_segments import PooledSegments
from halfmoon.workers.model.segments import AWAY

HEADS, KV_HEADS, DIM, BLOCK, SEGMENT = 6, 2, 32, 256, 512
BLOCKS = 24
CPU = torch.device("cpu")
#: Tokens in the cache, the last of which is the query's own: one token, below, at and above a segment, several.
CONTEXTS = (1, 300, 512, 513, 514, 1024, 1025, 2300)


KINDS = ["f32", "bf16", "without the private operator", "without what is compiled", "flash by its reference"]


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attention]:
    if request.param.startswith("flash"):
        monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_reference.stand_in())
        yield FlashAttention(BLOCK, CPU, exact=True)
    else:
        if request.param == "without what is compiled":
            monkeypatch.setattr(kernel, "state_kernel", lambda *_: None)
            monkeypatch.setattr(kernel, "chunk_kernel", lambda *_: None)
            monkeypatch.setattr(states_module, "merge_kernel", lambda *_: None)
        yield SdpaAttention(BLOCK, CPU, private_op=not request.param.startswith("without"))


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    name = request.node.callspec.params["base"]
    return torch.bfloat16 if name.startswith(("bf16", "flash")) else torch.float32


class Served:
    """Sequences of `CONTEXTS`, each with its keys, its values and the query of its last token."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)
        self.dtype = dtype
        self.keys = [self._random(generator, tokens) for tokens in CONTEXTS]
        self.values = [self._random(generator, tokens) for tokens in CONTEXTS]
        self.queries = [torch.randn(HEADS, DIM, generator=generator).mul_(3).to(dtype) for _ in CONTEXTS]

    def _random(self, generator: torch.Generator, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, KV_HEADS, DIM, generator=generator).to(self.dtype)

    def cache(self, tables: list[list[int]], members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What was never written there is not a number, and would be seen."""
        caches = []
        for rows in (self.keys, self.values):
            cache = torch.full((BLOCKS, BLOCK, KV_HEADS, DIM), float("nan")).to(self.dtype)
            for table, member in zip(tables, members, strict=True):
                for i, block in enumerate(table):
                    part = rows[member][i * BLOCK : (i + 1) * BLOCK]
                    cache[block, : len(part)] = part
            caches.append(cache)
        return caches[0], caches[1]

    def attended(self, attention: Attention, members: list[int], blocks: list[int]) -> torch.Tensor:
        """One step of a batch of `members`, which take their blocks from `blocks` in turn."""
        tables = []
        for member in members:
            need = -(-CONTEXTS[member] // BLOCK)
            tables.append(blocks[:need])
            blocks = blocks[need:]
        k_cache, v_cache = self.cache(tables, members)
        q = torch.stack([self.queries[member] for member in members])
        k, v = (torch.stack([rows[m][-1] for m in members]) for rows in (self.keys, self.values))
        out = torch.empty_like(q)
        plan = attention.plan(tables, [1] * len(members), [CONTEXTS[member] for member in members])
        attention.attend(q, k, v, LayerCache(k_cache, v_cache), plan, out)
        return out


def test_a_row_has_its_bits_in_any_batch_and_any_blocks(base: Attention, dtype: torch.dtype) -> None:
    attention, served = ExactAttention(base, SEGMENT), Served(dtype)
    alone = [served.attended(attention, [i], list(range(BLOCKS)))[0] for i in range(len(CONTEXTS))]
    assert not any(row.isnan().any() for row in alone)
    scattered = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    for members in ([0, 3, 6], [7, 1], [5, 2, 0, 4], [6, 6]):
        for blocks in (list(range(BLOCKS)), scattered, list(range(BLOCKS))[::-1]):
            found = served.attended(attention, members, blocks)
            for row, member in zip(found, members, strict=True):
                assert torch.equal(row, alone[member]), (CONTEXTS[member], members, blocks)


def test_a_step_may_be_used_for_every_layer(base: Attention, dtype: torch.dtype) -> None:
    """The plan's room for states is written again by each layer."""
    attention, served = ExactAttention(base, SEGMENT), Served(dtype)
    members = [7, 0]
    tables = [list(range(9)), [20]]
    k_cache, v_cache = served.cache(tables, members)
    q = torch.stack([served.queries[m] for m in members])
    k, v = (torch.stack([rows[m][-1] for m in members]) for rows in (served.keys, served.values))
    plan = attention.plan(tables, [1, 1], [CONTEXTS[m] for m in members])
    first, second = torch.empty_like(q), torch.empty_like(q)
    attention.attend(q, k, v, LayerCache(k_cache, v_cache), plan, first)
    attention.attend(q * 2, k, v, LayerCache(k_cache, v_cache), plan, torch.empty_like(q))
    attention.attend(q, k, v, LayerCache(k_cache, v_cache), plan, second)
    assert torch.equal(first, second)


def test_states_that_were_computed_elsewhere_merge_to_the_same_bits(
    base: Attention, dtype: torch.dtype
) -> None:
    """Segments spread over three caches, in calls of their own, written to the stack in any order."""
    attention, served = ExactAttention(base, SEGMENT), Served(dtype)
    member = len(CONTEXTS) - 1
    past = CONTEXTS[member] - 1
    expected = served.attended(attention, [member], list(range(BLOCKS)))[0]
    starts = list(range(0, past, SEGMENT))
    states = StateStack(len(starts), 1, HEADS, DIM, CPU)
    q = served.queries[member].unsqueeze(0)
    states.own_token(q, served.keys[member][-1:], served.values[member][-1:])
    for place in (2, 0, 1):
        table = [3 + place, 1 + place]
        for part in range(place, len(starts), 3):
            start, tokens = starts[part], min(SEGMENT, past - starts[part])
            caches = []
            for rows in (served.keys, served.values):
                cache = torch.full((BLOCKS, BLOCK, KV_HEADS, DIM), float("nan")).to(dtype)
                for i, block in enumerate(table):
                    held = rows[member][start : start + tokens][i * BLOCK : (i + 1) * BLOCK]
                    cache[block, : len(held)] = held
                caches.append(cache)
            runs = StepRuns(runs_of(0, table, tokens, SEGMENT, BLOCK, CPU, part=part))
            base.segment_states(q, caches[0], caches[1], runs, states)
    assert torch.equal(states.merged()[0].to(dtype), expected)


def test_heads_apart_have_the_bits_of_heads_together(base: Attention, dtype: torch.dtype) -> None:
    attention, served = ExactAttention(base, SEGMENT), Served(dtype)
    member = len(CONTEXTS) - 1
    table = list(range(BLOCKS))[: -(-CONTEXTS[member] // BLOCK)]
    together = served.attended(attention, [member], list(range(BLOCKS)))[0]
    k_cache, v_cache = served.cache([table], [member])
    group = HEADS // KV_HEADS
    for head in range(KV_HEADS):
        q = served.queries[member][head * group : (head + 1) * group].unsqueeze(0).contiguous()
        one = slice(head, head + 1)
        k, v = (rows[member][-1:, one].contiguous() for rows in (served.keys, served.values))
        out = torch.empty_like(q)
        plan = attention.plan([table], [1], [CONTEXTS[member]])
        heads = LayerCache(k_cache[:, :, one].contiguous(), v_cache[:, :, one].contiguous())
        attention.attend(q, k, v, heads, plan, out)
        assert torch.equal(out[0], together[head * group : (head + 1) * group])


def test_a_chunk_has_its_bits_wherever_its_past_lies(base: Attention, dtype: torch.dtype) -> None:
    attention, served = ExactAttention(base, SEGMENT), Served(dtype)
    member = len(CONTEXTS) - 1
    past, rows = 2048, 100
    q = torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(8)).to(dtype)
    k, v = (each[member][past : past + rows] for each in (served.keys, served.values))
    found = []
    for table in (list(range(9)), [11, 3, 7, 0, 19, 4, 23, 8, 1]):
        k_cache, v_cache = served.cache([table], [member])
        out = torch.empty_like(q)
        plan = attention.plan([table], [rows], [past + rows])
        attention.attend(q, k, v, LayerCache(k_cache, v_cache), plan, out)
        found.append(out)
    assert not found[0].isnan().any()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("rows", [100, 1])
def test_a_chunk_has_its_bits_where_its_past_is_in_a_pool(
    base: Attention, dtype: torch.dtype, rows: int
) -> None:
    """Segments 1 and 2 of five are not in the cache, and are copied to where they are attended to."""
    attention, served = ExactAttention(base, SEGMENT), Served(dtype)
    member = len(CONTEXTS) - 1
    past = 2100
    q = torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(8)).to(dtype)
    k, v = (each[member][past : past + rows] for each in (served.keys, served.values))
    whole = list(range(9))
    k_cache, v_cache = served.cache([whole], [member])
    expected, found = torch.empty_like(q), torch.empty_like(q)
    attention.attend(
        q, k, v, LayerCache(k_cache, v_cache), attention.plan([whole], [rows], [past + rows]), expected
    )

    config: Any = SimpleNamespace(layers=1, kv_heads=KV_HEADS, head_dim=DIM)
    pool = PagedCache(config, len(whole), BLOCK, dtype)
    pool.k[0], pool.v[0] = k_cache[:9], v_cache[:9]
    slots = np.zeros((len(whole), pool.layer_block_bytes), dtype=np.uint8)
    for block in range(2, 6):
        pool.read_block(0, block, slots[block])
    pooled = PooledSegments(attention, PagedCache(config, 2, BLOCK, dtype), lambda block, layer: slots[block])
    pooled.segments = range(1, 3)
    plan = attention.plan([[0, 1, AWAY, AWAY, AWAY, AWAY, 6, 7, 8]], [rows], [past + rows])
    assert isinstance(plan, ExactPlan)
    plan.elsewhere = pooled
    k_cache[2:6], v_cache[2:6] = float("nan"), float("nan")
    pooled.ask(0, q)
    attention.attend(q, k, v, LayerCache(k_cache, v_cache), plan, found)
    assert not expected.isnan().any()
    assert torch.equal(found, expected)


def test_the_split_is_what_the_plan_says() -> None:
    attention = ExactAttention(SdpaAttention(BLOCK, CPU), SEGMENT)
    plan = attention.plan([[4, 5, 6, 7, 8], [9], [1, 0, 2]], [1, 1, 1], [1100, 1, 513])
    assert isinstance(plan, ExactPlan)
    assert plan.parts == 3
    seen = [
        (run.row, run.part, run.segments, run.tokens, run.blocks, run.first_row) for run in plan.runs.items
    ]
    assert seen == [
        (0, 0, 2, 512, [4, 5, 6, 7], 1024),
        (0, 2, 1, 75, [8], 2048),
        (2, 0, 1, 512, [1, 0], None),
    ]
