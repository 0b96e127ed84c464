"""One contract for every implementation of attention: against the definition in f64, and against itself in
parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import flash_attn_reference
import pytest
import torch

from halfmoon.workers.model.attention import kernel
from halfmoon.workers.model.attention.choice import AttentionUnavailable, make_attention
from halfmoon.workers.model.attention.exact import ExactAttention
from halfmoon.workers.model.attention.flash import FlashAttention, flash_unavailable
from halfmoon.workers.model.attention.kernel import Attention, LayerCache, SdpaAttention
from halfmoon.workers.model.attention.states import Partial, merge, neutral

PAGE, HEADS, KV_HEADS, DIM = 256, 6, 2, 32
CUDA = torch.device("cuda")


@pytest.fixture(
    params=[
        pytest.param(("sdpa", torch.float32)),
        pytest.param(("sdpa", torch.bfloat16)),
        pytest.param(("sdpa without kernels", torch.float32)),
        pytest.param(("sdpa without kernels", torch.bfloat16)),
        pytest.param(("sdpa without kernels or the private operator", torch.float32)),
        pytest.param(("sdpa on cuda", torch.float32), marks=pytest.mark.gpu),
        pytest.param(("flash by its reference", torch.bfloat16)),
        pytest.param(("flash by its reference", torch.float16)),
        pytest.param(("flash", torch.bfloat16), marks=pytest.mark.gpu),
    ],
    ids=lambda value: f"{value[0]}-{value[1]}",
)
def subject(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Attention, torch.dtype]]:
    name, dtype = request.param
    torch.manual_seed(11)
    if name in ("flash", "sdpa on cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if name == "flash":
        reasons = flash_unavailable(CUDA, dtype, PAGE)
        if reasons:
            pytest.skip("; ".join(reasons))
        yield FlashAttention(PAGE, CUDA, exact=True), dtype
    elif name == "flash by its reference":
        monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_reference.stand_in())
        yield FlashAttention(PAGE, torch.device("cpu"), exact=True), dtype
    elif name == "sdpa on cuda":
        yield SdpaAttention(PAGE, CUDA), dtype
    else:
        if name != "sdpa":
            monkeypatch.setattr(kernel, "state_kernel", lambda *_: None)
            monkeypatch.setattr(kernel, "chunk_kernel", lambda *_: None)
        yield SdpaAttention(PAGE, torch.device("cpu"), private_op="operator" not in name), dtype


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None) -> Partial:
    """In f64; `hidden` `[queries, keys]` is true where a key is not seen."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / q.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return Partial(out, scores.logsumexp(-1).t())


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 2e-2


def random(rows: int, heads: int, subject: tuple[Attention, torch.dtype]) -> torch.Tensor:
    return torch.randn(rows, heads, DIM).to(subject[1]).to(subject[0].device)


def assert_state(found: Partial, expected: Partial, dtype: torch.dtype) -> None:
    limit = tolerance(dtype)
    torch.testing.assert_close(found.out.double(), expected.out, atol=limit, rtol=limit)
    torch.testing.assert_close(found.lse.double(), expected.lse, atol=limit, rtol=limit)


@pytest.mark.parametrize("exact", [False, True], ids=["whole", "segments"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("rows", [[1], [1, 1, 1], [5], [300], [37, 1, 260]])
def test_paged_attention_is_causal_attention(
    subject: tuple[Attention, torch.dtype], rows: list[int], scattered: bool, exact: bool
) -> None:
    attention, dtype = subject
    if exact:
        attention = ExactAttention(attention, PAGE)
    pasts = [0, 400, 256][: len(rows)] if len(rows) > 1 else [300]
    cache = torch.randn(2, 12, PAGE, KV_HEADS, DIM).to(dtype).to(attention.device)
    free = [7, 2, 9, 0, 11, 4, 1, 8, 3, 10, 5, 6] if scattered else list(range(12))
    tables, expected, own = [], [], []
    q = random(sum(rows), HEADS, subject)
    at = 0
    for count, past in zip(rows, pasts, strict=True):
        need = -(-(count + past) // PAGE)
        tables.append(free[:need])
        free = free[need:]
        k, v = (cache[i, tables[-1]].flatten(0, 1)[: past + count] for i in (0, 1))
        hidden = torch.ones(count, past + count, dtype=torch.bool, device=attention.device).triu(past + 1)
        expected.append(definition(q[at : at + count], k, v, hidden).out)
        own.append((k[past:], v[past:]))
        at += count
    out = torch.empty_like(q)
    plan = attention.plan(tables, rows, [r + p for r, p in zip(rows, pasts, strict=True)])
    own_k, own_v = (torch.cat([each[i] for each in own]) for i in (0, 1))
    attention.attend(q, own_k, own_v, LayerCache(cache[0], cache[1]), plan, out)
    torch.testing.assert_close(
        out.double(), torch.cat(expected), atol=tolerance(dtype), rtol=tolerance(dtype)
    )


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_merged_parts_are_the_whole(subject: tuple[Attention, torch.dtype], rows: int) -> None:
    attention, dtype = subject
    q, k, v = random(rows, HEADS, subject), random(100, KV_HEADS, subject), random(100, KV_HEADS, subject)
    parts = [
        attention.partial(q, k[a:b], v[a:b], causal=False)
        for a, b in ((0, 13), (13, 13), (13, 14), (14, 100))
    ]
    whole = definition(q, k, v, None)
    assert_state(merge(merge(parts[0], parts[1]), merge(parts[2], parts[3])), whole, dtype)
    assert_state(merge(merge(parts[3], parts[0]), parts[2]), whole, dtype)


def test_a_causal_part_merges_with_the_past(subject: tuple[Attention, torch.dtype]) -> None:
    attention, dtype = subject
    q, k, v = random(20, HEADS, subject), random(64, KV_HEADS, subject), random(64, KV_HEADS, subject)
    hidden = torch.ones(20, 64, dtype=torch.bool, device=attention.device).triu(45)
    own = attention.partial(q, k[44:], v[44:], causal=True)
    assert_state(
        merge(attention.partial(q, k[:44], v[:44], causal=False), own), definition(q, k, v, hidden), dtype
    )


@pytest.mark.parametrize("positions", [[0, 1, 5, 40], [7], [44, 45, 63], [*range(0, 60, 3)]], ids=str)
def test_single_queries_see_the_keys_up_to_their_own(
    subject: tuple[Attention, torch.dtype], positions: list[int]
) -> None:
    attention, dtype = subject
    keys = positions[-1] + 1
    q, k, v = (random(n, heads, subject) for n, heads in ((len(positions), HEADS), *[(keys, KV_HEADS)] * 2))
    places = torch.tensor(positions, device=attention.device)
    hidden = torch.stack([torch.arange(keys, device=attention.device) > place for place in positions])
    assert_state(attention.partial_at(q, k, v, places), definition(q, k, v, hidden), dtype)
    first = positions[0]
    past = attention.partial(q, k[:first], v[:first], causal=False)
    own = attention.partial_at(q, k[first:], v[first:], places - first)
    assert_state(merge(past, own), definition(q, k, v, hidden), dtype)


def test_the_neutral_state_changes_no_bit(subject: tuple[Attention, torch.dtype]) -> None:
    attention, _ = subject
    q, k, v = random(4, HEADS, subject), random(9, KV_HEADS, subject), random(9, KV_HEADS, subject)
    state = attention.partial(q, k, v, causal=False)
    for merged in (merge(state, neutral(q)), merge(neutral(q), state)):
        assert torch.equal(merged.out, state.out)
        assert torch.equal(merged.lse, state.lse)
    empty = merge(neutral(q), attention.partial(q, k[:0], v[:0], causal=False))
    assert torch.equal(empty.out, torch.zeros_like(q))
    assert empty.lse.isneginf().all()


def test_flash_by_name_says_every_reason_why_not() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(AttentionUnavailable) as caught:
        make_attention("flash", cpu, torch.float32, 64)
    for reason in ("device is cpu", "dtype is torch.float32", "block_tokens is 64"):
        assert reason in str(caught.value)
    assert make_attention("auto", cpu, torch.float32, 64).name == "sdpa"
    with pytest.raises(AttentionUnavailable, match="'fast'"):
        make_attention("fast", cpu, torch.float32, 64)


@pytest.mark.parametrize(
    "failure", [ImportError("undefined symbol: _ZN3c105ErrorE"), OSError("libcudart.so.12")]
)
def test_a_flash_attn_built_for_another_torch_is_a_reason_and_not_a_crash(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "flash_attn":
                raise failure

    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert flash_unavailable(CUDA, torch.bfloat16, 256) == [f"flash_attn cannot be imported: {failure}"]
    assert make_attention("auto", torch.device("cpu"), torch.bfloat16, 256).name == "sdpa"
