"""Compiled kernels against the definition of what they compute, in f64."""

from __future__ import annotations

import pytest
import torch

from halfmoon.workers.model.kernels.attention import StateKernel, StateTasks, merge_kernel, state_kernel
from halfmoon.workers.model.kernels.rows import row_kernels

Tensor = torch.Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS, BLOCK_TOKENS = 12, 16


@pytest.fixture(autouse=True)
def draw() -> None:
    torch.manual_seed(3)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected.double(), rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(3, 3, 64), (1, 1, 16), (2, 4, 80), (1, 8, 128), (2, 1, 256)]
)
def test_a_state_is_that_of_its_segments_keys_and_values(
    dtype: torch.dtype, kv_heads: int, group: int, head_dim: int
) -> None:
    k, v = (torch.randn(BLOCKS, BLOCK_TOKENS, kv_heads, head_dim).to(dtype) for _ in "kv")
    q = torch.randn(4, kv_heads * group, head_dim).to(dtype)
    blocks = [5, 2, 7, 1, 9, 0]
    #: (row, place, tokens, its first block): more and fewer than a block, a block, one token.
    tasks = [(0, 0, 33, 0), (2, 1, BLOCK_TOKENS, 3), (1, 3, 1, 4), (3, 4, 2 * BLOCK_TOKENS - 1, 4)]
    out, lse = torch.full((5, *q.shape[1:]), 7.0), torch.full((5, q.shape[1]), 7.0)
    kernel = StateKernel(dtype, head_dim, group)
    kernel(q, k, v, StateTasks(tasks, blocks), out, lse)
    for row, place, tokens, first in tasks:
        own = blocks[first : first - (-tokens // BLOCK_TOKENS)]
        keys, values = (torch.cat([cache[block] for block in own])[:tokens].double() for cache in (k, v))
        scores = (
            torch.einsum("hgd,thd->hgt", q[row].view(kv_heads, group, -1).double(), keys) * head_dim**-0.5
        )
        near(lse[place], scores.logsumexp(-1).flatten())
        near(out[place], torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).flatten(0, 1), dtype)
        assert torch.equal(out[place].to(dtype).float(), out[place])
    # Nobody wrote there.
    assert (out[2] == 7.0).all()
    assert (lse[2] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_what_is_merged_is_weighed_by_its_keys(dtype: torch.dtype, parts: int) -> None:
    rows, kv_heads, group, head_dim = 5, 2, 3, 48
    heads = kv_heads * group
    q = torch.randn(rows, heads, head_dim).to(dtype)
    k, v = (torch.randn(rows, kv_heads, head_dim).to(dtype) for _ in "kv")
    states, lse = torch.randn(parts, rows, heads, head_dim), torch.randn(parts, rows, heads) * 4
    # The second row has a part less than the others: a state over no keys.
    states[1:, 1], lse[1:, 1] = 0.0, -torch.inf
    kernel = merge_kernel(head_dim)
    assert kernel is not None
    found = kernel.with_tokens(q, k, v, states, lse)
    own = torch.einsum("rhgd,rhd->rhg", q.view(rows, kv_heads, group, -1).double(), k.double()).flatten(1)
    weights = torch.cat([lse.double(), own[None] * head_dim**-0.5]).softmax(0).unsqueeze(-1)
    values = torch.cat([states.double(), v.double().repeat_interleave(group, 1)[None]])
    near(found, (weights * values).sum(0))
    own_out, own_lse = v.float().repeat_interleave(group, 1), own.float() * head_dim**-0.5
    found_again = kernel.with_states(own_out, own_lse, states, lse)
    near(found_again, (weights * values).sum(0))
    # With the parts that it has, alone.
    one = slice(1, 2)
    part = states[:1, one], lse[:1, one]
    assert torch.equal(kernel.with_tokens(q[one], k[one], v[one], *part), found[one])
    assert torch.equal(kernel.with_states(own_out[one], own_lse[one], *part), found_again[one])


def test_heads_that_are_no_whole_vectors_have_no_kernel() -> None:
    assert state_kernel(torch.float32, 24, 3) is None
    assert merge_kernel(24) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_normed_after_what_is_added_to_it(dtype: torch.dtype) -> None:
    x, added, weight = torch.randn(5, 96).to(dtype) * 3, torch.randn(5, 96), torch.randn(96)
    kernels = row_kernels(dtype)

    def normed(x: Tensor) -> Tensor:
        wide = x.double()
        return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * weight

    near(kernels.norm(x, weight, 1e-5), normed(x), dtype)
    total = (x.float() + added).to(dtype)
    found = kernels.add_norm(x, added, weight, 1e-5)
    assert torch.equal(x, total)
    assert found.dtype == dtype
    near(found, normed(total), dtype)
    assert torch.equal(kernels.norm(x[2:3], weight, 1e-5), found[2:3])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_sum_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    """To the nearest, ties to even; too much is infinite, and what is no number stays none."""
    one = torch.tensor(1.0, dtype=dtype)
    step = torch.finfo(dtype).eps
    ties = torch.tensor([0.5 * step, 1.5 * step, 2.5 * step, 0.5 * step + 1e-6, 0.75 * step, -0.25 * step])
    strange = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max, 0.0, 1e-30])
    added = torch.cat([ties, strange, ties[:4]]).unsqueeze(0)
    x = one.repeat(1, added.shape[1])
    expected = (x.float() + added).to(dtype)
    row_kernels(dtype).add_norm(x, added, torch.ones(added.shape[1]), 1e-5)
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


def test_heads_are_turned_in_pairs_and_the_others_left() -> None:
    rows, heads, turning, head_dim = 3, 5, 3, 96
    before = torch.randn(rows, heads, head_dim)
    cos, sin = torch.randn(rows, 1, head_dim // 2), torch.randn(rows, 1, head_dim // 2)
    after = before.clone()
    row_kernels(torch.float32).rotate(after.view(rows, -1), cos, sin, turning, head_dim)
    a, b = before[:, :turning].double().chunk(2, -1)
    near(after[:, :turning], torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    assert torch.equal(after[:, turning:], before[:, turning:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_is_near_that_of_f64_up_to_where_exponentials_end(dtype: torch.dtype) -> None:
    gates = torch.cat([torch.linspace(-110, 110, 1000), torch.randn(24)])
    up = torch.randn(1024)
    found = row_kernels(dtype).gate(torch.stack([torch.cat([gates, up]), torch.cat([up, gates])]))
    for row, (gate, by) in zip(found, ((gates, up), (up, gates)), strict=True):
        near(row, torch.nn.functional.silu(gate.double()) * by.double(), dtype)
