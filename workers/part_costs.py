"""Measures the parts of a decode step that may run at different workers: all but attention, by rows; attention, by rows
and cached tokens, as `workers.attention` computes it; and a channel between the two, by bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.workers.channel_cost import channel_times
from halfmoon.workers.cost_fit import PartTime, fit_attention, fit_channel, fit_linear
from halfmoon.workers.model.attention.exact import ExactAttention
from halfmoon.workers.model.attention.kernel import StepRuns, runs_of
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.engine import Engine

_ROUNDS_MIN, _ROUNDS_MAX = 2, 20
_LINEAR_ROWS = (1, 8, 16)
#: Of a sequence; attention to more takes as much longer.
_CONTEXT_MAX = 2048


def with_parts(
    engine: Engine, profile: CostProfile, blocks: Sequence[int], context: int, budget_s: float
) -> CostProfile:
    """`profile` with the table of parts, measured on `blocks` of the engine with sequences of up to `context` tokens.
    As it is where no attention could run elsewhere: not exact, or not on a CPU.
    """
    if not isinstance(engine.attention, ExactAttention) or engine.device.type != "cpu":
        return profile
    profile = fit_attention(profile, attention_times(engine, blocks, context, budget_s / 2))
    rows = [count for count in _LINEAR_ROWS if count <= engine.group_rows]
    profile = fit_linear(profile, _linear_times(engine, blocks, rows, budget_s / 4), engine.group_rows)
    # Whole rows of a few groups, as in a layer's messages.
    row_bytes = engine.config.heads * engine.config.head_dim * engine.dtype.itemsize
    trips = channel_times([0, row_bytes, 16 * row_bytes, 64 * row_bytes], budget_s / 4)
    return fit_channel(profile, trips, row_bytes) if trips else profile


def attention_times(engine: Any, blocks: Sequence[int], context: int, budget_s: float) -> list[PartTime]:
    """Attention of all layers, of a few groups of rows. `engine`: one with a cache, exact attention and a config; KV in
    `blocks` stands for that of every sequence.
    """
    context = min(context, _CONTEXT_MAX)
    shapes = [(1, 1), (1, context), (4, context // 2), (8, 1), (8, context), (16, context // 4)]
    steps = [
        (rows, rows * max(1, tokens), _attention_step(engine, blocks, rows, max(1, tokens)))
        for rows, tokens in shapes
    ]
    return _fastest(steps, budget_s)


def _linear_times(
    engine: Engine, blocks: Sequence[int], rows: Sequence[int], budget_s: float
) -> list[PartTime]:
    """A step of sequences that begin, less attention to their own tokens."""

    def step(count: int) -> Callable[[], None]:
        tables = [[blocks[row % len(blocks)]] for row in range(count)]
        return lambda: _decode(engine, tables)

    whole = _fastest([(count, 0, step(count)) for count in rows], budget_s)
    own = _fastest([(count, 0, _attention_step(engine, blocks, count, 0)) for count in rows], budget_s / 4)
    return [
        PartTime(one.rows, 0, max(1, one.elapsed_ns - less.elapsed_ns))
        for one, less in zip(whole, own, strict=True)
    ]


def _decode(engine: Engine, tables: list[list[int]]) -> None:
    engine.decode([7] * len(tables), [0] * len(tables), tables)


def _attention_step(engine: Any, blocks: Sequence[int], rows: int, tokens: int) -> Callable[[], None]:
    """Attention of one step of `rows` sequences with `tokens` cached tokens each."""
    cache, config, attention = engine.cache, engine.config, engine.attention
    need = -(-tokens // cache.block_tokens)
    runs = StepRuns()
    for row in range(rows):
        # Each sequence has blocks of its own while there are some: shared ones would share the CPU's cache.
        start = row * need % (len(blocks) - need + 1)
        table = list(blocks[start : start + need])
        runs.items += runs_of(row, table, tokens, attention.segment_tokens, cache.block_tokens, cache.device)
    parts = -(-tokens // attention.segment_tokens)
    query = torch.full((rows, config.heads, config.head_dim), 0.01, dtype=engine.dtype)
    new = torch.full((rows, config.kv_heads, config.head_dim), 0.01, dtype=engine.dtype)

    @torch.inference_mode()
    def step() -> None:
        states = StateStack(parts, rows, config.heads, config.head_dim, cache.device)
        out = torch.empty_like(query)
        for layer in range(cache.layers):
            attention.segment_states(query, cache.k[layer], cache.v[layer], runs, states)
            states.own_token(query, new, new)
            out.copy_(states.merged())

    return step


def _fastest(steps: Sequence[tuple[int, int, Callable[[], None]]], budget_s: float) -> list[PartTime]:
    """The least time of each step (rows, tokens, call), by turns: a neighbour's noise only adds."""
    least: list[int | None] = [None] * len(steps)
    until_s, rounds = time.monotonic() + budget_s, 0
    while rounds < _ROUNDS_MIN or (time.monotonic() < until_s and rounds < _ROUNDS_MAX):
        for number, (_, _, step) in enumerate(steps):
            begin = time.perf_counter_ns()
            step()
            elapsed_ns = max(1, time.perf_counter_ns() - begin)
            known = least[number]
            least[number] = elapsed_ns if known is None else min(known, elapsed_ns)
        rounds += 1
    return [
        PartTime(rows, tokens, elapsed_ns or 1)
        for (rows, tokens, _), elapsed_ns in zip(steps, least, strict=True)
    ]
