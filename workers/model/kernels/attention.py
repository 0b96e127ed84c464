"""Attention of single queries, as compiled kernels: the states over segments of a paged cache, and their merging.

One call computes a whole layer of a step. Keys come from memory once, those of a few tokens for all heads, and the
values of these tokens are asked for meanwhile. Each state has sums of its own, in one order, whatever is computed
beside it and wherever its blocks lie. Source of states and of their merging: `attention.states`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
from llvmlite import ir

from halfmoon.workers.model.kernels.code import (
    F32,
    I64,
    INTEGERS,
    LANES,
    LINE_BYTES,
    VECTOR,
    Code,
    Compiled,
    Value,
    bits_of,
    where_possible,
)
from halfmoon.workers.model.kernels.tiles import Words, registers
from halfmoon.workers.model.kernels.weights import weigh

Tensor = torch.Tensor


class _AtOnce(NamedTuple):
    members: int
    vectors: int


_SUMS_AT_ONCE = {16: _AtOnce(2, 2), 32: _AtOnce(6, 4)}
"""By the CPU's registers: of how many heads, and how many vectors of each, sums stay there while the values go by."""


class StateKernel:
    """The states of queries, one of each sequence, over segments of a cache of `dtype`. `group`: queries a KV head."""

    def __init__(self, dtype: torch.dtype, head_dim: int, group: int) -> None:
        module = ir.Module()
        dot = _Dot(dtype, head_dim)
        code = _states_code(module, dot, head_dim, group)
        self._q_dtype = dot.q_dtype
        self._run, self._scale = Compiled(module).function(code), bits_of(head_dim**-0.5)

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tasks: StateTasks, out: Tensor, lse: Tensor
    ) -> None:
        """`q` `[rows, heads, head_dim]`, one layer of a cache, `[num_blocks, block_tokens, kv_heads, head_dim]` each.
        Writes each task's state at its place: `out` f32 `[places, heads, head_dim]`, rounded to the dtype of the cache,
        and `lse` f32 `[places, heads]`.
        """
        q, heads = _by_rows(q, self._q_dtype), q.shape[1]
        _, block_tokens, kv_heads, _ = k_cache.shape
        block, token = (k_cache.stride(i) * k_cache.itemsize for i in (0, 1))
        scores = tasks.scores(heads)
        self._run(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), tasks.tasks.data_ptr(), tasks.blocks.data_ptr(),
            scores.data_ptr(), out.data_ptr(), lse.data_ptr(), q.itemsize * q.stride(0), block, token, block_tokens,
            kv_heads, 4 * scores.stride(0), len(tasks.tasks), self._scale,
        )  # fmt: skip


class StateTasks:
    """The tasks of a step, in each layer."""

    def __init__(self, tasks: Sequence[tuple[int, int, int, int]], blocks: Sequence[int]) -> None:
        """Each task is (row of the queries, place of its state, tokens, first of its blocks among `blocks`)."""
        self.tasks, self.blocks = (
            torch.tensor(tasks, dtype=torch.int64),
            torch.tensor(blocks, dtype=torch.int64),
        )
        self._longest = max(tokens for _, _, tokens, _ in tasks)
        self._scores: Tensor | None = None

    def scores(self, heads: int) -> Tensor:
        """Room for those of one task: a vector more than its tokens."""
        if self._scores is None:
            self._scores = torch.empty(heads, self._longest + LANES)
        return self._scores


class MergeKernel:
    """Merges the states over a row's past with the one over its own keys. All are f32: a row's past is `out`
    `[parts, rows, heads, head_dim]` and `lse` `[parts, rows, heads]`, in order, and the result is
    `[rows, heads, head_dim]`.
    """

    def __init__(self, head_dim: int) -> None:
        module = ir.Module()
        codes = [_merge_code(module, head_dim, own) for own in (_OwnToken, _OwnState)]
        self._of_tokens, self._of_states = map(Compiled(module).function, codes)
        self._scale = bits_of(head_dim**-0.5)

    def with_states(self, own_out: Tensor, own_lse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """The own keys' state is `own_out` `[rows, heads, head_dim]` and `own_lse` `[rows, heads]`."""
        made = torch.empty(own_out.shape)
        parts, rows, heads = lse.shape
        self._of_states(
            own_out.data_ptr(), own_lse.data_ptr(), out.data_ptr(), lse.data_ptr(), made.data_ptr(), rows, parts, heads
        )  # fmt: skip
        return made

    def with_tokens(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """The own keys and values are those of one token of each row, `[rows, kv_heads, head_dim]`."""
        q, k, v = _by_rows(q), _by_rows(k), _by_rows(v)
        rows, heads, _ = q.shape
        kv_heads = k.shape[1]
        made = torch.empty(q.shape)
        self._of_tokens(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), made.data_ptr(), rows, len(lse),
            heads, 4 * q.stride(0), 4 * k.stride(0), 4 * v.stride(0), heads // kv_heads, self._scale,
        )  # fmt: skip
        return made


@cache
def state_kernel(dtype: torch.dtype, head_dim: int, group: int) -> StateKernel | None:
    return where_possible(head_dim, lambda: StateKernel(dtype, head_dim, group))


@cache
def merge_kernel(head_dim: int) -> MergeKernel | None:
    return where_possible(head_dim, lambda: MergeKernel(head_dim))


def _by_rows(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Each row in one run of memory."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class _Dot:
    """Writes the code of products of a query and keys."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        self.dtype, self._vectors = dtype, head_dim // LANES
        #: Of pairs, as products of weights are: a vector holds two vectors' dimensions.
        self.by_words = dtype == torch.bfloat16 and self._vectors % 2 == 0
        self._words = Words(dtype)
        self.q_dtype = dtype if self.by_words else torch.float32

    def factors(self, code: Code, address: Value, dtype: torch.dtype) -> list[Value]:
        """All dimensions of one query or key."""
        if not self.by_words:
            skips = range(0, self._vectors * LANES * dtype.itemsize, LANES * dtype.itemsize)
            return [code.widened(code.at(address, skip), dtype) for skip in skips]
        addresses = [code.at(address, LINE_BYTES * i) for i in range(self._vectors // 2)]
        return [each for at in addresses for _, (each,) in self._words.factors(code, [at], align=2)]

    def of(self, code: Code, query: list[Value], key: Value) -> Value:
        """In all lanes together."""
        total = code.constant(0.0)
        for a, b in zip(query, self.factors(code, key, self.dtype), strict=True):
            total = self._words.added(code, a, b, total) if self.by_words else code.fma(a, b, total)
        return total


def _states_code(module: ir.Module, dot: _Dot, head_dim: int, group: int) -> Code:
    """`_row`, `block`, `token`: bytes from one to the next."""
    addresses = ("q", "k", "v", "tasks", "blocks", "scores", "out", "lse")
    numbers = ("q_row", "block", "token", "block_tokens", "kv_heads", "scores_row", "tasks_number", "scale")
    code = Code(module, "states", addresses, numbers)

    def task(index: Value) -> None:
        one = _Task(code, dot, head_dim, group, index)
        one.score()
        code.each(code.given["kv_heads"], one.attend)

    code.each(code.given["tasks_number"], task)
    return code.ended()


class _Task:
    """Writes the code of one task."""

    def __init__(self, code: Code, dot: _Dot, head_dim: int, group: int, index: Value) -> None:
        self.code, self.given, self.head_dim, self.group = code, code.given, head_dim, group
        self.dot, self.dtype = dot, dot.dtype
        self.head_bytes, self.vector_bytes = head_dim * self.dtype.itemsize, LANES * self.dtype.itemsize
        told = code.at(self.given["tasks"], code.multiply(index, 32))
        row, place, self.tokens, first = (code.load(code.at(told, 8 * i), I64) for i in range(4))
        self.q = code.at(self.given["q"], code.multiply(row, self.given["q_row"]))
        self.blocks = code.at(self.given["blocks"], code.multiply(first, 8))
        self.first_state = code.multiply(code.multiply(place, self.given["kv_heads"]), group)

    def over_blocks(
        self, begin: list[Value], visit: Callable[[Value, Value, Value, list[Value]], Sequence[Value]]
    ) -> list[Value]:
        """`visit(first token, tokens, bytes from the beginning of the cache, values)` of each block."""
        code, builder, size = self.code, self.code.builder, self.given["block_tokens"]

        def block(number: Value, values: list[Value]) -> Sequence[Value]:
            start = code.multiply(number, size)
            left = builder.sub(self.tokens, start)
            here = code.smaller(left, size)
            found = code.load(code.at(self.blocks, code.multiply(number, 8)), I64)
            return visit(start, here, code.multiply(found, self.given["block"]), values)

        return code.loop(code.divided_up(self.tokens, size), begin, block)

    def head_of(self, kv_head: Value, member: Value | int) -> Value:
        return self.code.add(self.code.multiply(kv_head, self.group), member)

    def scores_of(self, head: Value) -> Value:
        return self.code.at(self.given["scores"], self.code.multiply(head, self.given["scores_row"]))

    def score(self) -> None:
        """`LANES` tokens at once, by all heads."""
        code, builder = self.code, self.code.builder

        def block(start: Value, here: Value, base: Value, _: list[Value]) -> Sequence[Value]:
            last = builder.sub(here, code.number(1))

            def some(number: Value) -> None:
                first, offsets = code.multiply(number, LANES), []
                for lane in range(LANES):
                    # Beyond the last one of a block, what is written is written again.
                    token = code.smaller(code.add(first, lane), last)
                    offsets.append(code.add(base, code.multiply(token, self.given["token"])))
                self.score_some(code.add(start, first), offsets)

            code.each(code.divided_up(here, LANES), some)
            return ()

        self.over_blocks([], block)

    def score_some(self, first: Value, offsets: list[Value]) -> None:
        """The tokens at `offsets`, whose values are asked for."""
        code, given, column = self.code, self.given, self.code.multiply(first, 4)

        def kv_head(number: Value) -> None:
            part = code.multiply(number, self.head_bytes)
            for offset in offsets:
                for line in range(0, self.head_bytes, LINE_BYTES):
                    code.prefetch(code.at(given["v"], offset, part, line))
            keys = [code.at(given["k"], offset, part) for offset in offsets]

            def query(member: Value) -> None:
                head = self.head_of(number, member)
                q = code.at(self.q, code.multiply(head, self.head_dim * self.dot.q_dtype.itemsize))
                factors = self.dot.factors(code, q, self.dot.q_dtype)
                found = code.summed_each([partial(self.dot.of, code, factors, key) for key in keys])
                code.store(found, code.at(self.scores_of(head), column))

            code.each(code.number(self.group), query)

        code.each(given["kv_heads"], kv_head)

    def weigh(self, head: Value) -> Value:
        """Writes the log-sum-exp of the head's scores, which become weights; returns their sum."""
        code, vectors = self.code, self.code.divided_up(self.tokens, LANES)
        total, lse = weigh(code, self.scores_of(head), self.tokens, vectors)
        state = code.add(self.first_state, head)
        code.store(lse, code.at(self.given["lse"], code.multiply(state, 4)))
        return total

    def attend(self, kv_head: Value) -> None:
        """The sums of values by weight, for the queries of one KV head."""
        heads = [self.head_of(kv_head, member) for member in range(self.group)]
        totals = [self.code.splat(self.weigh(head)) for head in heads]
        at_once, vectors = _SUMS_AT_ONCE[registers()], range(self.head_dim // LANES)
        for first in range(0, self.group, at_once.members):
            some = slice(first, first + at_once.members)
            for start in vectors[:: at_once.vectors]:
                self.add_up(kv_head, heads[some], totals[some], vectors[start : start + at_once.vectors])

    def add_up(self, kv_head: Value, heads: list[Value], totals: list[Value], which: range) -> None:
        """The vectors `which` of some heads' sums."""
        code, given = self.code, self.given
        part = code.multiply(kv_head, self.head_bytes)
        scores = [self.scores_of(head) for head in heads]

        def block(start: Value, here: Value, base: Value, sums: list[Value]) -> Sequence[Value]:
            def token(index: Value, sums: list[Value]) -> Sequence[Value]:
                value = code.at(given["v"], code.add(base, code.multiply(index, given["token"])), part)
                terms = self.values(value, which)
                column = code.multiply(code.add(start, index), 4)
                weights = [code.splat(code.load(code.at(each, column), F32)) for each in scores]
                factors = product(weights, terms)
                return [code.fma(*each, so_far) for each, so_far in zip(factors, sums, strict=True)]

            return code.loop(here, sums, token)

        size = len(which)
        sums = self.over_blocks([code.constant(0.0)] * (len(heads) * size), block)
        for member, (head, total) in enumerate(zip(heads, totals, strict=True)):
            out = code.at(given["out"], code.multiply(code.add(self.first_state, head), 4 * self.head_dim))
            made = [code.builder.fdiv(each, total) for each in sums[member * size : (member + 1) * size]]
            if self.dot.by_words:
                made = [
                    each
                    for pair in zip(made[::2], made[1::2], strict=True)
                    for each in code.interleaved(*pair)
                ]
            for i, each in zip(which, made, strict=True):
                # As a state is sent from elsewhere.
                code.store(code.rounded(each, self.dtype), code.at(out, LINE_BYTES * i))

    def values(self, address: Value, which: range) -> list[Value]:
        """Some vectors of one value. By words, those of even and of odd dimensions take turns."""
        code = self.code
        addresses = [code.at(address, self.vector_bytes * i) for i in which]
        if not self.dot.by_words:
            return [code.widened(each, self.dtype) for each in addresses]
        return [half for each in addresses[::2] for half in code.halves(code.load(each, INTEGERS, 2))]


class _OwnToken:
    """Writes the code of the state over a row's own token."""

    name, addresses, numbers = "merge_tokens", ("q", "k", "v"), ("q_row", "k_row", "v_row", "group", "scale")

    def __init__(self, code: Code, head_dim: int, row: Value, head: Value, place: Value) -> None:
        """`place`: of the row's and head's state among those of a part."""
        given = code.given
        q, k, v = (code.at(given[name], code.multiply(row, given[f"{name}_row"])) for name in "qkv")
        part = code.multiply(code.builder.udiv(head, given["group"]), 4 * head_dim)
        dot = _Dot(torch.float32, head_dim)
        query = dot.factors(code, code.at(q, code.multiply(head, 4 * head_dim)), torch.float32)
        found = code.summed(dot.of(code, query, code.at(k, part)))
        self.lse = code.builder.fmul(found, code.single(given["scale"]))
        self.out = code.at(v, part)


class _OwnState:
    """Reads the state over a row's own keys."""

    name, addresses, numbers = "merge_states", ("own_out", "own_lse"), ()

    def __init__(self, code: Code, head_dim: int, row: Value, head: Value, place: Value) -> None:
        self.lse = code.load(code.at(code.given["own_lse"], code.multiply(place, 4)), F32)
        self.out = code.at(code.given["own_out"], code.multiply(place, 4 * head_dim))


def _merge_code(module: ir.Module, head_dim: int, own_of: type[_OwnToken | _OwnState]) -> Code:
    addresses = (*own_of.addresses, "states", "lse", "out")
    code = Code(module, own_of.name, addresses, ("rows", "parts", "heads", *own_of.numbers))
    builder, given = code.builder, code.given
    parts, heads, skips = given["parts"], given["heads"], range(0, 4 * head_dim, LINE_BYTES)
    part_states = code.multiply(given["rows"], heads)
    nothing = ir.Constant(F32, float("-inf"))

    def row(index: Value) -> None:
        def head(number: Value) -> None:
            first = code.add(code.multiply(index, heads), number)
            own = own_of(code, head_dim, index, number, first)

            def state_of(part: Value) -> Value:
                return code.add(code.multiply(part, part_states), first)

            def lse_of(part: Value) -> Value:
                return code.load(code.at(given["lse"], code.multiply(state_of(part), 4)), F32)

            (top,) = code.loop(parts, [own.lse], lambda part, tops: [code.larger(lse_of(part), tops[0])])

            def weight_of(lse: Value) -> Value:
                """The same in all lanes; none of a state over no keys."""
                weight = code.exponential(code.splat(builder.fsub(lse, top)))
                none = builder.fcmp_ordered("==", lse, nothing)
                return builder.select(none, code.constant(0.0), weight)

            own_weight = weight_of(own.lse)
            (total,) = code.loop(
                parts, [own_weight], lambda part, totals: [builder.fadd(totals[0], weight_of(lse_of(part)))]
            )
            share = builder.fdiv(own_weight, total)
            begin = [builder.fmul(share, code.load(code.at(own.out, skip), VECTOR)) for skip in skips]

            def add(part: Value, sums: list[Value]) -> list[Value]:
                share = builder.fdiv(weight_of(lse_of(part)), total)
                state = code.at(given["states"], code.multiply(state_of(part), 4 * head_dim))
                return [
                    code.fma(share, code.load(code.at(state, skip), share.type), so_far)
                    for skip, so_far in zip(skips, sums, strict=True)
                ]

            # Zero is added because that turns -0 into 0, which a part without keys would do to some batches only.
            begin = [builder.fadd(each, code.constant(0.0)) for each in begin]
            for skip, found in zip(skips, code.loop(parts, begin, add), strict=True):
                code.store(found, code.at(given["out"], code.multiply(first, 4 * head_dim), skip))

        code.each(heads, head)

    code.each(given["rows"], row)
    return code.ended()
