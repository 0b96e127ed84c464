"""Attention of a chunk's queries, against its definition in f64; a row's bits are its own."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from halfmoon.workers.model.kernels import chunk_attention, tiles
from halfmoon.workers.model.kernels import threads as kernel_threads
from halfmoon.workers.model.kernels.chunk_attention import ChunkKernel, chunk_kernel

Tensor = torch.Tensor

SHAPES = [(3, 3, 64), (1, 1, 16), (2, 4, 80), (1, 2, 256)]
"""KV heads, queries of each, and dimensions of a head."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@cache
def kernel_of(dtype: torch.dtype, head_dim: int, pairs: bool) -> ChunkKernel:
    return ChunkKernel(dtype, head_dim)


def states(kernel: ChunkKernel, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.full(q.shape, 7.0), torch.full(q.shape[:2], 7.0)
    kernel(q, k, v, seen, out, lse)
    return out, lse


def by_definition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.double(), keys) * q.shape[-1] ** -0.5
    scores.masked_fill_((torch.arange(len(k)) >= seen.unsqueeze(1)).unsqueeze(1), float("-inf"))
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


def inputs(
    shape: tuple[int, int, int], rows: int, keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Views, as those of a cache and of a product are."""
    kv_heads, group, head_dim = shape
    q = drawn(rows, (kv_heads * group + 1) * head_dim).view(rows, -1, head_dim)[:, 1:] * 2
    k, v = drawn(2, keys, kv_heads, 2 * head_dim).to(dtype)[..., :head_dim].unbind()
    return q.to(dtype), k, v


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (5, 7), (37, 300), (100, 32)])
def test_a_state_is_that_of_the_keys_that_its_row_sees(
    dtype: torch.dtype, shape: tuple[int, int, int], rows: int, keys: int
) -> None:
    q, k, v = inputs(shape, rows, keys, dtype)
    kernel, eps = kernel_of(dtype, shape[2], tiles.multiplies_pairs()), torch.finfo(dtype).eps
    for seen in (torch.full((rows,), keys), (torch.arange(rows) * keys // rows + 1).clamp(max=keys)):
        out, lse = states(kernel, q, k, v, seen)
        expected_out, expected_lse = by_definition(q, k, v, seen)
        assert torch.equal(out, out.to(dtype).float())
        # Weights are rounded as values are.
        torch.testing.assert_close(out.double(), expected_out, rtol=4 * eps, atol=max(4 * eps, 1e-5))
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_among_any_rows_in_any_blocks_on_any_number_of_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, keys = 61, 130
    q, k, v = inputs(SHAPES[0], rows, keys, dtype)
    seen = torch.arange(rows) + keys - rows + 1
    out, lse = states(ChunkKernel(dtype, SHAPES[0][2]), q, k, v, seen)

    def check(kernel: ChunkKernel, part: slice, shown: int = keys) -> None:
        found = states(kernel, q[part], k[:shown], v[:shown], seen[part])
        assert torch.equal(found[0], out[part])
        assert torch.equal(found[1], lse[part])

    for registers in tiles.TILES:
        with monkeypatch.context() as patched:
            patched.setattr(tiles, "TILES", dict.fromkeys(tiles.TILES, tiles.TILES[registers]))
            kernel = ChunkKernel(dtype, SHAPES[0][2])
        for first in range(0, rows, 7):
            check(kernel, slice(first, first + 1))
            check(kernel, slice(first, first + 20))
            # Keys that no row sees.
            check(kernel, slice(0, first + 1), int(seen[first]))
    monkeypatch.setattr(kernel_threads, "_MULTIPLY_ADDS_MIN", 0)
    for count in (2, 3, 5):
        torch.set_num_threads(count)
        check(kernel, slice(0, rows))
    monkeypatch.setattr(chunk_attention, "_BLOCK_KEYS", 40)
    check(kernel, slice(0, rows))


def test_scores_far_from_each_other_leave_the_weight_to_the_largest() -> None:
    """And keys that a row does not see none at all, whatever they hold."""
    q, k, v = torch.full((3, 1, 16), 10.0), torch.zeros(40, 1, 16), drawn(40, 1, 16)
    k[5], k[30] = 10.0, 1e4
    seen = torch.tensor([5, 6, 30])
    out, lse = states(ChunkKernel(torch.float32, 16), q, k, v, seen)
    torch.testing.assert_close(out[0, 0], v[:5, 0].mean(0))
    assert torch.equal(out[1, 0], v[5, 0])
    assert torch.equal(out[2, 0], v[5, 0])
    torch.testing.assert_close(
        lse.flatten(), torch.tensor([5.0, 0, 0]).log().clamp(min=0) + torch.tensor([0.0, 400, 400])
    )


def test_what_is_no_number_is_not_hidden(dtype: torch.dtype) -> None:
    q, k, v = inputs((1, 2, 32), 40, 60, dtype)
    q[3, 1], k[25, 0, 7] = torch.nan, torch.nan
    out, _ = states(ChunkKernel(dtype, 32), q, k, v, torch.arange(40) + 1)
    lost = torch.zeros(40, 2, dtype=torch.bool)
    lost[3, 1], lost[25:] = True, True
    assert torch.equal(out.isnan(), lost.unsqueeze(2).expand(-1, -1, 32))


def test_heads_that_are_no_whole_vectors_have_no_kernel() -> None:
    assert chunk_kernel(torch.float32, 24) is None
