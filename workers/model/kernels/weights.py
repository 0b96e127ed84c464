"""Scores of a row become its weights: a part of the kernels of attention."""

from __future__ import annotations

import torch
from llvmlite import ir

from halfmoon.workers.model.kernels.code import I32, INTEGERS, LANES, LINE_BYTES, VECTOR, Code, Value


def weigh(
    code: Code,
    scores: Value,
    seen: Value,
    vectors: Value,
    *,
    rounded: torch.dtype = torch.float32,
    stored: torch.dtype = torch.float32,
) -> tuple[Value, Value]:
    """The first `seen` scores at an address, f32, become weights that are not normalised, `rounded` to a dtype and
    `stored` as one, where the scores were; the others of `vectors` become 0. Scores are scaled by `scale` of what the
    code is given. Returns the sum of the weights before they are rounded, and the log-sum-exp.
    """
    builder, scale = code.builder, code.single(code.given["scale"])
    whole, low = builder.udiv(seen, code.number(LANES)), code.constant(float("-inf"))
    lanes = ir.Constant(INTEGERS, [*range(LANES)])

    def score(index: Value) -> Value:
        return code.load(code.at(scores, code.multiply(index, LINE_BYTES)), VECTOR)

    def visible(index: Value) -> Value:
        left = builder.trunc(builder.sub(seen, code.multiply(index, LANES)), I32)
        return builder.icmp_signed("<", lanes, code.splat(left))

    def larger(index: Value, tops: list[Value]) -> list[Value]:
        return [code.larger(score(index), tops[0])]

    def larger_seen(index: Value, tops: list[Value]) -> list[Value]:
        index = code.add(whole, index)
        return [code.larger(builder.select(visible(index), score(index), low), tops[0])]

    rest = builder.sub(vectors, whole)
    tops = code.loop(rest, code.loop(whole, [low], larger), larger_seen)
    top = builder.fmul(code.folded(tops[0], code.larger), scale)
    scales, less = code.splat(scale), code.splat(builder.fneg(top))

    def weight(index: Value) -> Value:
        return code.exponential(code.fma(score(index), scales, less))

    def keep(index: Value, made: Value) -> None:
        out = code.at(scores, code.multiply(index, LANES * stored.itemsize))
        code.store_narrow(code.rounded(made, rounded), out, stored)

    def weigh_whole(index: Value, totals: list[Value]) -> list[Value]:
        made = weight(index)
        keep(index, made)
        return [builder.fadd(totals[0], made)]

    def weigh_seen(index: Value, totals: list[Value]) -> list[Value]:
        index = code.add(whole, index)
        made = builder.select(visible(index), weight(index), code.constant(0.0))
        keep(index, made)
        return [builder.fadd(totals[0], made)]

    totals = code.loop(rest, code.loop(whole, [code.constant(0.0)], weigh_whole), weigh_seen)
    total = code.summed(totals[0])
    return total, builder.fadd(top, code.logarithm(total))
