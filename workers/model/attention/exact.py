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
from dataclasses import dataclass, field
from typing import Protocol

from halfmoon.workers.model.attention.kernel import Attention, LayerCache, Plan, StepRuns, Tensor, runs_of
from halfmoon.workers.model.attention.states import Partial, StateStack


@dataclass(slots=True)
class ExactPlan(Plan):
    """The runs of past segments of each sequence."""

    runs: StepRuns = field(default_factory=StepRuns)
    parts: int = 0
    """The most past segments of a sequence."""
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

    def plan(
        self, tables: Sequence[Sequence[int]], query_tokens: Sequence[int], context_tokens: Sequence[int]
    ) -> ExactPlan:
        whole = self._base.plan(tables, query_tokens, context_tokens)
        plan = ExactPlan(whole.query_tokens, whole.sequences)
        pasts = [context - count for count, context in zip(query_tokens, context_tokens, strict=True)]
        for row, (sequence, past) in enumerate(zip(plan.sequences, pasts, strict=True)):
            plan.runs.items += runs_of(
                row, sequence.blocks, past, self.segment_tokens, self.block_tokens, self.device
            )
            plan.parts = max(plan.parts, -(-past // self.segment_tokens))
        return plan

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        assert isinstance(plan, ExactPlan), plan
        if len(plan.query_tokens) == sum(plan.query_tokens):
            self.begin(q, k, v, cache, plan)
            self.finish(plan, out)
            return
        assert plan.elsewhere is None or len(plan.query_tokens) == 1, plan.query_tokens
        row = 0
        for i, count in enumerate(plan.query_tokens):
            own = slice(row, row + count)
            state = self._base.partial(q[own], k[own], v[own], causal=True)
            parts = -(-(plan.sequences[i].tokens - count) // self.segment_tokens)
            if parts:
                states = StateStack(parts, count, q.shape[1], q.shape[2], q.device)
                past = [run for run in plan.runs.items if run.row == i]
                self._base.chunk_states(q[own], cache.k, cache.v, past, states)
                states.own_out = state.out.unsqueeze(2)
                states.own_lse.copy_(state.lse)
                if plan.elsewhere is not None:
                    plan.elsewhere.collect(states)
                out[own] = states.merged()
            else:
                out[own] = state.out
            row += count

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
