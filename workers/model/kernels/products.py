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

Rows are rounded to the type of the weights. bf16 and f16 weights are widened in registers, which loses nothing and
reads half the bytes. A word of 32 bits holds an output's bf16 weights of two inputs, of which the second comes first in
the chain: so does the instruction for such pairs (AVX512-BF16), which takes half the time and gives the same bits, but
that it takes numbers below 2 ** -126 for 0.
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
    KernelUnavailable,
    Value,
)

Tensor = torch.Tensor

_OF_A_THREAD = ("omp_get_thread_num", "omp_get_num_threads")
_MULTIPLY_ADDS_MIN = 1 << 20
"""Of a product that is worth waking other threads for."""
_TILES = {16: {1: 6, 4: 1}, 32: {1: 12, 4: 4}}
"""By the CPU's registers of a vector (32 of AVX-512): the most rows of a tile of so many panels. Its sums, weights of
one input and an activation fit in the registers."""

_ADDRESSES = ("x", "weights", "bias", "out")
_STRIDES = ("x_row", "panel", "out_row", "steps")
"""Bytes from one row or panel to the next, and the steps over the inputs."""


def multiplies_pairs() -> bool:
    """Whether the CPU has an instruction for pairs of bf16."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16"))


class _Words:
    """What a panel holds of an output for each step over the inputs, and how it is multiplied: a weight of f32 or f16,
    or those of two inputs in bf16. `pairs`: by the instruction for both.
    """

    def __init__(self, dtype: torch.dtype, *, pairs: bool) -> None:
        self.dtype, self.pairs = dtype, pairs
        self.inputs = 2 if dtype == torch.bfloat16 else 1
        self.vector_bytes = LANES * self.inputs * dtype.itemsize
        #: Of the rows as they are read, and how much of one a step takes.
        self.x_dtype = torch.bfloat16 if pairs else torch.float32
        self.x_bytes = self.inputs * self.x_dtype.itemsize

    def factors(self, code: Code, addresses: Sequence[Value]) -> list[tuple[int, list[Value]]]:
        """In the order of the chain: where a step's factor lies in a row, in bytes, and the weights that it multiplies,
        of the panel at each address.
        """
        if self.dtype != torch.bfloat16 or self.pairs:
            kind = torch.float32 if self.pairs else self.dtype
            return [(0, [code.widened(each, kind, align=self.vector_bytes) for each in addresses])]
        words = [code.load(each, INTEGERS, self.vector_bytes) for each in addresses]
        builder, half, upper = code.builder, code.integers(16), code.integers(0xFFFF0000)
        first = [builder.bitcast(builder.shl(each, half), VECTOR) for each in words]
        second = [builder.bitcast(builder.and_(each, upper), VECTOR) for each in words]
        return [(4, second), (0, first)]

    def added(self, code: Code, factor: Value, weights: Value, so_far: Value) -> Value:
        return code.pairs_added(weights, factor, so_far) if self.pairs else code.fma(factor, weights, so_far)


class PackedRows:
    """The weight `[outputs, inputs]` of a product, f32, bf16 or f16, on the CPU. Raises `KernelUnavailable`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._multiply = _multiply_of(
            weight.dtype, pairs=weight.dtype == torch.bfloat16 and multiplies_pairs()
        )
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
            worth_threads = rows * width * self._inputs >= _MULTIPLY_ADDS_MIN
            self._multiply(
                torch.get_num_threads() if worth_threads else 1,
                x.data_ptr(), self._weights_at, self._bias_at, out.data_ptr(),
                self._steps * self._multiply.words.x_bytes, self._panel, 4 * width, self._steps, rows, self._panels,
            )  # fmt: skip
        return out if width == self._outputs else out[:, : self._outputs].contiguous()


def _widened_by(columns: int, x: Tensor) -> Tensor:
    """With columns of 0."""
    return torch.nn.functional.pad(x, (0, columns)) if columns else x


class _Multiply:
    """The kernel for weights of one form: called with a number of threads, and the arguments of a whole product."""

    def __init__(self, words: _Words) -> None:
        self.words, self._parallel = words, _openmp()
        registers = 32 if llvm.get_host_cpu_features().get("avx512f") else 16
        module = ir.Module()
        panels = _panels(module, words, _TILES[registers])
        whole = _whole(module, panels)
        # Names functions that have to be there.
        share = _share(module, panels, whole) if self._parallel is not None else None
        pack = _pack(module, words)
        compiled = Compiled(module)
        self._whole, self._pack = compiled.function(whole), compiled.function(pack)
        self._share = compiled.address(share) if share is not None else 0

    def in_panels(self, weight: Tensor) -> Tensor:
        """`[panels, steps, LANES * inputs of a word]`, from a cache line on. Outputs that the last panel lacks have
        weights of 0.
        """
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        steps = inputs // self.words.inputs
        whole, rest = divmod(outputs, LANES)
        shape = (whole + bool(rest), steps, LANES * self.words.inputs)
        room = torch.empty(math.prod(shape) * weight.itemsize + LINE_BYTES, dtype=torch.uint8)
        skipped = -room.data_ptr() % LINE_BYTES
        panels = room[skipped : len(room) - LINE_BYTES + skipped].view(weight.dtype).view(shape)
        self._pack(weight.data_ptr(), panels.data_ptr(), steps, whole)
        if rest:
            last = torch.cat([weight[-rest:], weight.new_zeros(LANES - rest, inputs)])
            self._pack(last.data_ptr(), panels[-1].data_ptr(), steps, 1)
        return panels

    def __call__(self, threads: int, *arguments: int) -> None:
        if threads == 1 or self._parallel is None:
            self._whole(*arguments)
        else:
            told = (ctypes.c_int64 * len(arguments))(*arguments)
            self._parallel(self._share, ctypes.addressof(told), threads, 0)


def _multiply_of(dtype: torch.dtype, *, pairs: bool) -> _Multiply:
    found = _attempt(dtype, pairs)
    if isinstance(found, KernelUnavailable):
        raise found
    return found


@cache
def _attempt(dtype: torch.dtype, pairs: bool) -> _Multiply | KernelUnavailable:
    """Once, whatever comes of it."""
    try:
        return _Multiply(_Words(dtype, pairs=pairs))
    except KernelUnavailable as error:
        return error


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


def _pack(module: ir.Module, words: _Words) -> Code:
    """Takes rows of weights into panels: sixteen runs of memory are read at once, and one is written."""
    code = Code(module, "pack", ("weight", "out"), ("steps", "panels"))
    builder, given, size = code.builder, code.given, words.vector_bytes // LANES
    number = ir.IntType(8 * size)

    def panel(index: Value) -> None:
        row = code.multiply(given["steps"], size)
        skip = code.multiply(code.multiply(index, row), LANES)
        rows = [code.at(given["weight"], skip, code.multiply(row, output)) for output in range(LANES)]
        out = code.at(given["out"], skip)

        def one(index: Value) -> None:
            lanes = ir.Constant(ir.VectorType(number, LANES), ir.Undefined)
            for lane, start in enumerate(rows):
                word = code.load(code.at(start, code.multiply(index, size)), number, words.dtype.itemsize)
                lanes = builder.insert_element(lanes, word, ir.Constant(I32, lane))
            code.store(lanes, code.at(out, code.multiply(index, words.vector_bytes)), words.vector_bytes)

        code.each(given["steps"], one)

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


def _tile(module: ir.Module, words: _Words, rows: int, panels: int) -> Code:
    """`rows` times `panels`: their sums go through all inputs in registers.

    With each input a part of what lies `ahead` is asked for, so that it is in the second cache when its turn comes.
    """
    code = Code(
        module, f"tile_{rows}_{panels}", (*_ADDRESSES, "ahead"), (*_STRIDES, "ahead_step"), internal=True
    )
    x, weights, bias, out, ahead, x_row, panel, out_row, steps, ahead_step = code.given.values()
    places = [(row, column) for row in range(rows) for column in range(panels)]
    x_of = [code.at(x, code.multiply(x_row, row)) for row in range(rows)]
    weights_of = [code.at(weights, code.multiply(panel, column)) for column in range(panels)]
    begin = [code.load(code.at(bias, LINE_BYTES * column), VECTOR) for column in range(panels)]

    def step(index: Value, sums: list[Value]) -> Sequence[Value]:
        code.prefetch(code.at(ahead, code.multiply(index, ahead_step)))
        skip = code.multiply(index, words.vector_bytes)
        for offset, parts in words.factors(code, [code.at(each, skip) for each in weights_of]):
            at = code.multiply(index, words.x_bytes)
            ones = [code.splat(code.load(code.at(each, at, offset), F32)) for each in x_of]
            sums = [
                words.added(code, ones[row], parts[column], so_far)
                for (row, column), so_far in zip(places, sums, strict=True)
            ]
        return sums

    sums = code.loop(steps, begin * rows, step)
    for (row, column), made in zip(places, sums, strict=True):
        code.store(made, code.at(out, code.multiply(out_row, row), LINE_BYTES * column))
    return code.ended()


def _column(module: ir.Module, words: _Words, panels: int, rows_max: int) -> Code:
    """All rows times `panels`, in as few tiles as there can be, whose heights differ by one at most: a tile of one or
    two rows computes at half of the speed. Each asks for its part of the next panels.
    """
    tiles_of = {rows: _tile(module, words, rows, panels) for rows in range(1, rows_max + 1)}
    code = Code(module, f"column_{panels}", _ADDRESSES, (*_STRIDES, "rows"), internal=True)
    builder, given = code.builder, code.given
    rows = given["rows"]
    tiles = builder.udiv(code.add(rows, rows_max - 1), code.number(rows_max))
    low, higher = builder.udiv(rows, tiles), builder.urem(rows, tiles)
    ahead = code.at(given["weights"], code.multiply(given["panel"], panels))
    ahead_step = builder.udiv(code.add(tiles, words.vector_bytes * panels - 1), tiles)

    def tile(index: Value, now: list[Value]) -> Sequence[Value]:
        height = code.add(low, builder.zext(builder.icmp_unsigned("<", index, higher), I64))
        told = {**given, **dict(zip(("x", "out", "ahead"), now, strict=True)), "ahead_step": ahead_step}
        code.choose(height, {rows: partial(code.run, tile, told) for rows, tile in tiles_of.items()})
        steps = (given["x_row"], height), (given["out_row"], height), (ahead_step, given["steps"])
        return [code.at(address, code.multiply(*step)) for address, step in zip(now, steps, strict=True)]

    code.loop(tiles, [given["x"], given["out"], ahead], tile)
    return code.ended()


def _panels(module: ir.Module, words: _Words, tiles: dict[int, int]) -> Code:
    """All rows times some panels. As many at once as a tile has room for with all rows, or with the most rows."""
    columns = {panels: _column(module, words, panels, rows_max) for panels, rows_max in tiles.items()}
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
