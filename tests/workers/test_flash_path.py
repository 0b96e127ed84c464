"""The engine's path through flash-attn, all of it but the kernels: tables, lengths, pages, exact mode's promise."""

from __future__ import annotations

import sys
from dataclasses import replace

import flash_attn_reference
import pytest
import torch
from reference import prefill

from halfmoon.workers.model.attention import choice as attention_choice
from halfmoon.workers.model.attention.flash import FlashAttention
from halfmoon.workers.model.attention.kernel import LayerCache
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel

LAYERS = 2
STEPS = 3
LENGTHS = (5, 256, 513)
PROMPTS = [
    [(i * i * 37 + 11 * i + 700 * seed) % 40000 + 20 for i in range(n)] for seed, n in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def model(model_bf16: LoadedModel) -> LoadedModel:
    return replace(model_bf16, config=replace(model_bf16.config, layers=LAYERS))


@pytest.fixture(params=[256, pytest.param(768, marks=pytest.mark.slow)])
def flash(request: pytest.FixtureRequest, model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine on the CPU that takes flash-attn for there."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_reference.stand_in())
    monkeypatch.setattr(attention_choice, "flash_unavailable", lambda *_: [])
    engine = Engine(model, num_blocks=32, block_tokens=request.param, exact=True, attention="flash")
    assert engine.attention_name == "flash"
    return engine


def serve(engine: Engine, prompts: list[list[int]], tables: list[list[int]]) -> list[list[torch.Tensor]]:
    """Prefills each prompt, then decodes all as one batch: the logits of each step, by prompt."""
    rows = [[prefill(engine, prompt, table)] for prompt, table in zip(prompts, tables, strict=True)]
    for step in range(STEPS):
        tokens = [engine.argmax(found[-1])[0] for found in rows]
        logits = engine.decode(tokens, [len(prompt) + step for prompt in prompts], tables)
        for found, row in zip(rows, logits, strict=True):
            found.append(row)
    return rows


def tables_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [engine.allocator.allocate(-(-(len(p) + STEPS) // engine.block_tokens)) for p in prompts]


def digests(engine: Engine, rows: list[list[torch.Tensor]]) -> list[list[str]]:
    return [[engine.logits_digest(row) for row in found] for found in rows]


@pytest.mark.slow
def test_flash_gives_the_logits_of_sdpa(flash: Engine, model: LoadedModel) -> None:
    sdpa = Engine(model, num_blocks=32, block_tokens=flash.block_tokens, exact=True, attention="sdpa")
    ours = serve(flash, PROMPTS, tables_of(flash, PROMPTS))
    theirs = serve(sdpa, PROMPTS, tables_of(sdpa, PROMPTS))
    for found, expected in zip(ours, theirs, strict=True):
        # bf16 rounds at each operation: the first logits are of the same prompt, later ones may follow other tokens.
        torch.testing.assert_close(found[0], expected[0], atol=0.25, rtol=0.05)
        assert torch.cosine_similarity(found[0], expected[0], dim=0) > 0.999


@pytest.mark.slow
def test_a_batch_in_scattered_pages_gives_the_bits_of_each_alone(flash: Engine) -> None:
    alone = []
    for prompt in PROMPTS:
        tables = tables_of(flash, [prompt])
        alone += digests(flash, serve(flash, [prompt], tables))
        flash.allocator.free(tables[0])
    flat = [digest for found in alone for digest in found]
    assert len(set(flat)) == len(flat)
    tables = [table[::-1] for table in reversed(tables_of(flash, PROMPTS))]
    tables.reverse()
    flash.cache.k.fill_(7.0)  # what lies in a page beyond a sequence's end must not be read
    flash.cache.v.fill_(7.0)
    assert digests(flash, serve(flash, PROMPTS, tables)) == alone


def test_a_step_s_tables_are_what_the_package_takes(flash: Engine) -> None:
    """int32, padded to the widest, lengths that count the query's own token; the reference refuses all else."""
    tables = tables_of(flash, PROMPTS)
    attention = FlashAttention(flash.block_tokens, flash.device, exact=False)
    plan = attention.plan(tables, [1] * len(PROMPTS), [len(p) + 1 for p in PROMPTS])
    q = torch.zeros(len(PROMPTS), flash.config.heads, flash.config.head_dim, dtype=torch.bfloat16)
    own = q[:, : flash.config.kv_heads]
    attention.attend(q, own, own, LayerCache(flash.cache.k[0], flash.cache.v[0]), plan, q.clone())
    assert plan.device_tables is not None
    assert plan.device_lengths is not None
    assert plan.device_lengths.tolist() == [n + 1 for n in LENGTHS]
    for row, table in zip(plan.device_tables.tolist(), tables, strict=True):
        assert row[: len(table)] == table
    plan.device_tables[-1, 0] = flash.cache.num_blocks
    with pytest.raises(AssertionError):
        attention.attend(q, own, own, LayerCache(flash.cache.k[0], flash.cache.v[0]), plan, q.clone())


def test_a_query_without_a_key_adds_nothing(flash: Engine) -> None:
    """The package says plus infinity there, which would outweigh every other part."""
    q = torch.randn(3, flash.config.heads, flash.config.head_dim).to(torch.bfloat16)
    k = torch.randn(5, flash.config.kv_heads, flash.config.head_dim).to(torch.bfloat16)
    ends = [torch.tensor(e, dtype=torch.int32) for e in ([0, 3], [0, 0])]
    _, lse, _ = flash_attn_reference.flash_attn_varlen_func(
        q, k[:0], k[:0], ends[0], ends[1], 3, 1, return_attn_probs=True
    )
    assert lse.isposinf().all()
    state = flash.attention.partial(q, k[:0], k[:0], causal=False)
    assert state.lse.isneginf().all()
    assert not state.out.any()
