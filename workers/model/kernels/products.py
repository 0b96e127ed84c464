"""Products of rows with packed weights, as a compiled kernel: the row kernel.

Each element of a result is one chain of fused multiply-adds over the inputs, in their order, in f32, that begins with
the bias. So its bits depend on its own row and weights alone: not on the rows beside it, on how many there are, on the
tile in which it is computed, on the number of threads, or on the width of the CPU's vectors. That is what exact
numerics ask of a product, and no library promises it.

Weights are read once, in the order in which they lie (`tiles`): a step of a small batch takes as long as memory does.

Rows are rounded to the type of the weights. bf16 and f16 weights are widened in registers, which loses nothing and
reads half the bytes. A word of 32 bits holds an output's bf16 weights of two inputs, of which the second comes first in
the chain: so does the instruction for such pairs (AVX512-BF16), which may take half the time and gives the same bits,
but that it takes numbers below 2 ** -126 for 0.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from llvmlite import ir

from halfmoon.workers.model.kernels.code import LANES, LINE_BYTES, Code, Compiled, KernelUnavailable, Value
from halfmoon.workers.model.kernels.threads import OF_WORK, SharedWork, threads_for
from halfmoon.workers.model.kernels.tiles import (
    ADDRESSES,
    STRIDES,
    Words,
    pack_code,
    panels_code,
)

Tensor = torch.Tensor


_BLOCK_ROWS = 144
"""So many rows, with their results, stay in the second cache while the panels go by: those of many more would not."""


class PackedRows:
    """The weight `[outputs, inputs]` of a product, f32, bf16 or f16, on the CPU. Raises `KernelUnavailable`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._multiply = _multiply_of(weight.dtype)
        self._dtype, self._x_dtype = weight.dtype, self._multiply.words.x_dtype
        self._outputs, self._inputs = weight.shape
        self._lacking = -self._inputs % self._multiply.words.inputs
        self._steps = (self._inputs + self._lacking) // self._multiply.words.inputs
        self._panels = -(-self._outputs // LANES)
        self._weights = self._multiply.in_panels(_widened_by(self._lacking, weight))
        self._bias = torch.zeros(self._panels * LANES)
        if bias is not None:
            self._bias[: self._outputs] = bias
        self._weights_at, self._bias_at = self._weights.data_ptr(), self._bias.data_ptr()
        self._panel = self._weights[0].nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias` in f32, for `x` `[rows, inputs]`."""
        assert x.shape[1] == self._inputs, (x.shape, self._inputs)
        x = _widened_by(self._lacking, x.to(self._dtype).to(self._x_dtype)).contiguous()
        rows, width = len(x), self._panels * LANES
        out = torch.empty(rows, width)
        if rows:
            self._multiply.run(
                threads_for(rows * width * self._inputs),
                x.data_ptr(), self._weights_at, self._bias_at, out.data_ptr(),
                self._steps * self._multiply.words.x_bytes, self._panel, 4 * width, self._steps, rows, self._panels,
            )  # fmt: skip
        return out if width == self._outputs else out[:, : self._outputs].contiguous()


def _widened_by(columns: int, x: Tensor) -> Tensor:
    """With columns of 0."""
    return torch.nn.functional.pad(x, (0, columns)) if columns else x


class _Multiply:
    """The kernel for weights of one form: `run` takes a number of threads, and the arguments of a whole product."""

    def __init__(self, words: Words) -> None:
        self.words = words
        module = ir.Module()
        product = SharedWork(module, _product(module, words), ADDRESSES, (*STRIDES, "rows"))
        pack = _pack(module, words)
        compiled = Compiled(module)
        self.run, self._pack = product.compiled(compiled), compiled.function(pack)

    def in_panels(self, weight: Tensor) -> Tensor:
        """`[panels, steps, LANES * inputs of a word]`, from a cache line on."""
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        shape = (-(-outputs // LANES), inputs // self.words.inputs, LANES * self.words.inputs)
        room = torch.empty(math.prod(shape) * weight.itemsize + LINE_BYTES, dtype=torch.uint8)
        skipped = -room.data_ptr() % LINE_BYTES
        panels = room[skipped : len(room) - LINE_BYTES + skipped].view(weight.dtype).view(shape)
        self._pack(weight.data_ptr(), panels.data_ptr(), outputs, inputs * weight.itemsize, *shape[:2])
        return panels


def _multiply_of(dtype: torch.dtype) -> _Multiply:
    found = _attempt(dtype)
    if isinstance(found, KernelUnavailable):
        raise found
    return found


@cache
def _attempt(dtype: torch.dtype) -> _Multiply | KernelUnavailable:
    """Once, whatever comes of it."""
    try:
        return _Multiply(Words(dtype))
    except KernelUnavailable as error:
        return error


def _product(module: ir.Module, words: Words) -> Code:
    """Its units are panels. Rows go through all of them by blocks, as few and as even as can be."""
    panels = panels_code(module, words)
    code = Code(module, "product", ADDRESSES, (*STRIDES, "rows", *OF_WORK), internal=True)
    builder, given = code.builder, code.given
    blocks = code.divided_up(given["rows"], _BLOCK_ROWS)
    block_rows = code.divided_up(given["rows"], blocks)

    def block(index: Value) -> None:
        first = code.multiply(index, block_rows)
        told = {
            **given,
            "x": code.at(given["x"], code.multiply(first, given["x_row"])),
            "out": code.at(given["out"], code.multiply(first, given["out_row"])),
            "rows": code.smaller(builder.sub(given["rows"], first), block_rows),
        }
        code.run(panels, told)

    code.each(blocks, block)
    return code.ended()


def _pack(module: ir.Module, words: Words) -> Code:
    pack = pack_code(module, words)
    code = Code(module, "pack_all", ("weight", "out"), ("outputs", "row", "panels", "steps"))
    given = code.given

    def panel(index: Value) -> None:
        first = code.multiply(index, LANES)
        told = {
            **given,
            "from": code.at(given["weight"], code.multiply(first, given["row"])),
            "out": code.at(
                given["out"], code.multiply(code.multiply(index, given["steps"]), words.vector_bytes)
            ),
            "rows": code.builder.sub(given["outputs"], first),
        }
        code.run(pack, told)

    code.each(given["panels"], panel)
    return code.ended()
