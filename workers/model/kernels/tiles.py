"""Tiles of a product: a few rows times a few panels, whose sums stay in registers while the inputs go by.

Factors of a product that all rows share lie in *panels* of `LANES` outputs: behind each other the inputs, and of each
the factors of these outputs. Panels are read once, in the order in which they lie, and the tiles of a few panels share
the reading of the next from memory. Neither packed rows nor a division of the inputs gained anything here. Source: Goto
and van de Geijn, Anatomy of High-Performance Matrix Multiplication (2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
    Value,
)

TILES = {16: {1: 6, 4: 1}, 32: {1: 6, 3: 9, 4: 4}}
"""By the CPU's registers of a vector (32 of AVX-512): the most rows of a tile of so many panels. Its sums, weights of
one input and an activation fit in the registers. Many rows go by the highest tiles, and the panels that these leave by
tiles of one. A tile of 9 rows and 3 panels loads 12 times for 27 products; of one panel alone it would load oftener
than it multiplies, which keeps a CPU that multiplies two vectors at once from its speed."""

ADDRESSES = ("x", "weights", "bias", "out")
STRIDES = ("x_row", "panel", "out_row", "steps")
"""Bytes from one row or panel to the next, and the steps over the inputs."""


def registers() -> int:
    """How many the CPU has for vectors."""
    return 32 if llvm.get_host_cpu_features().get("avx512f") else 16


def has_pairs() -> bool:
    """Whether the CPU has an instruction for pairs of bf16."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16"))


def multiplies_pairs() -> bool:
    """Whether pairs of bf16 are multiplied by it. Where there is AMX too, two multiply-adds of f32 take 0.6 of its time
    (Intel's Sapphire Rapids).
    """
    return has_pairs() and not llvm.get_host_cpu_features().get("amx-bf16")


class Words:
    """How factors of a dtype lie in a panel, and are multiplied. An output's word of each step over the inputs is one
    factor of f32 or f16, or those of two inputs in bf16, which one instruction multiplies where there is one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.pairs = dtype, dtype == torch.bfloat16 and multiplies_pairs()
        self.inputs = 2 if dtype == torch.bfloat16 else 1
        self.vector_bytes = LANES * self.inputs * dtype.itemsize
        #: Of the rows as they are read, and how much of one a step takes.
        self.x_dtype = torch.bfloat16 if self.pairs else torch.float32
        self.x_bytes = self.inputs * self.x_dtype.itemsize

    def factors(
        self, code: Code, addresses: Sequence[Value], *, align: int | None = None
    ) -> list[tuple[int, list[Value]]]:
        """In the order of the chain: where a step's factor lies in a row, in bytes, and the weights that it multiplies,
        of the panel at each address.
        """
        align = align or self.vector_bytes
        if self.dtype != torch.bfloat16 or self.pairs:
            kind = torch.float32 if self.pairs else self.dtype
            return [(0, [code.widened(each, kind, align=align) for each in addresses])]
        halves = [code.halves(code.load(each, INTEGERS, align)) for each in addresses]
        return [(4, [upper for _, upper in halves]), (0, [lower for lower, _ in halves])]

    def added(self, code: Code, factor: Value, weights: Value, so_far: Value) -> Value:
        return code.pairs_added(weights, factor, so_far) if self.pairs else code.fma(factor, weights, so_far)


def pack_code(module: ir.Module, words: Words) -> Code:
    """Takes rows of factors, `row` bytes from one to the next, into a panel of `steps`: sixteen runs of memory are read
    at once, and one is written. Outputs from `rows` on are as the last one is.
    """
    code = Code(module, "pack", ("from", "out"), ("row", "rows", "steps"), internal=True)
    builder, given, size = code.builder, code.given, words.vector_bytes // LANES
    number, last = ir.IntType(8 * size), builder.sub(given["rows"], code.number(1))
    starts = [
        code.at(given["from"], code.multiply(given["row"], code.smaller(code.number(lane), last)))
        for lane in range(LANES)
    ]

    def step(index: Value) -> None:
        lanes = ir.Constant(ir.VectorType(number, LANES), ir.Undefined)
        for lane, start in enumerate(starts):
            word = code.load(code.at(start, code.multiply(index, size)), number, words.dtype.itemsize)
            lanes = builder.insert_element(lanes, word, ir.Constant(I32, lane))
        code.store(lanes, code.at(given["out"], code.multiply(index, words.vector_bytes)), words.vector_bytes)

    code.each(given["steps"], step)
    return code.ended()


def _tile(module: ir.Module, words: Words, rows: int, panels: int) -> Code:
    """`rows` times `panels`: their sums go through all inputs in registers.

    With each input a part of what lies `ahead` is asked for, so that it is in the second cache when its turn comes.
    """
    code = Code(
        module, f"tile_{rows}_{panels}", (*ADDRESSES, "ahead"), (*STRIDES, "ahead_step"), internal=True
    )
    x, weights, bias, out, ahead, x_row, panel, out_row, steps, ahead_step = code.given.values()
    places = [(row, column) for row in range(rows) for column in range(panels)]
    x_of = [code.at(x, code.multiply(x_row, row)) for row in range(rows)]
    weights_of = [code.at(weights, code.multiply(panel, column)) for column in range(panels)]
    begin = [code.load(code.at(bias, LINE_BYTES * column), VECTOR) for column in range(panels)]

    def step(index: Value, sums: list[Value]) -> Sequence[Value]:
        code.prefetch(code.at(ahead, code.multiply(index, ahead_step)))
        skip = code.multiply(index, words.vector_bytes)
        at = code.multiply(index, words.x_bytes)
        for offset, parts in words.factors(code, [code.at(each, skip) for each in weights_of]):
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


def _column(module: ir.Module, words: Words, panels: int, rows_max: int) -> Code:
    """All rows times `panels`, in as few tiles as there can be, whose heights differ by one at most: a tile of one or
    two rows computes at half of the speed. Each asks for its part of the next panels.
    """
    tiles_of = {rows: _tile(module, words, rows, panels) for rows in range(1, rows_max + 1)}
    code = Code(module, f"column_{panels}", ADDRESSES, (*STRIDES, "rows"), internal=True)
    builder, given = code.builder, code.given
    rows = given["rows"]
    tiles = code.divided_up(rows, rows_max)
    low, higher = builder.udiv(rows, tiles), builder.urem(rows, tiles)
    ahead = code.at(given["weights"], code.multiply(given["panel"], panels))
    ahead_step = code.divided_up(code.number(words.vector_bytes * panels), tiles)

    def tile(index: Value, now: list[Value]) -> Sequence[Value]:
        height = code.add(low, builder.zext(builder.icmp_unsigned("<", index, higher), I64))
        told = {**given, **dict(zip(("x", "out", "ahead"), now, strict=True)), "ahead_step": ahead_step}
        code.choose(height, {rows: partial(code.run, tile, told) for rows, tile in tiles_of.items()})
        steps = (given["x_row"], height), (given["out_row"], height), (ahead_step, given["steps"])
        return [code.at(address, code.multiply(*step)) for address, step in zip(now, steps, strict=True)]

    code.loop(tiles, [given["x"], given["out"], ahead], tile)
    return code.ended()


def panels_code(module: ir.Module, words: Words) -> Code:
    """All rows times some panels: as many at once as the highest tiles have, or more, if one has room for all rows."""
    tiles = TILES[registers()]
    columns = {panels: _column(module, words, panels, rows_max) for panels, rows_max in tiles.items()}
    code = Code(module, "panels", ADDRESSES, (*STRIDES, "rows", "first", "end"), internal=True)
    builder, given = code.builder, code.given
    first, end = given["first"], given["end"]
    tallest = max(tiles, key=lambda panels: tiles[panels])
    at_once: Value = code.number(tallest)
    for panels in sorted(each for each in tiles if each > tallest):
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
