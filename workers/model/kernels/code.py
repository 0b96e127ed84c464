"""Kernels for this CPU, written as LLVM's intermediate code and compiled at a start.

A kernel says which vectors are multiplied and added, and in which order; LLVM chooses registers and instructions, and
may not reorder sums. So its bits are the same on every CPU with fused multiply-adds, whatever the width of its vectors.
What compiles Python's functions, or C, vectorises sums as it sees fit or not at all.

`Code` is a function under construction: llvmlite's builder, with loops as functions of Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import llvmlite.binding as llvm
import torch
from llvmlite import ir

LANES = 16
"""Of a vector: a cache line of f32, one register of AVX-512 and two of AVX2."""
LINE_BYTES = 64
F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VECTOR, INTEGERS, POINTER = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.PointerType()

# llvmlite has no type for bf16.
_BF16 = type("BFloatType", (ir.Type,), {"_to_string": lambda self: "bfloat"})()

_Kernel = TypeVar("_Kernel")
Value = Any
"""Of llvmlite's builder, which has no types."""


class KernelUnavailable(Exception):
    """Nothing can be compiled here, for the reason given."""


class Code:
    """A function `name` of some `addresses` and whole `numbers` of 64 bits, which returns nothing."""

    def __init__(
        self,
        module: ir.Module,
        name: str,
        addresses: Sequence[str],
        numbers: Sequence[str],
        *,
        internal: bool = False,
    ) -> None:
        self.module = module
        kinds = [*[POINTER] * len(addresses), *[I64] * len(numbers)]
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
        if internal:
            self.function.linkage = "internal"
        self.given: dict[str, Value] = dict(zip([*addresses, *numbers], self.function.args, strict=True))
        self.builder = ir.IRBuilder(self.function.append_basic_block())

    def number(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def _value(self, value: Value | int) -> Value:
        return self.number(value) if isinstance(value, int) else value

    def add(self, a: Value | int, b: Value | int) -> Value:
        return self.builder.add(self._value(a), self._value(b))

    def multiply(self, a: Value | int, b: Value | int) -> Value:
        return self.builder.mul(self._value(a), self._value(b))

    def smaller(self, a: Value, b: Value) -> Value:
        """The smaller one of two whole numbers."""
        return self.builder.select(self.builder.icmp_unsigned("<", a, b), a, b)

    def divided_up(self, a: Value, b: Value | int) -> Value:
        """a / b, rounded up."""
        return self.builder.udiv(self.builder.sub(self.add(a, b), self.number(1)), self._value(b))

    def at(self, address: Value, *offsets: Value | int) -> Value:
        """`offsets` in bytes."""
        for offset in offsets:
            address = self.builder.gep(address, [self._value(offset)], source_etype=ir.IntType(8))
        return address

    def load(self, address: Value, kind: Value, align: int = 4) -> Value:
        return self.builder.load(address, align=align, typ=kind)

    def store(self, value: Value, address: Value, align: int = 4) -> None:
        self.builder.store(value, address, align=align)

    def loop(
        self,
        count: Value | int,
        begin: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """`body(index, values)` for each index below `count`; the values are `begin`, then what it returned last, which
        is the result.
        """
        builder, before, count = self.builder, self.builder.block, self._value(count)
        first, after = builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(builder.icmp_unsigned("<", self.number(0), count), first, after)
        builder.position_at_end(first)
        index = builder.phi(I64)
        values = [builder.phi(value.type) for value in begin]
        made = list(body(index, values))
        following = builder.add(index, self.number(1))
        builder.cbranch(builder.icmp_unsigned("<", following, count), first, after)
        last = builder.block
        for phi, start, result in zip(
            [index, *values], [self.number(0), *begin], [following, *made], strict=True
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(result, last)
        builder.position_at_end(after)
        results = [builder.phi(value.type) for value in begin]
        for phi, start, result in zip(results, begin, made, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(result, last)
        return results

    def each(self, count: Value | int, body: Callable[[Value], None]) -> None:
        """`body(index)` for each index below `count`."""

        def carried(index: Value, _: list[Value]) -> Sequence[Value]:
            body(index)
            return ()

        self.loop(count, (), carried)

    def choose(self, number: Value, ways: Mapping[int, Callable[[], object]]) -> None:
        """The way of that `number`, which is one of them."""
        builder, after = self.builder, self.builder.append_basic_block()
        switch = builder.switch(number, after)
        for each, way in ways.items():
            block = builder.append_basic_block()
            switch.add_case(self.number(each), block)
            builder.position_at_end(block)
            way()
            builder.branch(after)
        builder.position_at_end(after)

    def single(self, number: Value) -> Value:
        """The f32 of which `number` has the bits (`bits_of`)."""
        return self.builder.bitcast(self.builder.trunc(number, I32), F32)

    def call(self, name: str, result: Value, *values: Value) -> Value:
        """A function of LLVM's."""
        found = self.module.globals.get(name)
        if found is None:
            found = ir.Function(self.module, ir.FunctionType(result, [value.type for value in values]), name)
        return self.builder.call(found, values)

    def run(self, code: Code, given: Mapping[str, Value]) -> None:
        """Another function of the module, with those of `given` that it takes."""
        self.builder.call(code.function, [given[name] for name in code.given])

    def prefetch(self, address: Value) -> None:
        """Into the second cache, where no line is lost that is in use."""
        self.call("llvm.prefetch.p0", ir.VoidType(), address, *(ir.Constant(I32, each) for each in (0, 2, 1)))

    # Vectors of f32.

    def constant(self, value: float) -> Value:
        return ir.Constant(VECTOR, [_single(value)] * LANES)

    def integers(self, value: int) -> Value:
        return ir.Constant(INTEGERS, [value] * LANES)

    def splat(self, value: Value) -> Value:
        nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        one = self.builder.insert_element(nothing, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, one, self.integers(0))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        suffix = "f32" if a.type == F32 else f"v{LANES}f32"
        return self.call(f"llvm.fma.{suffix}", a.type, a, b, c)

    def pairs_added(self, a: Value, b: Value, c: Value) -> Value:
        """c and the products of the pairs of bf16 in `a` and `b`, the upper ones first (AVX512-BF16). With what many
        products share as `b`: the other way about, Zen 4 takes a third longer.
        """
        a, b = (self.builder.bitcast(each, ir.VectorType(_BF16, 2 * LANES)) for each in (a, b))
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, c, a, b)

    def folded(self, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes as one: the upper half with the lower half, and so on."""
        size = LANES
        while size > 1:
            size //= 2
            lower, upper = (
                self.builder.shuffle_vector(
                    vector, vector, ir.Constant(ir.VectorType(I32, size), [*range(start, start + size)])
                )
                for start in (0, size)
            )
            vector = combine(lower, upper)
        return self.builder.extract_element(vector, ir.Constant(I32, 0))

    def summed(self, vector: Value) -> Value:
        return self.folded(vector, self.builder.fadd)

    def interleaved(self, even: Value, odd: Value) -> list[Value]:
        """Two vectors of their lanes by turns."""
        turns = [lane for pair in zip(range(LANES), range(LANES, 2 * LANES), strict=True) for lane in pair]
        parts = turns[:LANES], turns[LANES:]
        return [self.builder.shuffle_vector(even, odd, ir.Constant(INTEGERS, part)) for part in parts]

    def summed_each(self, vectors: Sequence[Callable[[], Value]]) -> Value:
        """A vector of the sums of `LANES` vectors, each with the bits of `summed`; few of them live at once."""
        size = len(vectors)
        if size == 1:
            return vectors[0]()
        a, b = self.summed_each(vectors[: size // 2]), self.summed_each(vectors[size // 2 :])
        half = LANES // size
        lower = [lane for lane in range(2 * LANES) if lane % (2 * half) < half]
        parts = [ir.Constant(INTEGERS, [lane + more for lane in lower]) for more in (0, half)]
        return self.builder.fadd(*(self.builder.shuffle_vector(a, b, part) for part in parts))

    def larger(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def widened(self, address: Value, dtype: torch.dtype, *, align: int = 4) -> Value:
        """`LANES` numbers, one behind the other, as f32."""
        if dtype == torch.float32:
            return self.load(address, VECTOR, align)
        if dtype == torch.float16:
            return self.builder.fpext(self.load(address, ir.VectorType(ir.HalfType(), LANES), align), VECTOR)
        assert dtype == torch.bfloat16, dtype
        wide = self.builder.zext(self.load(address, ir.VectorType(I16, LANES), align), INTEGERS)
        return self.builder.bitcast(self.builder.shl(wide, self.integers(16)), VECTOR)

    def halves(self, words: Value) -> tuple[Value, Value]:
        """The lower and the upper bf16 of each word of 32 bits, as f32."""
        builder = self.builder
        lower = builder.shl(words, self.integers(16))
        upper = builder.and_(words, self.integers(0xFFFF0000))
        return builder.bitcast(lower, VECTOR), builder.bitcast(upper, VECTOR)

    def rounded(self, vector: Value, dtype: torch.dtype) -> Value:
        """To the nearest number of `dtype`, still as f32."""
        builder = self.builder
        if dtype == torch.float16:
            return builder.fpext(builder.fptrunc(vector, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
        if dtype == torch.float32:
            return vector
        assert dtype == torch.bfloat16, dtype
        bits = builder.bitcast(vector, INTEGERS)
        odd = builder.and_(builder.lshr(bits, self.integers(16)), self.integers(1))
        bits = builder.and_(
            builder.add(builder.add(bits, self.integers(0x7FFF)), odd), self.integers(0xFFFF0000)
        )
        no_number = builder.fcmp_unordered("uno", vector, vector)
        return builder.bitcast(builder.select(no_number, self.integers(0x7FC00000), bits), VECTOR)

    def store_narrow(self, vector: Value, address: Value, dtype: torch.dtype) -> None:
        """`vector` holds numbers of `dtype` (`rounded`)."""
        builder = self.builder
        if dtype == torch.float16:
            vector = builder.fptrunc(vector, ir.VectorType(ir.HalfType(), LANES))
        elif dtype == torch.bfloat16:
            bits = builder.lshr(builder.bitcast(vector, INTEGERS), self.integers(16))
            vector = builder.trunc(bits, ir.VectorType(I16, LANES))
        self.store(vector, address)

    def store_rounded(self, vector: Value, address: Value, dtype: torch.dtype) -> None:
        self.store_narrow(self.rounded(vector, dtype), address, dtype)

    def exponential(self, x: Value) -> Value:
        """e ** x of a vector, where x is from -87 to 88; beyond, that of the nearest; of no number, none. Within 1.3
        units in the last place. Source: Cephes, expf.
        """
        builder = self.builder
        for limit, beyond in ((-87.0, "<"), (88.0, ">")):
            end = self.constant(limit)
            x = builder.select(builder.fcmp_ordered(beyond, x, end), end, x)
        # So large a number has no room for a fraction, and ends with the whole one in its bits.
        large = self.constant(1.5 * 2**23)
        shifted = self.fma(x, self.constant(1.4426950408889634), large)
        whole = builder.fsub(shifted, large)
        rest = self.fma(whole, self.constant(-0.693359375), x)
        rest = self.fma(whole, self.constant(2.12194440e-4), rest)
        series = self.constant(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            series = self.fma(series, rest, self.constant(factor))
        made = self.fma(series, builder.fmul(rest, rest), builder.fadd(rest, self.constant(1.0)))
        exponent = builder.add(builder.bitcast(shifted, INTEGERS), self.integers(127))
        power = builder.bitcast(builder.shl(exponent, self.integers(23)), VECTOR)
        return builder.fmul(made, power)

    def logarithm(self, x: Value) -> Value:
        """The natural one of one f32 of at least 1, within a unit in the last place. Source: Cephes, logf."""
        builder = self.builder

        def single(value: float) -> Value:
            return ir.Constant(F32, _single(value))

        bits = builder.bitcast(x, I32)
        exponent = builder.sub(builder.lshr(bits, ir.Constant(I32, 23)), ir.Constant(I32, 126))
        fraction = builder.or_(builder.and_(bits, ir.Constant(I32, 0x007FFFFF)), ir.Constant(I32, 126 << 23))
        part = builder.bitcast(fraction, F32)
        # From 0.5 up to 1: below the root of one half, twice as much and an exponent less.
        small = builder.fcmp_ordered("<", part, single(0.707106781186547524))
        power = builder.sitofp(builder.sub(exponent, builder.zext(small, I32)), F32)
        part = builder.select(small, builder.fadd(part, part), part)
        part = builder.fsub(part, single(1.0))
        square = builder.fmul(part, part)
        series = single(7.0376836292e-2)
        for factor in (
            -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
            -2.4999993993e-1, 3.3333331174e-1,
        ):  # fmt: skip
            series = self.fma(series, part, single(factor))
        made = builder.fmul(builder.fmul(series, part), square)
        made = self.fma(power, single(-2.12194440e-4), made)
        made = self.fma(square, single(-0.5), made)
        return self.fma(power, single(0.693359375), builder.fadd(part, made))

    def ended(self) -> Code:
        self.builder.ret_void()
        return self


def bits_of(value: float) -> int:
    """Those of `value` as f32: an argument of a kernel."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value


def _single(value: float) -> float:
    """Rounded to f32, as a constant has to be."""
    return ctypes.c_float(value).value


def where_possible(head_dim: int, make: Callable[[], _Kernel]) -> _Kernel | None:
    """None where heads are no whole vectors, and where nothing can be compiled."""
    if head_dim % LANES:
        return None
    try:
        return make()
    except KernelUnavailable:
        return None


class Compiled:
    """Functions of a module, by name. Raises `KernelUnavailable`."""

    def __init__(self, module: ir.Module | str) -> None:
        features = llvm.get_host_cpu_features()
        # Without the instruction each multiply-add would be a call.
        if features.get("fma") is False:
            raise KernelUnavailable("the CPU has no fused multiply-add")
        try:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_default_triple().create_target_machine(
                cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
            )
            parsed = llvm.parse_assembly(str(module))
            parsed.verify()
            self._engine = llvm.create_mcjit_compiler(parsed, machine)
            self._engine.finalize_object()
        except (RuntimeError, OSError) as error:
            raise KernelUnavailable(f"LLVM does not compile here: {' '.join(str(error).split())}") from None

    def function(self, code: Code) -> Callable[..., None]:
        """Called with numbers; what lies at addresses has to live as long as the call. Other threads of Python run
        meanwhile.
        """
        made: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(code.given))(self.address(code))
        # The code lives as long as this object.
        made.compiled = self
        compiled: Callable[..., None] = made
        return compiled

    def address(self, code: Code) -> int:
        """The code lives as long as this object, or a function of it."""
        found: int = self._engine.get_function_address(code.function.name)
        return found
