"""Attention of a chunk's queries, as a compiled kernel: their states over one run of keys.

Scores are products of the queries with packed keys, and sums are products of the weights with packed values, both in
`tiles`. Between them each row's scores become weights, with one maximum over all of its keys. A block of rows goes
through all three while its scores are in the second cache. So a row's state has one order of additions, and its bits
depend on its query and its keys alone. Source of states: `attention.states`; of blocks that stay in the cache:
FlashAttention (arXiv 2205.14135), section 3.1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import torch
from llvmlite import ir

from halfmoon.workers.model.kernels.code import (
    F32,
    I16,
    I32,
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
from halfmoon.workers.model.kernels.threads import OF_WORK, SharedWork, threads_for
from halfmoon.workers.model.kernels.tiles import Words, pack_code, panels_code
from halfmoon.workers.model.kernels.weights import weigh

Tensor = torch.Tensor

_BLOCK_ROWS = 54
"""Whole tiles of any table."""
_BLOCK_KEYS = 1024
"""So many scores of a block's rows stay in the second cache, with the keys or the values. Beyond, it has fewer rows."""
_BLOCK_ROWS_MIN = 18
_KEPT_BYTES_MAX = 16 << 20
"""Of a thread's memory. What is larger is given back: many keys take long enough beside it."""

_PACKED = ("k", "v", "keys_at", "values_at")
_PACKED_NUMBERS = ("k_token", "k_head", "v_token", "v_head", "keys", "panels")
_ATTENDED = ("q", "keys_at", "values_at", "seen", "zeros", "scratch", "out", "lse")
_ATTENDED_NUMBERS = (
    "panels", "rows", "group", "heads", "block_rows", "blocks", "scores_row", "scratch_bytes", "scale"
)  # fmt: skip


class _Rooms(threading.local):
    """Memory of each thread, used again: fresh pages take a tenth of the time of the work that is done in them."""

    _kept = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        if size <= len(self._kept):
            return self._kept
        room = torch.empty(size, dtype=torch.uint8)
        if size <= _KEPT_BYTES_MAX:
            self._kept = room
        return room


class ChunkKernel:
    """For keys and values of `dtype`. Raises `KernelUnavailable`."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        self._words = words = Words(dtype)
        self._head_dim, self._rooms = head_dim, _Rooms()
        module = ir.Module()
        pack = SharedWork(module, _pack(module, words, head_dim), _PACKED, _PACKED_NUMBERS)
        attend = SharedWork(module, _attend(module, words, head_dim), _ATTENDED, _ATTENDED_NUMBERS)
        compiled = Compiled(module)
        self._pack, self._attend = pack.compiled(compiled), attend.compiled(compiled)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, out: Tensor, lse: Tensor) -> None:
        """Writes the states of `q` `[rows, heads, head_dim]` over `k` and `v` `[keys, kv_heads, head_dim]`: `out` like
        q in f32, rounded to the dtype of the keys, and `lse` f32 `[rows, heads]`. `seen`, int64 `[rows]` and ascending:
        each row sees so many of the first keys, one at least.
        """
        words, (rows, heads, head_dim), (keys, kv_heads, _) = self._words, q.shape, k.shape
        assert (head_dim, k.dtype, v.dtype) == (self._head_dim, words.dtype, words.dtype), (q.shape, k.dtype)
        k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (k, v))
        panels, group = -(-keys // LANES), heads // kv_heads
        threads = threads_for(rows * heads * keys * head_dim)
        block_rows = max(_BLOCK_ROWS_MIN, min(_BLOCK_ROWS, _BLOCK_ROWS * _BLOCK_KEYS // keys))
        blocks = -(-rows * group // block_rows)
        # Rows that lie a page apart would push each other out of the first cache: an odd number of lines.
        scores_row = (panels | 1) * LINE_BYTES
        scratch_bytes = block_rows * (scores_row + 4 * head_dim + LINE_BYTES)
        packed_bytes = kv_heads * panels * LANES * head_dim * words.dtype.itemsize
        room = self._rooms.of(2 * packed_bytes + threads * scratch_bytes)
        keys_at, values_at, scratch = (room.data_ptr() + i * packed_bytes for i in range(3))
        strides = (each.stride(i) * each.itemsize for each in (k, v) for i in (0, 1))
        self._pack(
            threads, k.data_ptr(), v.data_ptr(), keys_at, values_at, *strides, keys, panels, kv_heads * panels
        )
        by_head = q.reshape(rows, kv_heads, group, head_dim).transpose(0, 1).to(words.dtype)
        by_head = by_head.to(words.x_dtype).contiguous()
        zeros = torch.zeros(max(panels * LANES, head_dim))
        self._attend(
            threads, by_head.data_ptr(), keys_at, values_at, seen.data_ptr(), zeros.data_ptr(), scratch,
            out.data_ptr(), lse.data_ptr(), panels, rows * group, group, heads, block_rows, blocks, scores_row,
            scratch_bytes, bits_of(head_dim**-0.5), kv_heads * blocks,
        )  # fmt: skip


@cache
def chunk_kernel(dtype: torch.dtype, head_dim: int) -> ChunkKernel | None:
    return where_possible(head_dim, lambda: ChunkKernel(dtype, head_dim))


def _each_unit(code: Code, body: Callable[[Value], None]) -> None:
    first = code.given["first"]
    code.each(code.builder.sub(code.given["end"], first), lambda index: body(code.add(first, index)))


def _pack(module: ir.Module, words: Words, head_dim: int) -> Code:
    """Keys into panels of `LANES` keys, whose inputs are dimensions; values into panels of `LANES` dimensions, whose
    inputs are keys. A unit is one panel of keys of one head. Behind the last key lie others like it.
    """
    pack = pack_code(module, words)
    code = Code(module, "pack_keys", _PACKED, (*_PACKED_NUMBERS, *OF_WORK), internal=True)
    builder, given = code.builder, code.given
    key_bytes, steps = head_dim // words.inputs * words.vector_bytes, LANES // words.inputs

    def unit(number: Value) -> None:
        head, panel = builder.udiv(number, given["panels"]), builder.urem(number, given["panels"])
        first = code.multiply(panel, LANES)
        left = builder.sub(given["keys"], first)
        k = code.at(given["k"], code.multiply(head, given["k_head"]), code.multiply(first, given["k_token"]))
        out = code.at(given["keys_at"], code.multiply(number, key_bytes))
        told = {"from": k, "out": out, "row": given["k_token"], "rows": left}
        code.run(pack, {**told, "steps": code.number(head_dim // words.inputs)})
        v = code.at(given["v"], code.multiply(head, given["v_head"]))

        def step(index: Value) -> None:
            tokens = [
                code.add(code.add(first, code.multiply(index, words.inputs)), i) for i in range(words.inputs)
            ]
            last = builder.sub(given["keys"], code.number(1))
            rows = [
                code.at(v, code.multiply(code.smaller(token, last), given["v_token"])) for token in tokens
            ]
            for dims in range(head_dim // LANES):
                place = code.add(code.multiply(head, head_dim // LANES), dims)
                place = code.add(
                    code.multiply(code.add(code.multiply(place, given["panels"]), panel), steps), index
                )
                out = code.at(given["values_at"], code.multiply(place, words.vector_bytes))
                code.store(
                    _word(code, [code.at(row, dims * LANES * words.dtype.itemsize) for row in rows], words),
                    out,
                )

        code.each(code.number(steps), step)

    _each_unit(code, unit)
    return code.ended()


def _word(code: Code, rows: list[Value], words: Words) -> Value:
    """Those of `LANES` dimensions, from each of the rows."""
    kind = I16 if words.dtype.itemsize == 2 else I32
    loaded = [code.load(row, ir.VectorType(kind, LANES), words.dtype.itemsize) for row in rows]
    if len(loaded) == 1:
        return loaded[0]
    lower, upper = (code.builder.zext(each, INTEGERS) for each in loaded)
    return code.builder.or_(lower, code.builder.shl(upper, code.integers(16)))


def _attend(module: ir.Module, words: Words, head_dim: int) -> Code:
    """A unit is one block of rows of one KV head: the rows of its queries' heads, token by token."""
    panels = panels_code(module, words)
    code = Code(module, "attend", _ATTENDED, (*_ATTENDED_NUMBERS, *OF_WORK), internal=True)

    def unit(number: Value) -> None:
        block = _RowBlock(code, words, head_dim, number)
        block.multiply(panels, **block.keys(), out=block.scores, out_row=code.given["scores_row"])
        code.each(block.rows, block.weigh)
        block.multiply(panels, **block.values(), out=block.sums, out_row=code.number(4 * head_dim))
        code.each(block.rows, block.finish)

    _each_unit(code, unit)
    return code.ended()


class _RowBlock:
    """Writes the code of one unit."""

    def __init__(self, code: Code, words: Words, head_dim: int, number: Value) -> None:
        self.code, self.given, self.words, self.head_dim = code, code.given, words, head_dim
        builder, given = code.builder, code.given
        self.head, block = builder.udiv(number, given["blocks"]), builder.urem(number, given["blocks"])
        self.first = code.multiply(block, given["block_rows"])
        self.rows = code.smaller(builder.sub(given["rows"], self.first), given["block_rows"])
        self.seen_keys = self.seen(builder.sub(code.add(self.first, self.rows), code.number(1)))
        self.scores = code.at(given["scratch"], code.multiply(given["thread"], given["scratch_bytes"]))
        self.sums = code.at(self.scores, code.multiply(given["block_rows"], given["scores_row"]))
        self.totals = code.at(self.sums, code.multiply(given["block_rows"], 4 * head_dim))

    def token(self, row: Value) -> Value:
        return self.code.builder.udiv(row, self.given["group"])

    def seen(self, row: Value) -> Value:
        """How many keys: no fewer than by a row before."""
        return self.code.load(self.code.at(self.given["seen"], self.code.multiply(self.token(row), 8)), I64)

    def place(self, index: Value) -> Value:
        """Where the state of the block's row stands."""
        code, row = self.code, self.code.add(self.first, index)
        member = code.builder.urem(row, self.given["group"])
        first = code.add(
            code.multiply(self.token(row), self.given["heads"]), code.multiply(self.head, self.given["group"])
        )
        return code.add(first, member)

    def multiply(self, panels: Code, **told: Value) -> None:
        none = self.code.number(0)
        self.code.run(panels, {"bias": self.given["zeros"], "first": none, "rows": self.rows, **told})

    def keys(self) -> dict[str, Value]:
        """The product of queries and keys."""
        code, given, steps = self.code, self.given, self.head_dim // self.words.inputs
        row, panel = steps * self.words.x_bytes, steps * self.words.vector_bytes
        before = code.add(code.multiply(self.head, given["rows"]), self.first)
        return {
            "x": code.at(given["q"], code.multiply(before, row)),
            "weights": code.at(
                given["keys_at"], code.multiply(code.multiply(self.head, given["panels"]), panel)
            ),
            "x_row": code.number(row),
            "panel": code.number(panel),
            "steps": code.number(steps),
            "end": code.divided_up(self.seen_keys, LANES),
        }

    def values(self) -> dict[str, Value]:
        """The product of weights and values."""
        code, given, dims = self.code, self.given, self.head_dim // LANES
        panel = code.multiply(given["panels"], LANES // self.words.inputs * self.words.vector_bytes)
        return {
            "x": self.scores,
            "weights": code.at(given["values_at"], code.multiply(code.multiply(self.head, panel), dims)),
            "x_row": given["scores_row"],
            "panel": panel,
            "steps": code.divided_up(self.seen_keys, self.words.inputs),
            "end": code.number(dims),
        }

    def weigh(self, index: Value) -> None:
        code = self.code
        scores = code.at(self.scores, code.multiply(index, self.given["scores_row"]))
        seen, vectors = self.seen(code.add(self.first, index)), code.divided_up(self.seen_keys, LANES)
        total, lse = weigh(code, scores, seen, vectors, rounded=self.words.dtype, stored=self.words.x_dtype)
        code.store(total, code.at(self.totals, code.multiply(index, 4)))
        code.store(lse, code.at(self.given["lse"], code.multiply(self.place(index), 4)))

    def finish(self, index: Value) -> None:
        code = self.code
        total = code.splat(code.load(code.at(self.totals, code.multiply(index, 4)), F32))
        row = code.at(self.sums, code.multiply(index, 4 * self.head_dim))
        out = code.at(self.given["out"], code.multiply(self.place(index), 4 * self.head_dim))
        for i in range(self.head_dim // LANES):
            made = code.builder.fdiv(code.load(code.at(row, LINE_BYTES * i), VECTOR), total)
            code.store(code.rounded(made, self.words.dtype), code.at(out, LINE_BYTES * i))
