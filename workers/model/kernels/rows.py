"""Norm, rotation and gate: what a layer does to each row between its products, as compiled kernels."""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import ir

from halfmoon.workers.model.kernels.code import LANES, LINE_BYTES, VECTOR, Code, Compiled, Value, bits_of

Tensor = torch.Tensor


class RowKernels:
    """For residuals, and inputs of products, of one dtype; all else is f32. Tensors are contiguous. Widths, and the
    half of a head's, are multiples of `LANES`. Raises `KernelUnavailable`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        module = ir.Module()
        codes = [
            _norm(module, dtype, added=False),
            _norm(module, dtype, added=True),
            _rotate(module),
            _gate(module, dtype),
        ]
        self._dtype = dtype
        self._norm, self._add_norm, self._rotate, self._gate = map(Compiled(module).function, codes)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The root mean square norm of `x` `[rows, hidden]`; `weight` is f32."""
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, bits_of(eps))
        return out

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Changes `x` to `x + added`, rounded to its dtype, and returns the norm of that."""
        out = torch.empty_like(x)
        self._add_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), added.data_ptr(), *x.shape, bits_of(eps)
        )
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, number: int, head_dim: int) -> None:
        """Turns the first `number` heads of each row of `heads` `[rows, width]` by their positions, of which `cos` and
        `sin` are f32 `[rows, 1, head_dim / 2]`: dimension i pairs with i + head_dim / 2.
        """
        self._rotate(heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), *heads.shape, number, head_dim // 2)

    def gate(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` `[rows, width]`, of `gate_up` `[rows, 2 * width]`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=self._dtype)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out


@cache
def row_kernels(dtype: torch.dtype) -> RowKernels:
    return RowKernels(dtype)


def _vectors(code: Code, width: Value) -> Value:
    return code.builder.udiv(width, code.number(LANES))


def _norm(module: ir.Module, dtype: torch.dtype, *, added: bool) -> Code:
    addresses = ("x", "weight", "out", *(("added",) if added else ()))
    code = Code(module, "add_norm" if added else "norm", addresses, ("rows", "width", "eps"))
    builder, given = code.builder, code.given
    vectors, width = _vectors(code, given["width"]), builder.uitofp(given["width"], ir.FloatType())

    def row(number: Value) -> None:
        first = code.multiply(number, given["width"])
        x = code.at(given["x"], code.multiply(first, dtype.itemsize))
        out = code.at(given["out"], code.multiply(first, dtype.itemsize))
        plus = code.at(given[addresses[-1]], code.multiply(first, 4))

        def at(index: Value) -> Value:
            return code.at(x, code.multiply(index, LANES * dtype.itemsize))

        def square(index: Value, sums: list[Value]) -> list[Value]:
            if added:
                term = code.load(code.at(plus, code.multiply(index, LINE_BYTES)), sums[0].type)
                value = code.rounded(builder.fadd(code.widened(at(index), dtype), term), dtype)
                code.store_narrow(value, at(index), dtype)
            else:
                value = code.widened(at(index), dtype)
            return [code.fma(value, value, sums[0])]

        (sums,) = code.loop(vectors, [code.constant(0.0)], square)
        mean = builder.fadd(builder.fdiv(code.summed(sums), width), code.single(given["eps"]))
        root = code.splat(code.call("llvm.sqrt.f32", mean.type, mean))

        def scale(index: Value) -> None:
            normed = builder.fdiv(code.widened(at(index), dtype), root)
            factor = code.load(code.at(given["weight"], code.multiply(index, LINE_BYTES)), VECTOR)
            code.store_rounded(
                builder.fmul(normed, factor),
                code.at(out, code.multiply(index, LANES * dtype.itemsize)),
                dtype,
            )

        code.each(vectors, scale)

    code.each(given["rows"], row)
    return code.ended()


def _rotate(module: ir.Module) -> Code:
    code = Code(module, "rotate", ("heads", "cos", "sin"), ("rows", "width", "number", "half"))
    builder, given = code.builder, code.given
    half = code.multiply(given["half"], 4)

    def row(number: Value) -> None:
        heads = code.at(given["heads"], code.multiply(code.multiply(number, given["width"]), 4))
        cos, sin = (code.at(given[name], code.multiply(number, half)) for name in ("cos", "sin"))

        def head(number: Value) -> None:
            lower = code.at(heads, code.multiply(code.multiply(number, half), 2))

            def pair(index: Value) -> None:
                skip = code.multiply(index, LINE_BYTES)
                places = code.at(lower, skip), code.at(lower, half, skip)
                a, b = (code.load(place, VECTOR) for place in places)
                c, s = (code.load(code.at(table, skip), VECTOR) for table in (cos, sin))
                code.store(code.fma(builder.fneg(b), s, builder.fmul(a, c)), places[0])
                code.store(code.fma(a, s, builder.fmul(b, c)), places[1])

            code.each(_vectors(code, given["half"]), pair)

        code.each(given["number"], head)

    code.each(given["rows"], row)
    return code.ended()


def _gate(module: ir.Module, dtype: torch.dtype) -> Code:
    code = Code(module, "gate", ("gate_up", "out"), ("rows", "width"))
    builder, given = code.builder, code.given
    width = code.multiply(given["width"], 4)

    def row(number: Value) -> None:
        out = code.at(given["out"], code.multiply(code.multiply(number, given["width"]), dtype.itemsize))
        gate = code.at(given["gate_up"], code.multiply(code.multiply(number, width), 2))

        def vector(index: Value) -> None:
            skip = code.multiply(index, LINE_BYTES)
            g, up = (
                code.widened(each, torch.float32)
                for each in (code.at(gate, skip), code.at(gate, width, skip))
            )
            silu = builder.fdiv(g, builder.fadd(code.constant(1.0), code.exponential(builder.fneg(g))))
            code.store_rounded(
                builder.fmul(silu, up), code.at(out, code.multiply(index, LANES * dtype.itemsize)), dtype
            )

        code.each(_vectors(code, given["width"]), vector)

    code.each(given["rows"], row)
    return code.ended()
