"""Products of the row kernel: one chain of fused multiply-adds an element, whatever is beside it, and whether pairs of
bf16 are multiplied by an instruction of their own or not.
"""

from __future__ import annotations

from collections.abc import Iterator

import llvmlite.binding as llvm
import pytest
import torch

from halfmoon.workers.model.kernels import products, tiles
from halfmoon.workers.model.kernels import threads as kernel_threads
from halfmoon.workers.model.kernels.code import LANES, KernelUnavailable
from halfmoon.workers.model.kernels.products import PackedRows

Tensor = torch.Tensor

ROWS = 41
"""More than two tiles of any table."""


@pytest.fixture(params=sorted(tiles.TILES), ids=lambda registers: f"{registers} registers", autouse=True)
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each CPU's tiles: here they may be slow, as sums that find no register go by memory."""
    monkeypatch.setattr(tiles, "TILES", dict.fromkeys(tiles.TILES, tiles.TILES[request.param]))
    products._attempt.cache_clear()
    yield
    products._attempt.cache_clear()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def chain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """By the definition. A product of two f32 is exact in f64; a sum there is hardly ever rounded to a tie of f32."""
    total, x = bias.float().expand(len(x), -1), x.to(weight.dtype)
    inputs = [*range(weight.shape[1])]
    if weight.dtype == torch.bfloat16:
        inputs = [each for first in inputs[::2] for each in inputs[first : first + 2][::-1]]
    for i in inputs:
        total = (x[:, i, None].double() * weight[:, i].double() + total.double()).float()
    return total


@pytest.mark.parametrize(("outputs", "inputs"), [(LANES, 1), (7, 64), (5 * LANES, 33), (4 * LANES + 1, 300)])
def test_each_element_is_one_chain_in_the_order_of_the_inputs(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, bias, x = drawn(outputs, inputs).to(dtype), drawn(outputs, seed=1), drawn(ROWS, inputs, seed=2)
    product = PackedRows(weight, bias)
    expected = chain(x, weight, bias)
    for rows in range(ROWS + 1):
        assert torch.equal(product(x[:rows]), expected[:rows]), rows
    for row in range(ROWS):
        assert torch.equal(product(x[row : row + 1]), expected[row : row + 1]), row


def test_blocks_of_rows_change_no_bit() -> None:
    block = products._BLOCK_ROWS
    weight, x = drawn(5 * LANES, 17), drawn(99 * block, 17)
    product, expected = PackedRows(weight), chain(x, weight, torch.zeros(5 * LANES))
    for rows in (block - 1, block, block + 1, 2 * block, 3 * block + 5, 98 * block + 1):
        assert torch.equal(product(x[:rows]), expected[:rows]), rows


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("outputs", [LANES, 9 * LANES, 900])
def test_threads_share_the_outputs_and_change_no_bit(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_threads, "_MULTIPLY_ADDS_MIN", 0)
    assert kernel_threads.openmp() is not None
    weight, x = drawn(outputs, 70), drawn(ROWS, 70)
    product, expected = PackedRows(weight), chain(x, weight, torch.zeros(outputs))
    asked: list[int] = []
    run = product._multiply.run

    def noted(threads: int, *arguments: int) -> None:
        asked.append(threads)
        run(threads, *arguments)

    monkeypatch.setattr(product._multiply, "run", noted)
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        assert torch.equal(product(x), expected), count
    assert asked == [1, 2, 3, 5]


def test_without_bias_sums_begin_with_zero_and_any_layout_of_rows_will_do() -> None:
    weight, x = drawn(48, 64), drawn(ROWS, 64)
    product = PackedRows(weight)
    assert torch.equal(product(x), chain(x, weight, torch.zeros(48)))
    assert torch.equal(product(x.t().contiguous().t()), product(x))
    assert torch.equal(product(x.bfloat16()), product(x.bfloat16().float()))


def test_rows_are_rounded_to_the_type_of_the_weights(dtype: torch.dtype) -> None:
    product, x = PackedRows(drawn(48, 64).to(dtype)), drawn(ROWS, 64)
    assert torch.equal(product(x), product(x.to(dtype)))


def test_a_cpu_without_fused_multiply_adds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"fma": False})
    with pytest.raises(KernelUnavailable, match="the CPU has no fused multiply-add"):
        PackedRows(drawn(16, 16))


def test_what_keeps_llvm_from_compiling_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable() -> None:
        raise RuntimeError("no memory\nfor code")

    monkeypatch.setattr(llvm, "initialize_native_target", unable)
    for _ in range(2):
        with pytest.raises(KernelUnavailable, match="LLVM does not compile here: no memory for code"):
            PackedRows(drawn(16, 16))
        # Once is enough.
        monkeypatch.setattr(llvm, "initialize_native_target", pytest.fail)
