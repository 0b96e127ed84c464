"""Exact mode's attention: the canonical split, whose bits do not depend on where a sequence's KV lies.

Attention of a row is always the merge, in order, of the states over fixed segments of the tokens before it, and last
the state over the row's own chunk (in decode: its own token). A state is computed alone, whoever computes it: here,
or a worker elsewhere that holds the segment. So a sequence may be spread over any number of places, in whole
segments, and its logits keep their bits. The own chunk stands apart because its keys come later than its query
(Lamina, arXiv 2405.01814, section 4.2.2): attention to what is cached need not wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from halfmoon.workers.model.attention import Attention, Plan, StepRuns, Tensor, runs_of
from halfmoon.workers.model.attention_states import Partial, StateStack


@dataclass(slots=True)
class ExactPlan(Plan):
    """A plan of one query each has its runs of past segments, and room for their states."""

    runs: StepRuns = field(default_factory=StepRuns)
    parts: int = 0
    """The most past segments of a sequence."""
    states: StateStack | None = None
    elsewhere: Elsewhere | None = None


class Elsewhere(Protocol):
    """The segments of a batch that are not in this cache (AWAY in its tables), and who attends to them."""

    def ask(self, layer: int, q: Tensor) -> None:
        """Sends the queries `[rows, heads, head_dim]` of one layer."""

    def collect(self, states: StateStack) -> None:
        """Writes the states over those segments and the queries that were sent last, once they are here."""


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
        plan = ExactPlan(
            whole.query_tokens, whole.context_tokens, whole.tables, whole.first_rows, whole.indices
        )
        if all(count == 1 for count in query_tokens):
            for row, (table, context) in enumerate(zip(plan.tables, context_tokens, strict=True)):
                runs = runs_of(row, table, context - 1, self.segment_tokens, self.block_tokens, self.device)
                plan.runs.items += runs
                plan.parts = max(plan.parts, -(-(context - 1) // self.segment_tokens))
        return plan

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, out: Tensor
    ) -> None:
        assert isinstance(plan, ExactPlan), plan
        rows = len(plan.query_tokens)
        if rows == sum(plan.query_tokens):
            if plan.states is None:
                plan.states = StateStack(plan.parts + 1, rows, q.shape[1], q.shape[2], q.device)
            self._base.segment_states(q, k_cache, v_cache, plan.runs, plan.states)
            own_token(q, k, v, plan.states)
            if plan.elsewhere is not None:
                plan.elsewhere.collect(plan.states)
            out[:rows] = plan.states.merged()
            return
        row = 0
        for i, count in enumerate(plan.query_tokens):
            own = slice(row, row + count)
            past = plan.context_tokens[i] - count
            keys, values = (self._base.sequence(cache, plan, i, past) for cache in (k_cache, v_cache))
            out[own] = self._chunk(q[own], k[own], v[own], keys, values)
            row += count

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rows of one chunk: over segments of `keys`, which are before them, and over their own."""
        own = self._base.partial(q, k, v, causal=True)
        if not len(keys):
            return own.out
        size = self.segment_tokens
        starts = range(0, len(keys), size)
        states = StateStack(len(starts) + 1, q.shape[0], q.shape[1], q.shape[2], q.device)
        for part, start in enumerate(starts):
            past = self._base.partial(
                q, keys[start : start + size], values[start : start + size], causal=False
            )
            states.out[part], states.lse[part] = past.out, past.lse
        states.out[-1], states.lse[-1] = own.out, own.lse
        return states.merged()

    def partial(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
        return self._base.partial(q, k, v, causal=causal)

    def segment_states(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: StepRuns, states: StateStack
    ) -> None:
        self._base.segment_states(q, k_cache, v_cache, runs, states)


def own_token(q: Tensor, k: Tensor, v: Tensor, states: StateStack) -> None:
    """The state of each row over its own token alone, as the last part: its value, and the one score."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    products = q.view(rows, kv_heads, heads // kv_heads, dim).float() * k.float().unsqueeze(2)
    states.lse[-1] = products.sum(-1).mul_(dim**-0.5).view(rows, heads)
    states.out[-1].view(rows, kv_heads, heads // kv_heads, dim).copy_(v.unsqueeze(2))
