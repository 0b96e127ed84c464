"""Waits: until enough of a worker's requests have ended that one more fits."""

from __future__ import annotations

from halfmoon.conductor.core.placement.decode_candidates import has_room
from halfmoon.conductor.core.placement.measures import DecodeCandidate
from halfmoon.conductor.core.placement.prices import Row, row_of, step_price
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord

#: Retry-after is never shorter: a client that comes back at once finds the same.
RETRY_NS_MIN = 1_000_000


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
