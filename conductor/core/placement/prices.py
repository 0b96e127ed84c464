"""The price of attention elsewhere in a decode step: round trips and bytes of a channel a layer, and attention there.

Lenders attend to their parts while the owner attends to its own, so a step waits only for the difference. Where
attention workers hold all KV, groups of rows take turns (`StepElsewhere`). Where the table of parts of the owner or of
a holder was not measured, a step costs what was learned of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Order, WorkerRecord
from halfmoon.schemas.cost_profile import StepElsewhere
from halfmoon.schemas.lending import KvPart

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "none": 1}
#: Of a log-sum-exp.
_LSE_BYTES = 4


class Row(NamedTuple):
    """A sequence of a batch: its context, and the parts of it at other workers."""

    context_tokens: int
    loans: list[KvPart]
    cache: list[KvPart]


class StepPrice(NamedTuple):
    """A decode step; how much of it waits for attention elsewhere; in how many groups its rows take turns (0: none)."""

    ns: int
    waits_ns: int = 0
    groups: int = 0


def row_of(order: Order) -> Row:
    return Row(order.decode.context_tokens, order.decode.loans, order.decode.cache)


def rows_of(state: State, worker: WorkerRecord) -> list[Row]:
    """All that is reserved at a decode worker. Empty where it makes no difference to the price."""
    return [row_of(state.orders[order_id]) for order_id in worker.orders] if worker.priced else []


def step_price(
    state: State, worker: WorkerRecord, sequences: int, context_tokens: int, rows: Iterable[Row]
) -> StepPrice:
    """One step of `sequences` sequences with `context_tokens` in all; `rows` are those with parts elsewhere."""
    if worker.priced and worker.batch is not None and worker.batch.cache_elsewhere:
        step = step_elsewhere(state, worker, list(rows))
        if step is not None:
            groups = worker.batch.groups or step.groups
            ns = step.ns(groups) * worker.batch.elsewhere_permille // 1_000
            return StepPrice(ns, max(0, ns - step.cost.linear_ns(groups, step.rows)), groups)
    elif worker.priced:
        away, waits_ns = lent_price(state, worker, context_tokens, rows)
        return StepPrice(worker.cost.step_ns(sequences, context_tokens - away) + waits_ns, waits_ns)
    return StepPrice(worker.cost.step_ns(sequences, context_tokens))


def lent_price(
    state: State, worker: WorkerRecord, context_tokens: int, rows: Iterable[Row]
) -> tuple[int, int]:
    """Tokens that lenders attend to, and the time by which that outlasts the worker's attention to its own."""
    asked: dict[str, tuple[int, int]] = {}
    for row in rows:
        for loan in row.loans:
            count, segments = asked.get(loan.worker_id, (0, 0))
            asked[loan.worker_id] = count + 1, segments + loan.segments
    segment_tokens = worker.layout.segment_tokens
    away = min(context_tokens, sum(segments for _, segments in asked.values()) * segment_tokens)
    longest_ps = 0
    for lender_id, (count, segments) in asked.items():
        lender = state.workers.get(lender_id)
        if lender is not None:
            longest_ps = max(longest_ps, share_ps(worker, lender, count, segments))
    return away, max(0, longest_ps - own_ps(worker, context_tokens - away)) // 1_000


def own_ps(worker: WorkerRecord, tokens: int) -> int:
    """Attention of a step to tokens in the worker's own cache, behind which others' may hide."""
    return worker.cost.decode_per_context_token_ps * tokens


def share_ps(owner: WorkerRecord, lender: WorkerRecord, rows: int, segments: int) -> int:
    """A step's attention to `segments` at a lender, of `rows` sequences of the owner, as the owner sees it."""
    tokens = segments * owner.layout.segment_tokens
    if not owner.priced or not lender.cost.attention_token_ps:
        return lender.cost.decode_per_context_token_ps * tokens
    query = owner.cost.query_row_bytes
    # Of each segment a row of attention's result comes back, and its log-sum-exp for each head.
    state_bytes = query + _heads(owner) * _LSE_BYTES
    payload = owner.layout.layers * (rows * query + segments * state_bytes)
    channel_ns = owner.cost.channel_ns(owner.layout.layers, payload)
    return 1_000 * (channel_ns + lender.cost.attention_ns(1, rows, tokens))


def _heads(worker: WorkerRecord) -> int:
    head_bytes = worker.layout.head_dim * _ELEMENT_BYTES[worker.layout.dtype]
    return worker.cost.query_row_bytes // max(1, head_bytes)


def step_elsewhere(state: State, worker: WorkerRecord, rows: list[Row]) -> StepElsewhere | None:
    """A step of `rows`, all of whose KV is at attention workers, by the place that has the most to do for it. None:
    some place is unknown, or was not measured.
    """
    asked: dict[str, tuple[int, int, int]] = {}
    for row in rows:
        for place in row.cache:
            count, tokens, sent = asked.get(place.worker_id, (0, 0, 0))
            mine = place.size(row.context_tokens, worker.layout.segment_tokens)
            asked[place.worker_id] = count + 1, tokens + mine, sent + _row_bytes(worker, place, mine)
    found: list[StepElsewhere] = []
    layout = worker.layout
    for place_id, (count, tokens, sent) in asked.items():
        there = state.workers.get(place_id)
        if there is None or not there.cost.attention_token_ps:
            return None
        others = [one for one in map(state.orders.get, there.lent) if one is not None]
        theirs = [
            place.size(one.decode.context_tokens, layout.segment_tokens)
            for one in others
            if one.decode_id != worker.worker_id
            for place in one.decode.cache
            if place.worker_id == place_id
        ]
        found.append(
            StepElsewhere(
                cost=worker.cost,
                place=there.cost,
                layers=layout.layers,
                rows=len(rows),
                place_rows=count,
                place_tokens=tokens,
                others_ns=there.cost.attention_ns(0, len(theirs), sum(theirs)),
                payload_bytes=layout.layers * sent,
            )
        )
    return max(found, key=lambda one: one.ns(1), default=None)


def _row_bytes(worker: WorkerRecord, place: KvPart, tokens: int) -> int:
    """A row's payload of a layer at a place that has `tokens` of its tokens."""
    layout, query = worker.layout, worker.cost.query_row_bytes
    if not place.segments and not place.first_segment:
        return (
            (2 * query + layout.token_layer_bytes)
            * len(place.heads(layout.kv_heads))
            // max(1, layout.kv_heads)
        )
    # By sequence a state of each segment comes back; new tokens go to the last place only.
    states = -(-tokens // layout.segment_tokens) * (query + _heads(worker) * _LSE_BYTES)
    return query + states + (0 if place.segments else layout.token_layer_bytes)
