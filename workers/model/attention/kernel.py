"""Attention over the paged cache: one interface, its implementations for any device and for flash-attn.

Shapes. `q` is `[rows, heads, head_dim]`, `k_cache` and `v_cache` one layer of the cache,
`[num_blocks, block_tokens, kv_heads, head_dim]`. Queries are the last tokens of their sequence and their own keys are
in the cache already. A `Plan` is made once a step, and used by every layer of it.

Attention over some of the keys only is a `Partial` (`states`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch

from halfmoon.workers.model.attention.states import Partial, StateStack, merge, neutral
from halfmoon.workers.model.kernels.attention import StateKernel, StateTasks, state_kernel
from halfmoon.workers.model.kernels.chunk_attention import ChunkKernel, chunk_kernel
from halfmoon.workers.model.segments import AWAY

Tensor = torch.Tensor


class LayerCache(NamedTuple):
    """Keys and values of one layer of a paged cache, each `[num_blocks, block_tokens, kv_heads, head_dim]`."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Segments of equal length, one after the other, of one sequence: one call of a kernel attends to them."""

    row: int
    """The query's, the first one's where there are more."""
    column: int
    """Row of the states."""
    part: int
    """Of the first segment, among the parts of that row."""
    segments: int
    tokens: int
    """Of each segment."""
    blocks: list[int]
    """They begin with the first segment's first token."""
    first_row: int | None
    """Row of the first token where the blocks lie in one run, else None."""
    index: Tensor | None
    """Block numbers to gather, int64, where the blocks are scattered."""
    seen: Tensor | None = None
    """Of a chunk: how many of the tokens each row sees from `row` on, int64 and ascending. None: all rows see all."""


@dataclass(slots=True)
class StepRuns:
    """All runs of a step; `device` is an implementation's own form of them, made at the first layer and kept."""

    items: list[SegmentRun] = field(default_factory=list)
    device: tuple[Tensor, ...] | None = None
    tasks: StateTasks | None = None
    """Of the CPU's kernel, as `device`."""

    def places(self, states: StateStack) -> Tensor:
        """Where each segment's state is written, int64."""
        columns = states.lse.shape[1]
        places = [(run.part + i) * columns + run.column for run in self.items for i in range(run.segments)]
        return torch.tensor(places, device=states.lse.device)


@dataclass(slots=True)
class Plan:
    """Which cached tokens each sequence of a step attends to. Valid while tables and lengths stay as they
    were.
    """

    query_tokens: list[int]
    sequences: list[SegmentRun]
    """All tokens of each in the cache, including the queries' own, as one segment."""
    single: StepRuns = field(default_factory=StepRuns)
    """Of `sequences`, those with one query."""
    states: StateStack | None = None
    """Room for the states of such queries, made at the first layer and kept."""
    device_tables: Tensor | None = None
    device_lengths: Tensor | None = None


def make_plan(
    tables: Sequence[Sequence[int]],
    query_tokens: Sequence[int],
    context_tokens: Sequence[int],
    block_tokens: int,
    device: torch.device,
) -> Plan:
    plan, row = Plan(list(query_tokens), []), 0
    for table, count, tokens in zip(tables, query_tokens, context_tokens, strict=True):
        blocks = list(table[: -(-tokens // block_tokens)])
        assert len(blocks) * block_tokens >= tokens, (len(table), tokens, block_tokens)
        run = SegmentRun(row, row, 0, 1, tokens, blocks, *_where(blocks, block_tokens, device))
        plan.sequences.append(run)
        if count == 1:
            plan.single.items.append(run)
        row += count
    return plan


def runs_of(
    row: int,
    table: Sequence[int],
    tokens: int,
    segment_tokens: int,
    block_tokens: int,
    device: torch.device,
    *,
    part: int = 0,
    column: int | None = None,
) -> list[SegmentRun]:
    """The first `tokens` tokens of a sequence: runs of whole segments, and one of the rest, without those that are
    elsewhere (a segment with AWAY in its table). `part`: of the first segment. `column`: as `row`, unless given.
    """
    each = segment_tokens // block_tokens
    full, rest = divmod(tokens, segment_tokens)
    runs: list[SegmentRun] = []

    def add(first: int, segments: int, size: int) -> None:
        blocks = list(table[first * each :][: segments * -(-size // block_tokens)])
        where = _where(blocks, block_tokens, device)
        runs.append(
            SegmentRun(row, row if column is None else column, part + first, segments, size, blocks, *where)
        )

    here = [i for i in range(full) if AWAY not in table[i * each : (i + 1) * each]]
    for _, group in groupby(enumerate(here), lambda pair: pair[1] - pair[0]):
        found = [segment for _, segment in group]
        add(found[0], len(found), segment_tokens)
    if rest and AWAY not in table[full * each : full * each + -(-rest // block_tokens)]:
        add(full, 1, rest)
    return runs


def _where(blocks: list[int], block_tokens: int, device: torch.device) -> tuple[int | None, Tensor | None]:
    """Row of the first token where the blocks lie in one run; else their numbers to gather, int64."""
    if all(block == blocks[0] + i for i, block in enumerate(blocks)):
        return blocks[0] * block_tokens, None
    return None, torch.tensor(blocks, dtype=torch.int64, device=device)


class Attention(ABC):
    """Implementations hold no state of a sequence; `name` is their name in the configuration."""

    name: str

    def __init__(self, block_tokens: int, device: torch.device) -> None:
        self.block_tokens, self.device = block_tokens, device

    def plan(
        self, tables: Sequence[Sequence[int]], query_tokens: Sequence[int], context_tokens: Sequence[int]
    ) -> Plan:
        return make_plan(tables, query_tokens, context_tokens, self.block_tokens, self.device)

    def rows_apart(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the bits of the state of a chunk's row depend on its query and its keys alone."""
        return False

    def blocks_apart(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether a row of a chunk has the same bits whatever blocks are in the chunk with its own."""
        return False

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        """Causal attention of every sequence of `plan`, rows of `q` in its order, into `out` (like
        `q`). `k` and `v` `[rows, kv_heads, head_dim]` are those of the queries' own tokens, as in the cache.
        """

    @abstractmethod
    def partial(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
        """The state of one sequence's queries over `k`, `v` `[keys, kv_heads, head_dim]`.

        `causal` needs as many keys as queries: key j is seen by queries j and later.
        """

    def partial_at(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Partial:
        """The state of single queries of one sequence, at ascending `positions` among the keys `k`, `v`: each sees the
        keys up to its own.
        """
        return _plain_partial(q, k, v, _hidden(k, positions))

    @abstractmethod
    def segment_states(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: StepRuns, states: StateStack
    ) -> None:
        """Writes the states of single queries (`q` `[rows, heads, head_dim]`) over each segment of `runs`.

        The bits of a state depend on its query and its segment alone.
        """

    def chunk_states(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Sequence[SegmentRun], states: StateStack
    ) -> None:
        """Writes the states of the rows of `q`, a chunk of one sequence, over each segment of `runs`."""
        for run in runs:
            keys, values = (self.segments(cache, run).transpose(1, 2) for cache in (k_cache, v_cache))
            rows = slice(0 if run.seen is None else run.row, None)
            for i in range(run.segments):
                place = run.part + i
                out, lse = states.out[place, rows], states.lse[place, rows]
                self._write_partial(q[rows], keys[i], values[i], run.seen, out, lse)

    def _write_partial(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, out: Tensor, lse: Tensor
    ) -> None:
        """In f32. `seen` is as a run's."""
        state = self.partial(q, k, v, causal=False) if seen is None else self.partial_at(q, k, v, seen - 1)
        out.copy_(state.out)
        lse.copy_(state.lse)

    def segments(self, cache: Tensor, run: SegmentRun) -> Tensor:
        """`[segments, kv_heads, tokens, head_dim]`: a view where the blocks lie in a row."""
        _, _, kv_heads, dim = cache.shape
        first = run.first_row
        if first is None:
            assert run.index is not None
            cache, first = cache.index_select(0, run.index), 0
        row = kv_heads * dim
        return cache.as_strided(
            (run.segments, kv_heads, run.tokens, dim),
            (run.tokens * row, dim, row, 1),
            cache.storage_offset() + first * row,
        )

    def sequence(self, cache: Tensor, run: SegmentRun) -> Tensor:
        """All tokens of one segment, `[tokens, kv_heads, head_dim]`: a view where its blocks lie in a row, a gathered
        copy otherwise.
        """
        return self.segments(cache, run)[0].transpose(0, 1)


class SdpaAttention(Attention):
    """On a CPU compiled kernels, or PyTorch's private flash operator, which returns the log-sum-exp as well; elsewhere
    its public one.

    Each sequence is computed at its exact length and without padding of its keys, so that its bits do not depend
    on the batch or on where its blocks lie.
    """

    name = "sdpa"

    def __init__(self, block_tokens: int, device: torch.device, *, private_op: bool = True) -> None:
        super().__init__(block_tokens, device)
        found = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
        self._flash = found.default if private_op and found is not None and device.type == "cpu" else None

    def rows_apart(self, dtype: torch.dtype, head_dim: int) -> bool:
        return self.device.type == "cpu" and chunk_kernel(dtype, head_dim) is not None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        singles = bool(plan.single.items) and _state_kernel(q, cache.k) is not None
        if singles:
            if plan.states is None:
                plan.states = StateStack(1, sum(plan.query_tokens), q.shape[1], q.shape[2], q.device)
            self.segment_states(q, cache.k, cache.v, plan.single, plan.states)
            out[: plan.states.out.shape[1]] = plan.states.out[0]
        for count, run in zip(plan.query_tokens, plan.sequences, strict=True):
            if count > 1 or not singles:
                own = slice(run.row, run.row + count)
                out[own] = self._whole(q[own], self.sequence(cache.k, run), self.sequence(cache.v, run))

    def _whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = k.shape[0] - q.shape[0]
        if self._flash is None and _chunk_kernel(k) is None:
            return _public_sdpa(q, k, v)
        own = self.partial(q, k[past:], v[past:], causal=True)
        if past == 0:
            return own.out
        return merge(self.partial(q, k[:past], v[:past], causal=False), own).out

    def segment_states(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: StepRuns, states: StateStack
    ) -> None:
        kernel = _state_kernel(q, k_cache)
        if kernel is None:
            self._plain_segment_states(q, k_cache, v_cache, runs, states)
        elif runs.items:
            if runs.tasks is None:
                runs.tasks = _tasks(runs, states, self.block_tokens)
            kernel(
                q,
                k_cache,
                v_cache,
                runs.tasks,
                states.out.view(-1, *q.shape[1:]),
                states.lse.view(-1, q.shape[1]),
            )

    def _plain_segment_states(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: StepRuns, states: StateStack
    ) -> None:
        for run in runs.items:
            keys, values = (self.segments(cache, run).transpose(1, 2) for cache in (k_cache, v_cache))
            for i in range(run.segments):
                state = self.partial(q[run.row : run.row + 1], keys[i], values[i], causal=False)
                states.out[run.part + i, run.column], states.lse[run.part + i, run.column] = (
                    state.out[0],
                    state.lse[0],
                )

    def partial(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
        assert not causal or k.shape[0] == q.shape[0], (q.shape, k.shape)
        if k.shape[0] == 0:
            return neutral(q)
        kernel = _chunk_kernel(k)
        if kernel is not None:
            seen = torch.arange(1, len(k) + 1) if causal else torch.full((len(q),), len(k))
            return _state_by(kernel, q, k, v, seen)
        if self._flash is None:
            hidden = _hidden(k, torch.arange(len(k), device=k.device)) if causal else None
            return _plain_partial(q, k, v, hidden)
        rows, heads, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        by_head = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
        if causal:
            # KV heads as the batch and their query heads as the heads, with a stride of zero for the keys.
            keys = k.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1)
            values = v.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1)
            o, lse = self._flash(by_head, keys, values, 0.0, True)
        else:
            # No mask: the query heads of a KV head are as good as further query rows, and read its keys once.
            o, lse = self._flash(by_head.reshape(1, kv_heads, group * rows, dim), *_by_head(k, v), 0.0, False)
        out = o.reshape(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
        return Partial(out, lse.reshape(heads, rows).t().float())

    def _write_partial(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, out: Tensor, lse: Tensor
    ) -> None:
        kernel = _chunk_kernel(k)
        if kernel is None:
            super()._write_partial(q, k, v, seen, out, lse)
        else:
            kernel(q, k, v, torch.full((len(q),), len(k)) if seen is None else seen, out, lse)

    def partial_at(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Partial:
        kernel = _chunk_kernel(k)
        if kernel is not None:
            return _state_by(kernel, q, k, v, positions + 1)
        if self._flash is None:
            return super().partial_at(q, k, v, positions)
        rows, heads, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        # Query heads are further rows, as above. All rows see the keys before the first one.
        first = int(positions[0])
        mask = torch.zeros(rows, group, len(k), dtype=q.dtype, device=q.device)
        mask[..., first:].masked_fill_(_hidden(k[first:], positions - first).unsqueeze(1), float("-inf"))
        folded = q.view(rows, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, rows * group, dim)
        o, lse = self._flash(folded, *_by_head(k, v), 0.0, False, attn_mask=mask.flatten(0, 1))
        out = o.reshape(kv_heads, rows, group, dim).transpose(0, 1).reshape(rows, heads, dim)
        return Partial(out, lse.reshape(kv_heads, rows, group).transpose(0, 1).reshape(rows, heads).float())


def _state_kernel(q: Tensor, cache: Tensor) -> StateKernel | None:
    """For single queries over a cache; of the CPU alone."""
    if cache.device.type != "cpu":
        return None
    return state_kernel(cache.dtype, cache.shape[-1], q.shape[1] // cache.shape[2])


def _chunk_kernel(k: Tensor) -> ChunkKernel | None:
    """For a chunk's queries; of the CPU alone."""
    return chunk_kernel(k.dtype, k.shape[-1]) if k.device.type == "cpu" else None


def _state_by(kernel: ChunkKernel, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Partial:
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    kernel(q, k, v, seen, out, lse)
    return Partial(out.to(q.dtype), lse)


def _tasks(runs: StepRuns, states: StateStack, block_tokens: int) -> StateTasks:
    tasks: list[tuple[int, int, int, int]] = []
    blocks: list[int] = []
    places = iter(runs.places(states).tolist())
    for run in runs.items:
        each = -(-run.tokens // block_tokens)
        tasks += [(run.row, next(places), run.tokens, len(blocks) + i * each) for i in range(run.segments)]
        blocks += run.blocks
    return StateTasks(tasks, blocks)


def _by_head(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence as the private operator takes them: views `[1, kv_heads, keys, head_dim]`."""
    return k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)


def _hidden(k: Tensor, positions: Tensor) -> Tensor:
    """Which keys come after which position, bool `[positions, keys]`."""
    return torch.arange(len(k), device=k.device) > positions.unsqueeze(1)


def _public_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, keys = q.shape[0], k.shape[0]
    mask = None
    if rows > 1:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _plain_partial(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Partial:
    """By the definition, in f32: where no kernel returns the log-sum-exp. `hidden`: bool `[rows, keys]`."""
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q.float(), keys) * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = torch.einsum("qhk,khd->qhd", weights, v.float().repeat_interleave(group, dim=1))
    return Partial(out.to(q.dtype), lse)
