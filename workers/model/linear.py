"""Matrix products with fixed weights, packed once for the CPU.

oneDNN's packed form is 2.3 times as fast as PyTorch's plain product in f32 on AMD and up to 2 times in bf16
at few rows. Its operators are private, so each is tried once on the real weight, and the plain product is the
fallback.

oneDNN has no products of bf16 for a CPU without AVX-512, and of f16 for most CPUs (AVX512-FP16 is needed). PyTorch's
plain ones of a chunk's rows take there up to nine times as long as those of f32. So such weights are packed in f32,
which holds them exactly: twice the memory, and results that are rounded once, as by a CPU that multiplies bf16. One row
would take less time in bf16, which is half as many bytes to read from memory; but its bits would be others than those
of the same row among sixteen.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

_PACKED_FOR_ROWS = 16
#: A chunk's rows come in tiles of so many: oneDNN prepares a product anew for each number of rows that it has not had,
#: which takes up to a tenth of the time of a short prompt.
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

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias.contiguous().clone() if bias is not None else None
        self._pointwise: Any = None
        self._weight = weight
        self._computed_in = weight.dtype
        if weight.device.type == "cpu":
            dtype = weight.dtype if multiplies(weight.dtype) else torch.float32
            if dtype in (torch.float32, torch.bfloat16):
                self._pack(dtype)
        if self._pointwise is None:
            # Weights read from a file are not aligned to a cache line.
            self._weight = weight.contiguous().clone()

    @property
    def packed(self) -> bool:
        return self._pointwise is not None

    def _pack(self, dtype: torch.dtype) -> None:
        operators = torch.ops.mkldnn
        bias = None if self.bias is None else self.bias.to(dtype)
        try:
            packed = operators._reorder_linear_weight(self._weight.to(dtype).contiguous(), _PACKED_FOR_ROWS)
            pointwise = operators._linear_pointwise.default
            pointwise(torch.zeros(1, self._weight.shape[1], dtype=dtype), packed, bias, "none", [], "")
        except (AttributeError, RuntimeError, NotImplementedError):
            return
        self._weight, self.bias, self._pointwise, self._computed_in = packed, bias, pointwise, dtype

    def __call__(self, x: Tensor) -> Tensor:
        if self._pointwise is None:
            return torch.nn.functional.linear(x, self._weight, self.bias)
        result: Tensor = self._pointwise(x.to(self._computed_in), self._weight, self.bias, "none", [], "")
        return result.to(x.dtype)
