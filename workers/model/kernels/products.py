"""Products of rows with packed weights, as a compiled kernel: the row kernel.

Each element of a result is one chain of fused multiply-adds over the inputs, in their order, in f32, that begins with
the bias. So its bits depend on its own row and weights alone: not on the rows beside it, on how many there are, on the
tile in which it is computed, on the number of threads, or on the width of the CPU's vectors. That is what exact
numerics ask of a product, and no library promises it.

Weights lie in *panels* of `LANES` outputs: behind each other the inputs, and of each the weights of these outputs. A
*tile* is a few rows times a few panels, whose sums stay in registers while the inputs go by. Panels are read once, in
the order in which they lie, and the tiles of one panel share the reading of the next from memory. So a step of a small
batch takes as long as memory does. Source of panels and tiles: Goto and van de Geijn, Anatomy of High-Performance
Matrix Multiplication (2008). Neither packed activations nor a division of the inputs gained anything here.

bf16 and f16 weights are widened in registers, which loses nothing and reads half the bytes. A word of 32 bits holds the
bf16 weights of two outputs, half a panel apart, which a shift and a mask widen.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from halfmoon.workers.model.kernels.code import (
    F32,
    I32,
    I64,
    INTEGERS,
    LANES,
    LINE_BYTES,
    VECTOR,
    Code,
    Compiled,
    Value,
)

Tensor = torch.Tensor

_OF_A_THREAD = ("omp_get_thread_num", "omp_get_num_threads")
_MULTIPLY_ADDS_MIN = 1 << 20
"""Of a product that is worth waking other threads for."""
_TILES = {16: {1: 6, 2: 3, 3: 2, 4: 1}, 32: {1: 12, 2: 8, 4: 4}}
"""By the CPU's registers of a vector (32 of AVX-512): the most rows of a tile of so many panels. Its sums, weights of
one input and an activation fit in the registers."""

_ADDRESSES = ("x", "weights", "bias", "out")
_STRIDES = ("x_row", "panel", "out_row", "inputs")
"""Bytes from one row or panel to the next, and the number of inputs."""


class PackedRows:
    """The weight `[outputs, inputs]` of a product, f32, bf16 or f16, on the CPU. Raises `KernelUnavailable`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._multiply = _multiply_of(weight.dtype)
        self._outputs, self._inputs = weight.shape
        self._panels = -(-self._outputs // LANES)
        self._weights = self._multiply.in_panels(weight)
        self._bias = torch.zeros(self._panels * LANES)
        if bias is not None:
            self._bias[: self._outputs] = bias
        self._weights_at, self._bias_at = self._weights.data_ptr(), self._bias.data_ptr()
        self._panel = self._weights[0].nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias` in f32, for `x` `[rows, inputs]`."""
        assert x.shape[1] == self._inputs, (x.shape, self._inputs)
        x = x.float().contiguous()
        rows, width = len(x), self._panels * LANES
        out = torch.empty(rows, width)
        if rows:
            worth_threads = rows * width * self._inputs >= _MULTIPLY_ADDS_MIN
            self._multiply(
                torch.get_num_threads() if worth_threads else 1,
                x.data_ptr(), self._weights_at, self._bias_at, out.data_ptr(),
                4 * self._inputs, self._panel, 4 * width, self._inputs, rows, self._panels,
            )  # fmt: skip
        return out if width == self._outputs else out[:, : self._outputs].contiguous()


class _Multiply:
    """The kernel for weights of one dtype: called with a number of threads, and the arguments of a whole product."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._parallel = _openmp()
        registers = 32 if llvm.get_host_cpu_features().get("avx512f") else 16
        module = ir.Module()
        panels = _panels(module, dtype, _TILES[registers])
        whole = _whole(module, panels)
        # Names functions that have to be there.
        share = _share(module, panels, whole) if self._parallel is not None else None
        pack = _pack(module, dtype)
        compiled = Compiled(module)
        self._whole, self._pack = compiled.function(whole), compiled.function(pack)
        self._share = compiled.address(share) if share is not None else 0

    def in_panels(self, weight: Tensor) -> Tensor:
        """`[panels, inputs, LANES]`, from a cache line on. Outputs that the last panel lacks have weights of 0."""
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        whole, rest = divmod(outputs, LANES)
        shape = (whole + bool(rest), inputs, LANES)
        room = torch.empty(math.prod(shape) * weight.itemsize + LINE_BYTES, dtype=torch.uint8)
        skipped = -room.data_ptr() % LINE_BYTES
        panels = room[skipped : len(room) - LINE_BYTES + skipped].view(weight.dtype).view(shape)
        self._pack(weight.data_ptr(), panels.data_ptr(), inputs, whole)
        if rest:
            last = torch.cat([weight[-rest:], weight.new_zeros(LANES - rest, inputs)])
            self._pack(last.data_ptr(), panels[-1].data_ptr(), inputs, 1)
        return panels

    def __call__(self, threads: int, *arguments: int) -> None:
        if threads == 1 or self._parallel is None:
            self._whole(*arguments)
        else:
            told = (ctypes.c_int64 * len(arguments))(*arguments)
            self._parallel(self._share, ctypes.addressof(told), threads, 0)


@cache
def _multiply_of(dtype: torch.dtype) -> _Multiply:
    return _Multiply(dtype)


@cache
def _openmp() -> Any:
    """`GOMP_parallel` of the library whose threads PyTorch uses: a second pool would contend with them. None where
    PyTorch has another one; products are then computed by one thread.
    """
    try:
        found = re.search(r"/.*/libgomp[^/\n]*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        if found is None:
            return None
        library = ctypes.CDLL(found[0])
    except OSError:
        return None
    for name in _OF_A_THREAD:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    parallel = library.GOMP_parallel
    parallel.restype = None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return parallel


def _pack(module: ir.Module, dtype: torch.dtype) -> Code:
    """Takes rows of weights into panels: sixteen runs of memory are read at once, and one is written."""
    code = Code(module, "pack", ("weight", "out"), ("inputs", "panels"))
    builder, given, size = code.builder, code.given, dtype.itemsize
    number = ir.IntType(8 * size)
    # The lower half of a word comes first.
    order = (
        [lane // 2 + lane % 2 * (LANES // 2) for lane in range(LANES)]
        if dtype == torch.bfloat16
        else range(LANES)
    )

    def panel(index: Value) -> None:
        row = code.multiply(given["inputs"], size)
        skip = code.multiply(code.multiply(index, row), LANES)
        rows = [code.at(given["weight"], skip, code.multiply(row, output)) for output in order]
        out = code.at(given["out"], skip)

        def one(index: Value) -> None:
            lanes = ir.Constant(ir.VectorType(number, LANES), ir.Undefined)
            for lane, start in enumerate(rows):
                weight = code.load(code.at(start, code.multiply(index, size)), number, size)
                lanes = builder.insert_element(lanes, weight, ir.Constant(I32, lane))
            code.store(lanes, code.at(out, code.multiply(index, LANES * size)), LANES * size)

        code.each(given["inputs"], one)

    code.each(given["panels"], panel)
    return code.ended()


def _whole(module: ir.Module, panels: Code) -> Code:
    code = Code(module, "whole", _ADDRESSES, (*_STRIDES, "rows", "panels"))
    code.run(panels, {**code.given, "first": code.number(0), "end": code.given["panels"]})
    return code.ended()


def _share(module: ir.Module, panels: Code, whole: Code) -> Code:
    """For one of several threads of OpenMP, its share of the panels. Gets the address of the arguments of `whole`."""
    code = Code(module, "share", ("arguments",), ())
    given = {
        name: code.load(code.at(code.given["arguments"], 8 * i), argument.type)
        for i, (name, argument) in enumerate(whole.given.items())
    }
    thread, threads = (code.builder.zext(code.call(name, I32), I64) for name in _OF_A_THREAD)
    first, end = (
        code.builder.udiv(code.multiply(given["panels"], each), threads)
        for each in (thread, code.add(thread, 1))
    )
    code.run(panels, {**given, "first": first, "end": end})
    return code.ended()


def _tile(module: ir.Module, dtype: torch.dtype, rows: int, panels: int) -> Code:
    """`rows` times `panels`: their sums go through all inputs in registers.

    With each input a part of what lies `ahead` is asked for, so that it is in the second cache when its turn comes.
    """
    code = Code(
        module, f"tile_{rows}_{panels}", (*_ADDRESSES, "ahead"), (*_STRIDES, "ahead_step"), internal=True
    )
    x, weights, bias, out, ahead, x_row, panel, out_row, inputs, ahead_step = code.given.values()
    places = [(row, column) for row in range(rows) for column in range(panels)]
    x_of = [code.at(x, code.multiply(x_row, row)) for row in range(rows)]
    weights_of = [code.at(weights, code.multiply(panel, column)) for column in range(panels)]
    begin = [code.load(code.at(bias, LINE_BYTES * column), VECTOR) for column in range(panels)]

    def step(index: Value, sums: list[Value]) -> Sequence[Value]:
        code.prefetch(code.at(ahead, code.multiply(index, ahead_step)))
        skip = code.multiply(index, LANES * dtype.itemsize)
        wide = [_widened(code, code.at(each, skip), dtype) for each in weights_of]
        ones = [code.splat(code.load(code.at(each, code.multiply(index, 4)), F32)) for each in x_of]
        return [
            code.fma(ones[row], wide[column], so_far)
            for (row, column), so_far in zip(places, sums, strict=True)
        ]

    sums = code.loop(inputs, begin * rows, step)
    for (row, column), made in zip(places, sums, strict=True):
        code.store(made, code.at(out, code.multiply(out_row, row), LINE_BYTES * column))
    return code.ended()


def _widened(code: Code, address: Value, dtype: torch.dtype) -> Value:
    """The weights of one input in a panel, in f32."""
    if dtype != torch.bfloat16:
        return code.widened(address, dtype, align=LANES * dtype.itemsize)
    half = ir.VectorType(I32, LANES // 2)
    words = code.load(address, half, LINE_BYTES // 2)
    lower = code.builder.shl(words, ir.Constant(half, [16] * (LANES // 2)))
    upper = code.builder.and_(words, ir.Constant(half, [0xFFFF0000] * (LANES // 2)))
    both = code.builder.shuffle_vector(lower, upper, ir.Constant(INTEGERS, [*range(LANES)]))
    return code.builder.bitcast(both, VECTOR)


def _column(module: ir.Module, dtype: torch.dtype, panels: int, rows_max: int) -> Code:
    """All rows times `panels`, in as few tiles as there can be, whose heights differ by one at most: a tile of one or
    two rows computes at half of the speed. Each asks for its part of the next panels.
    """
    tiles_of = {rows: _tile(module, dtype, rows, panels) for rows in range(1, rows_max + 1)}
    code = Code(module, f"column_{panels}", _ADDRESSES, (*_STRIDES, "rows"), internal=True)
    builder, given = code.builder, code.given
    rows = given["rows"]
    tiles = builder.udiv(code.add(rows, rows_max - 1), code.number(rows_max))
    low, higher = builder.udiv(rows, tiles), builder.urem(rows, tiles)
    ahead = code.at(given["weights"], code.multiply(given["panel"], panels))
    ahead_step = builder.udiv(code.add(tiles, LANES * dtype.itemsize * panels - 1), tiles)

    def tile(index: Value, now: list[Value]) -> Sequence[Value]:
        height = code.add(low, builder.zext(builder.icmp_unsigned("<", index, higher), I64))
        told = {**given, **dict(zip(("x", "out", "ahead"), now, strict=True)), "ahead_step": ahead_step}
        code.choose(height, {rows: partial(code.run, tile, told) for rows, tile in tiles_of.items()})
        steps = (given["x_row"], height), (given["out_row"], height), (ahead_step, given["inputs"])
        return [code.at(address, code.multiply(*step)) for address, step in zip(now, steps, strict=True)]

    code.loop(tiles, [given["x"], given["out"], ahead], tile)
    return code.ended()


def _panels(module: ir.Module, dtype: torch.dtype, tiles: dict[int, int]) -> Code:
    """All rows times some panels. As many at once as a tile has room for with all rows, or with the most rows."""
    columns = {panels: _column(module, dtype, panels, rows_max) for panels, rows_max in tiles.items()}
    code = Code(module, "panels", _ADDRESSES, (*_STRIDES, "rows", "first", "end"), internal=True)
    builder, given = code.builder, code.given
    first, end = given["first"], given["end"]
    tallest, *others = sorted(tiles, key=lambda panels: -tiles[panels])
    at_once: Value = code.number(tallest)
    for panels in others:
        fits = builder.icmp_unsigned("<=", given["rows"], code.number(tiles[panels]))
        at_once = builder.select(fits, code.number(panels), at_once)

    def column(panels: int, number: Value) -> None:
        skip = code.multiply(number, LINE_BYTES)
        skips = {"weights": code.multiply(number, given["panel"]), "bias": skip, "out": skip}
        code.run(
            columns[panels], {**given, **{name: code.at(given[name], each) for name, each in skips.items()}}
        )

    def all_of(panels: int) -> None:
        whole = builder.udiv(builder.sub(end, first), code.number(panels))
        code.each(whole, lambda i: column(panels, code.add(first, code.multiply(i, panels))))
        done = code.add(first, code.multiply(whole, panels))
        code.each(builder.sub(end, done), lambda i: column(1, code.add(done, i)))

    code.choose(at_once, {panels: partial(all_of, panels) for panels in tiles})
    return code.ended()
