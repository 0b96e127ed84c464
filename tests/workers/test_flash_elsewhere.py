"""Attention workers and lenders on the path through flash-attn, a reference standing in for its kernels: the bits of
one cache with everything, by heads and by sequence, and what SDPA and a float64 oracle say.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import flash_attn_reference
import pytest
import torch

from halfmoon.store.channels.header import MessageHeader, Op
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.held_caches import HeldCaches, HeldTails
from halfmoon.workers.attention.slot_list import SlotList
from halfmoon.workers.model.attention.exact import ExactAttention
from halfmoon.workers.model.attention.flash import FlashAttention
from halfmoon.workers.model.attention.kernel import Attention, LayerCache, SdpaAttention
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.paged_cache import PagedCache

Tensor = torch.Tensor
CPU, DIM = torch.device("cpu"), 64
#: Tokens before each row's own: none, less than a block, whole blocks and segments, one more.
PASTS = (0, 5, 256, 768, 1536, 2305)
QUERY = MessageHeader(Op.QUERY, layer=0, step=1)


class Case:
    """Rows in one cache, `heads` query heads over `kv_heads`; a segment has `segment` tokens."""

    def __init__(self, model: LoadedModel, block: int, segment: int, heads: int, kv_heads: int) -> None:
        self.block, self.segment, self.heads, self.kv_heads = block, segment, heads, kv_heads
        self.config = replace(model.config, layers=1, heads=heads, kv_heads=kv_heads, head_dim=DIM)
        random = torch.Generator().manual_seed(block + heads)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(torch.bfloat16)

        self.q, self.own = drawn(len(PASTS), heads, DIM), drawn(2, len(PASTS), kv_heads, DIM)
        self.past = [drawn(2, past, kv_heads, DIM) for past in PASTS]

    def cached(
        self, first_token: int = 0, kv_heads: slice = slice(None)
    ) -> tuple[PagedCache, list[list[int]]]:
        """Those tokens of each row in pages in no row, NaN where none are; and the rows' tables, a page longer."""
        count = sum(-(-past // self.block) + 1 for past in PASTS)
        shares = range(self.kv_heads)[kv_heads]
        config = replace(self.config, kv_heads=len(shares), heads=self.heads // self.kv_heads * len(shares))
        cache = PagedCache(config, count, self.block, torch.bfloat16)
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
        free, tables = list(range(count))[::-1], []
        for past, kept in zip(PASTS, self.past, strict=True):
            table = [free.pop() for _ in range(-(-past // self.block) + 1)][::-1]
            for place in range(first_token, past):
                page, offset = table[(place - first_token) // self.block], (place - first_token) % self.block
                cache.k[0, page, offset], cache.v[0, page, offset] = kept[:, place, kv_heads]
            tables.append(table)
        return cache, tables

    def here(self, base: Attention) -> Tensor:
        """One cache with everything."""
        cache, tables = self.cached()
        for row, past in enumerate(PASTS):
            page, offset = tables[row][past // self.block], past % self.block
            cache.k[0, page, offset], cache.v[0, page, offset] = self.own[:, row]
        exact = ExactAttention(base, self.segment)
        plan = exact.plan(tables, [1] * len(PASTS), [past + 1 for past in PASTS])
        out = torch.empty_like(self.q)
        exact.attend(self.q, self.own[0], self.own[1], LayerCache(cache.k[0], cache.v[0]), plan, out)
        return out

    def oracle(self) -> Tensor:
        rows = []
        for q, own, past in zip(self.q, self.own.transpose(0, 1), self.past, strict=True):
            k, v = torch.cat([past, own.unsqueeze(1)], dim=1).double()
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            weights = torch.einsum("hd,khd->hk", q.double(), k).mul(DIM**-0.5).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, v))
        return torch.stack(rows)

    def by_heads(self, base: Attention, places: int) -> Tensor:
        """Each place has all tokens of an equal part of the heads."""
        parts, each = [], self.kv_heads // places
        for place in range(places):
            mine = slice(place * each, (place + 1) * each)
            cache, tables = self.cached(kv_heads=mine)
            holds = {row: HeldSegments(table, PASTS[row]) for row, table in enumerate(tables)}
            group = self.heads // self.kv_heads
            held = HeldCaches(
                list(enumerate(PASTS)), holds, base, cache, segment_tokens=self.segment, heads=each * group
            )
            held.query.copy_(self.q[:, mine.start * group : mine.stop * group])
            held.ask(QUERY)
            held.new.copy_(self.own[:, :, mine])
            assert held.merge(QUERY) is None
            parts.append(held.out)
        return torch.cat(parts, dim=1)

    def by_sequence(self, base: Attention) -> Tensor:
        """Each row's first segment at a lender, where it is whole, and what follows at an attention worker."""
        split = [row for row, past in enumerate(PASTS) if past >= self.segment]
        first, tables = self.cached()
        holds = {row: HeldSegments(tables[row][: self.segment // self.block], self.segment) for row in split}
        sizes = {"segment_tokens": self.segment, "heads": self.heads}
        wanted = [(at, row) for at, row in enumerate(split)]
        lent = SlotList(len(split), wanted, holds, first, chunk=False, **sizes)
        lent.query.copy_(self.q[split])
        lent.attend(base, 0)
        last, tables = self.cached(self.segment)
        ends = [(row, PASTS[row] - self.segment) for row in split]
        holds = {row: HeldSegments(tables[row], tokens) for row, tokens in ends}
        tails = HeldTails(ends, holds, base, last, **sizes)
        tails.query.copy_(self.q[split])
        tails.ask(QUERY)
        tails.new.copy_(self.own[:, split])
        assert tails.merge(QUERY) is None
        counts = [-(-tokens // self.segment) for _, tokens in ends]
        states = StateStack(max(counts) + 1, len(split), self.heads, DIM, CPU)
        states.out[0], states.lse[0] = lent.out[:, 0].float(), lent.states.lse[:, 0]
        assert tails._states is not None
        begin = 0
        for at, count in enumerate(counts):
            states.out[1 : 1 + count, at] = tails.out[begin : begin + count].float()
            states.lse[1 : 1 + count, at] = tails._states.lse[begin : begin + count, 0]
            begin += count
        states.own_token(self.q[split], self.own[0, split], self.own[1, split])
        whole = self.here(base)
        whole[split] = states.merged().to(torch.bfloat16)
        return whole


@pytest.mark.parametrize(
    ("block", "segment", "heads", "kv_heads"),
    [
        (256, 768, 9, 3),
        pytest.param(768, 768, 8, 4, marks=pytest.mark.slow),
        pytest.param(256, 1024, 4, 4, marks=pytest.mark.slow),
        pytest.param(512, 1536, 8, 1, marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_the_bits_of_one_cache_by_heads_and_by_sequence(
    block: int,
    segment: int,
    heads: int,
    kv_heads: int,
    model_bf16: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_reference.stand_in())
    case, flash = Case(model_bf16, block, segment, heads, kv_heads), FlashAttention(block, CPU, exact=True)
    here = case.here(flash)
    assert not here.isnan().any()
    for places in (1, kv_heads):
        assert torch.equal(case.by_heads(flash, places), here)
    assert torch.equal(case.by_sequence(flash), here)
    torch.testing.assert_close(here.double(), case.oracle(), atol=0.01, rtol=0.01)
    torch.testing.assert_close(here, case.here(SdpaAttention(block, CPU)), atol=0.01, rtol=0.02)
