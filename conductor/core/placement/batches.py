"""Batches to come: what is in decode at a worker at some time, and when enough of it will have ended.

Under admission `predicted` the batch is the one of that time, else the one of now.
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.placement.decode_candidates import has_room
from halfmoon.conductor.core.placement.measures import DecodeCandidate
from halfmoon.conductor.core.placement.prices import Row, row_of, step_price
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord

#: Retry-after is never shorter: a client that comes back at once finds the same.
RETRY_NS_MIN = 1_000_000


class Load(msgspec.Struct):
    """The batch of a decode worker at some time."""

    sequences: int
    context_tokens: int
    blocks: int
    rows: list[Row] = []


def decode_load(state: State, worker: WorkerRecord, end_ns: int) -> Load:
    """The load of `worker` in decode at `end_ns` (`predicted`), or now (any other admission mode)."""
    predicted = state.policy.admission == "predicted"
    # When a loan ends is not predicted: it counts as long as it lasts.
    load = Load(0, 0, sum(worker.lent.values()))
    for order_id in worker.orders:
        order = state.orders[order_id]
        half = order.decode
        if predicted:
            start_ns = order.prefill.end_ns
            if order.phase == "prefill":
                start_ns = max(start_ns, state.at_ns)  # it is late
            over_ns = start_ns + half.lasts_ns
            if order.phase == "decode" and over_ns < state.at_ns:
                # It lasts longer than expected: how long is as open as before.
                over_ns = state.at_ns + half.lasts_ns
            counts = start_ns <= end_ns <= over_ns
        else:
            counts = order.phase == "decode"
        if counts:
            load.sequences += 1
            load.context_tokens += half.context_tokens
            load.blocks += half.reserved_blocks
            if worker.priced:
                load.rows.append(row_of(order))
    return load


def borrowers_wait_ns(state: State, now_ns: int) -> int:
    """Time until the next request ends, which may leave enough room at its worker or its lenders."""
    ends = (order.prefill.end_ns + order.decode.lasts_ns for order in state.orders.values())
    return max(min(ends, default=0) - now_ns, RETRY_NS_MIN)


def wait_ns(
    state: State,
    worker: WorkerRecord,
    candidate: DecodeCandidate,
    tbt_limit_ns: int,
    now_ns: int,
    context: int = 0,
) -> int:
    """Time until enough of the worker's requests have ended: the KV fits and the step is within the limit (0: any)."""
    ends = sorted(
        (max(order.prefill.end_ns + order.decode.lasts_ns, now_ns), order.order_id)
        for order in [state.orders[order_id] for order_id in worker.orders]
    )
    sequences, tokens, blocks = len(ends), worker.context_tokens, worker.reserved_blocks
    rows = {order_id: row_of(state.orders[order_id]) for _, order_id in ends if worker.priced}
    new = Row(context, candidate.loans, candidate.cache)
    for end_ns, order_id in ends:
        order = state.orders[order_id]
        sequences, tokens, blocks = (
            sequences - 1,
            tokens - order.decode.context_tokens,
            blocks - order.decode.reserved_blocks,
        )
        rows.pop(order_id, None)
        step = step_price(state, worker, sequences + 1, tokens + context, [*rows.values(), new])
        within = tbt_limit_ns == 0 or step.ns <= tbt_limit_ns
        if within and has_room(worker, sequences, blocks, candidate.blocks):
            return max(end_ns - now_ns, RETRY_NS_MIN)
    return 0
