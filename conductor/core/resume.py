"""A decode worker that keeps no KV is gone: another goes on with the KV at attention workers, without a prefill.

The order is a new one, so that no late word of the old one is taken for its own. The holds move to it in the ledger at
once, and at the attention workers when the decode worker asks them for it (`HoldRequest.adopts`).

Source: Lamina (arXiv 2405.01814): a model worker has no state of its requests, and is replaced.
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.booking import book_decode, free_decode, release_nodes, start_decode
from halfmoon.conductor.core.loans import held_for
from halfmoon.conductor.core.placement.prices import row_of, rows_of, step_price
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Order, WorkerRecord
from halfmoon.conductor.core.step_output import StepOutput


def resume(state: State, order: Order, out: StepOutput) -> bool:
    """Give the decode half of an order, whose decode worker is gone, to another. False: nothing was changed."""
    request = state.requests[order.request_id]
    # Before it joined the batch, not all of its KV may have been where it was to be.
    decodes = order.phase == "decode" and order.decode.running
    if not order.decode.cache or not decodes or request.placements >= state.policy.placements_max:
        return False
    holders = [holder for holder, _ in held_for(state, order) if order.order_id in holder.lent]
    tokens = request.event.prompt_tokens + request.event.max_tokens
    able = [
        worker
        for worker in state.loads.decode.workers
        if worker.cache_elsewhere
        and len(worker.orders) < worker.batch_max
        and tokens <= worker.context_tokens_max
        and all(worker.layout == holder.layout for holder in holders)
    ]
    if len(holders) < len(order.decode.cache) or not able:
        return False

    def rank(worker: WorkerRecord) -> tuple[bool, int, str]:
        context = worker.context_tokens + order.decode.context_tokens
        rows = [*rows_of(state, worker), row_of(order)]
        step = step_price(state, worker, len(worker.orders) + 1, context, rows)
        return worker.worker_id in request.avoid, step.ns, worker.worker_id

    _hand_over(state, order, holders, min(able, key=rank), out)
    return True


def _hand_over(
    state: State, order: Order, holders: list[WorkerRecord], worker: WorkerRecord, out: StepOutput
) -> None:
    request = state.requests[order.request_id]
    state.orders_now += 1
    new = msgspec.structs.replace(
        order,
        order_id=f"{state.seq}-{state.orders_now}",
        decode_id=worker.worker_id,
        decode_node_id=worker.node_id,
        placed_ns=state.at_ns,
        placed_seq=state.seq,
        decode=msgspec.structs.replace(order.decode, running=False, resumes=order.order_id),
    )
    free_decode(state, order)
    del state.orders[order.order_id]
    state.orders[new.order_id] = new
    request.order_id = new.order_id
    request.placements += 1
    state.counters.placed += 1
    for holder in holders:
        assert holder.holds is not None, (holder, order)
        held = holder.holds.orders
        held[new.order_id] = held.pop(order.order_id)
    book_decode(state, worker, new)
    release_nodes(state, order, out)
    out.append(start_decode(state, request, new))
