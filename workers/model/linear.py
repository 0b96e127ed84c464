"""Matrix products with fixed weights, packed once.

On a CPU they are those of the row kernel (`kernels.products`). Where the CPU has instructions for products of bf16 or
f16 that the row kernel does not use (AMX, AVX512-FP16), with which a chunk's rows take half the time or less, oneDNN
multiplies such weights, in its packed form; and so it does where nothing can be compiled. Its operators are private:
each is tried once on the real weight, and PyTorch's plain product is the last resort.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial

import llvmlite.binding as llvm
import torch

from halfmoon.workers.model.kernels.code import KernelUnavailable
from halfmoon.workers.model.kernels.products import PackedRows

logger = logging.getLogger(__name__)

Tensor = torch.Tensor
Product = Callable[[Tensor], Tensor]

_PACKED_FOR_ROWS = 16
#: Where rows are not computed apart, a chunk's come in tiles of so many: oneDNN prepares a product anew for each number
#: of rows that it has not had, which takes up to a tenth of the time of a short prompt.
TILE_ROWS = 16


def whole_tiles(rows: int) -> int:
    """`rows`, and as many more as fill the last tile."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of `dtype` for this CPU; True where it does not say."""
    question = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in question:
        return True
    try:
        return bool(getattr(torch.ops.mkldnn, question[dtype])())
    except (AttributeError, RuntimeError):
        return True


class Linear:
    """`x @ weight.T + bias` for `x` `[rows, inputs]`; `weight` is `[outputs, inputs]`."""

    kernel: str
    """`rows` (computed apart: their bits do not depend on how many there are), `onednn` or `plain`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        ways = {"rows": _by_rows, "onednn": _by_onednn, "plain": _plain}
        self.kernel, self._multiply = next(
            (name, product) for name, way in ways.items() if (product := way(weight, bias)) is not None
        )

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The product, of `dtype` or else of x's."""
        return self._multiply(x).to(dtype or x.dtype)


def _by_rows(weight: Tensor, bias: Tensor | None) -> Product | None:
    if weight.device.type != "cpu" or _faster_by_libraries(weight.dtype):
        return None
    try:
        return PackedRows(weight, bias)
    except KernelUnavailable as error:
        _say_once(str(error))
        return None


def _faster_by_libraries(dtype: torch.dtype) -> bool:
    """By instructions that the row kernel does not use."""
    if dtype == torch.float32 or not multiplies(dtype):
        return False
    features = llvm.get_host_cpu_features()
    # Without AVX512-BF16, which the row kernel uses, oneDNN's products of bf16 are in f32 as well.
    return not (dtype == torch.bfloat16 and features.get("avx512f") and not features.get("amx-bf16"))


@cache
def _say_once(reason: str) -> None:
    logger.warning("products of a step are slower than they could be: %s", reason)


def _by_onednn(weight: Tensor, bias: Tensor | None) -> Product | None:
    if weight.device.type != "cpu" or weight.dtype == torch.float16 or not multiplies(weight.dtype):
        return None
    bias = None if bias is None else bias.clone()
    operators = torch.ops.mkldnn
    try:
        packed = operators._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        pointwise = operators._linear_pointwise.default
        pointwise(torch.zeros(1, weight.shape[1], dtype=weight.dtype), packed, bias, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None

    def product(x: Tensor) -> Tensor:
        result: Tensor = pointwise(x, packed, bias, "none", [], "")
        return result

    return product


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    # Weights read from a file are not aligned to a cache line.
    own = weight.contiguous().clone()
    return partial(
        torch.nn.functional.linear, weight=own, bias=None if bias is None else bias.contiguous().clone()
    )
