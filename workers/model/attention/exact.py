"""Exact mode's attention: the canonical split, whose bits do not depend on where a sequence's KV lies.

Attention of a row is always the merge, in order, of the state over the row's own chunk (in decode: its own token) and
those over fixed segments of the tokens before it. A state is computed alone, here or at a worker elsewhere
that holds the segment. So a sequence may be spread over any number of places, in whole segments, and its logits keep
their bits. The own chunk stands apart because its keys come later than its query (Lamina, arXiv 2405.01814, section
4.2.2): attention to cached tokens need not wait for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from halfmoon.workers.model.attention.kernel import (
    Attention,
    LayerCache,
    Plan,
    SegmentRun,
    StepRuns,
    Tensor,
    runs_of,
)
from halfmoon.workers.model.attention.states import Partial, StateStack


@dataclass(slots=True)
class ExactPlan(Plan):
    """The runs of past segments of each sequence."""

    runs: StepRuns = field(default_factory=StepRuns)
    parts: int = 0
    """The most past segments of a sequence with one query."""
    chunks: list[list[SegmentRun]] = field(default_factory=list)
    """Where sequences have more queries: the segments before each one's blocks."""
    elsewhere: Elsewhere | None = None
    """Its queries are one of each sequence, or a chunk of one sequence."""


class Elsewhere(Protocol):
    """The segments of a batch that are not in this cache (AWAY in its tables), and attention to them.

    Rows are queries of one sequence each (decode), or all of the same one (a chunk of a prompt).
    """

    def ask(self, layer: int, q: Tensor) -> None:
        """Sends the queries `[rows, heads, head_dim]` of one layer."""

    def collect(self, states: StateStack) -> None:
        """Writes the states over those segments and the queries that were sent last, once they are here; of a
        chunk, every row's.
        """


class PartsElsewhere(Elsewhere, Protocol):
    """For a group of rows in decode, beside which others are computed."""

    def abandon(self) -> None:
        """The step is over for another reason: nobody waits for the states that were asked for."""


class CacheElsewhere(ABC):
    """The whole KVCache of a group of rows in decode, and attention to it. The rows have no blocks here."""

    @abstractmethod
    def ask(self, layer: int, q: Tensor) -> None:
        """Sends the queries `[rows, heads, head_dim]` of one layer, so that attention to the past may begin."""

    @abstractmethod
    def tell(self, k: Tensor, v: Tensor) -> None:
        """Sends the keys and values `[rows, kv_heads, head_dim]` of the new tokens, which ends attention there."""

    @abstractmethod
    def collect(self, out: Tensor) -> None:
        """Writes attention's result `[rows, heads, head_dim]` to the first rows of `out`, once it is here."""

    @abstractmethod
    def abandon(self) -> None:
        """The step is over for another reason: nobody waits for the answers."""


class ExactAttention(Attention):
    """`base` computes the states."""

    def __init__(self, base: Attention, segment_tokens: int) -> None:
        super().__init__(base.block_tokens, base.device)
        assert segment_tokens % base.block_tokens == 0, (segment_tokens, base.block_tokens)
        self.name, self.segment_tokens, self._base = base.name, segment_tokens, base

    def blocks_apart(self, dtype: torch.dtype, head_dim: int) -> bool:
        return self._base.rows_apart(dtype, head_dim)

    def plan(
        self, tables: Sequence[Sequence[int]], query_tokens: Sequence[int], context_tokens: Sequence[int]
    ) -> ExactPlan:
        whole = self._base.plan(tables, query_tokens, context_tokens)
        plan = ExactPlan(whole.query_tokens, whole.sequences)
        pasts = [context - count for count, context in zip(query_tokens, context_tokens, strict=True)]
        for sequence, past, count in zip(plan.sequences, pasts, query_tokens, strict=True):
            if max(query_tokens) > 1:
                plan.chunks.append(self._chunk_runs(sequence.blocks, past, count))
            else:
                table, size = sequence.blocks, self.block_tokens
                plan.runs.items += runs_of(sequence.row, table, past, self.segment_tokens, size, self.device)
                plan.parts = max(plan.parts, -(-past // self.segment_tokens))
        return plan

    def _chunk_runs(self, table: Sequence[int], past: int, count: int) -> list[SegmentRun]:
        """The segments before the blocks of a chunk: each row sees what is before its own block."""
        size, segment_tokens = self.block_tokens, self.segment_tokens
        before = past + torch.arange(count) // size * size
        runs: list[SegmentRun] = []
        for first in range(0, int(before[-1]), segment_tokens):
            tokens = min(segment_tokens, int(before[-1]) - first)
            row = int((before <= first).sum())
            seen = (before[row:] - first).clamp(max=tokens)
            found = runs_of(
                row, table[first // size :], tokens, segment_tokens, size, self.device,
                part=first // segment_tokens,
            )  # fmt: skip
            all_see_all = row == 0 and int(seen[0]) == tokens
            runs += found if all_see_all else [replace(run, seen=seen) for run in found]
        return runs

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        assert isinstance(plan, ExactPlan), plan
        if len(plan.query_tokens) == sum(plan.query_tokens):
            self.begin(q, k, v, cache, plan)
            self.finish(plan, out)
            return
        assert plan.elsewhere is None or len(plan.query_tokens) == 1, plan.query_tokens
        for sequence, count, past in zip(plan.sequences, plan.query_tokens, plan.chunks, strict=True):
            rows = slice(sequence.row, sequence.row + count)
            own = self._own_blocks(q[rows], k[rows], v[rows])
            last_block = sequence.tokens - count + (count - 1) // self.block_tokens * self.block_tokens
            parts = -(-last_block // self.segment_tokens)
            if parts == 0:
                out[rows] = own.out
                continue
            states = StateStack(parts, len(own.out), q.shape[1], q.shape[2], q.device)
            self._base.chunk_states(q[rows], cache.k, cache.v, past, states)
            states.own_out = own.out.unsqueeze(2)
            states.own_lse.copy_(own.lse)
            if plan.elsewhere is not None:
                plan.elsewhere.collect(states)
            out[rows] = states.merged()

    def _own_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        """The states of a chunk's rows, each over its own block as far as it has come."""
        blocks = [slice(at, at + self.block_tokens) for at in range(0, len(q), self.block_tokens)]
        states = [self._base.partial(q[own], k[own], v[own], causal=True) for own in blocks]
        if len(states) == 1:
            return states[0]
        return Partial(torch.cat([each.out for each in states]), torch.cat([each.lse for each in states]))

    def begin(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: ExactPlan) -> None:
        """Attention of one query of each sequence, as far as it is computed here; `finish` is the rest."""
        if plan.states is None:
            plan.states = StateStack(plan.parts, q.shape[0], q.shape[1], q.shape[2], q.device)
        self._base.segment_states(q, cache.k, cache.v, plan.runs, plan.states)
        plan.states.own_token(q, k, v)

    def finish(self, plan: ExactPlan, out: Tensor) -> None:
        """With the states of others, into the first rows of `out`."""
        assert plan.states is not None
        if plan.elsewhere is not None:
            plan.elsewhere.collect(plan.states)
        out[: len(plan.query_tokens)] = plan.states.merged()

    def partial(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
        return self._base.partial(q, k, v, causal=causal)

    def segment_states(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: StepRuns, states: StateStack
    ) -> None:
        self._base.segment_states(q, k_cache, v_cache, runs, states)
