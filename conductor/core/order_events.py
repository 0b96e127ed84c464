"""Events of an order, from the workers that have it: its halves end, fail or are refused, and its KV moves.

Each is about an order that is open, at a worker that has the half it speaks of. What is late, repeated or unknown
changes nothing; a late prefill still teaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from halfmoon.conductor.core import booking, orders
from halfmoon.conductor.core.corrections import answer_seen, load_changed, prefill_seen
from halfmoon.conductor.core.loans import end_loans, kv_move_refused, kv_moved
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import Answers, Link, answer_class, learn_answer, measured_link
from halfmoon.conductor.core.state.records import Order, Request
from halfmoon.conductor.core.step_learning import learn_prefill
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.events import (
    DecodeFailed,
    DecodeRefused,
    DecodeStarted,
    KvMoved,
    KvMoveRefused,
    PrefillFailed,
    PrefillFinished,
    RequestFinished,
    StageFinished,
)

OrderEvent = (
    PrefillFinished
    | PrefillFailed
    | StageFinished
    | DecodeStarted
    | DecodeRefused
    | DecodeFailed
    | KvMoved
    | KvMoveRefused
    | RequestFinished
)


def apply(state: State, event: OrderEvent, out: StepOutput) -> None:
    """Change the order that the event is about, and its request; nothing where it is not open there."""
    order = _open_order(state, event)
    if order is None:
        # An answer of one token may have ended the order before the prefill's own report.
        if isinstance(event, PrefillFinished) and event.order_id not in state.orders:
            learn_prefill(state, event, event.prompt_tokens, of_request=event.prompt_tokens)
        return
    request = state.requests[order.request_id]
    match event:
        case PrefillFinished():
            _prefill_finished(state, order, request, event)
        case RequestFinished():
            _request_finished(state, order, request, event, out)
        case DecodeStarted():
            order.decode.running = True
        case StageFinished():
            booking.free_stage(state, order, event.worker_id)
        case KvMoved():
            if kv_moved(state, order, event):
                orders.place_borrowers(state, out)
        case KvMoveRefused():
            if kv_move_refused(state, order, event, out):
                orders.place_borrowers(state, out)
        case PrefillFailed():
            booking.withdraw(state, order, out, prefill_runs=False, decode_runs=True)
            _half_failed(state, request, event, [event.stage_id or event.worker_id], out)
        case DecodeFailed():
            booking.withdraw(state, order, out, prefill_runs=True, decode_runs=False)
            failed = [event.worker_id, order.prefill_id] if event.prefill_in_doubt else [event.worker_id]
            _half_failed(state, request, event, failed, out)
        case DecodeRefused():
            booking.withdraw(state, order, out, prefill_runs=True, decode_runs=False)
            _decode_refused(state, request, event, out)
        case _:
            assert_never(event)


def _open_order(state: State, event: OrderEvent) -> Order | None:
    """The order that the event is about, if it is open and the event's worker has that half or stage of it."""
    order = state.orders.get(event.order_id)
    if order is None or order.request_id != event.request_id:
        return None
    match event:
        case PrefillFinished() | PrefillFailed():
            is_its = event.worker_id == order.prefill_id and order.phase == "prefill"
            if not order.decode_id and isinstance(event, PrefillFinished):
                is_its = False  # the end of its request is what counts, and comes first
        case (
            RequestFinished()
            | DecodeStarted()
            | DecodeRefused()
            | DecodeFailed()
            | KvMoved()
            | KvMoveRefused()
        ):
            is_its = event.worker_id == order.answerer_id
        case StageFinished():
            is_its = event.worker_id in order.prefill.staged
        case _:
            assert_never(event)
    return order if is_its else None


# --- the prefill half ---------------------------------------------------------------------------------------


def _prefill_finished(state: State, order: Order, request: Request, event: PrefillFinished) -> None:
    permille = prefill_seen(state, order, event)
    booking.free_prefill(state, order)
    # In an older log only the request has the prompt's length; placed once more, it has tokens of its answer on top.
    known = event.prompt_tokens or (request.event.prompt_tokens if request.placements == 1 else 0)
    if event.similar is not None and event.similar.retained_tokens:
        _free_left_out(state, order, event.similar.retained_tokens, known)
    order.prefill.end_ns = state.at_ns
    order.decode.running = order.decode.running or event.decodes
    learn_prefill(state, event, known, of_request=request.event.prompt_tokens, permille=permille)
    _know_prompt(state, order, request)
    _learn_links(state, order, event)


def _free_left_out(state: State, order: Order, retained_tokens: int, prompt_tokens: int) -> None:
    """The decode worker gets the KV of fewer tokens than the prompt has: it has room for others."""
    worker = state.workers.get(order.decode_id)
    duty = worker.batch if worker is not None else None
    if worker is None or duty is None or order.order_id not in duty.orders:
        return
    half = order.decode
    tokens = min(half.context_tokens, max(0, prompt_tokens - retained_tokens))
    # Whole blocks alone: the answer goes on in the last one that is kept.
    worker.give_back(order, min(half.reserved_blocks, tokens // worker.block_tokens))
    half.context_tokens -= tokens
    duty.context_tokens -= tokens
    state.loads.changed(worker)
    load_changed(state, order.decode_id)


def _know_prompt(state: State, order: Order, request: Request) -> None:
    """The order's prompt was computed whole: its KV may stand in for others."""
    if order.prefill.similar:
        return
    if request.event.sketch:
        state.similar.add(request.event)
    worker = state.workers.get(order.prefill_id)
    if request.event.documents and worker is not None:
        state.similar.add_documents(request.event, worker.block_tokens)


def _learn_links(state: State, order: Order, event: PrefillFinished) -> None:
    """The bandwidths of the fetch and of the push."""
    prefill = order.prefill
    if event.fetch_node_id and event.fetch_node_id in state.stores:
        links = state.ssd_links if prefill.fetch_ssd else state.links
        sharing = prefill.fetch_sharing if prefill.fetch_node_id == event.fetch_node_id else 1
        _learn_link(
            state,
            links,
            order.prefill_node_id,
            event.fetch_node_id,
            event.fetched_bytes,
            event.fetch_ns,
            sharing,
        )
    worker = state.workers.get(event.worker_id)
    least = worker.block_bytes if worker is not None and state.policy.links_by_blocks else 0
    if event.pushed_bytes >= least:
        _learn_link(
            state,
            state.links,
            order.decode_node_id,
            order.prefill_node_id,
            event.pushed_bytes,
            event.push_ns,
            1,
        )


def _learn_link(
    state: State,
    links: dict[str, dict[str, Link]],
    destination: str,
    source: str,
    moved_bytes: int,
    took_ns: int,
    sharing: int,
) -> None:
    if destination not in state.stores:
        return
    known = links.get(destination, {}).get(source)
    link = measured_link(known, moved_bytes, took_ns, sharing, state.at_ns)
    if link is not None:
        links.setdefault(destination, {})[source] = link
        if links is state.links:
            state.loads.link_measured(destination, source, link)


# --- the ends of an order -----------------------------------------------------------------------------------


def _half_failed(
    state: State,
    request: Request,
    event: PrefillFailed | DecodeFailed,
    failed_ids: Sequence[str],
    out: StepOutput,
) -> None:
    """The order is withdrawn; `failed_ids` are the workers to avoid."""
    if event.retryable:
        for failed_id in failed_ids:
            orders.avoid(request, failed_id)
        orders.place(state, request, event.reason, out, event.refusal)
    else:
        orders.fail(state, request, event.reason, out, event.refusal)


def _decode_refused(state: State, request: Request, event: DecodeRefused, out: StepOutput) -> None:
    state.counters.wasted_prefills += 1
    # After the first placement the client may have tokens, so a refusal would break an answer that has begun.
    if request.placements > 1:
        orders.avoid(request, event.worker_id)
        orders.place(state, request, event.reason, out)
    else:
        orders.reject_placed(state, request, "decode_refused", event.reason, event.predicted_tbt_ns, out)


def _request_finished(
    state: State, order: Order, request: Request, event: RequestFinished, out: StepOutput
) -> None:
    prefill_seen(state, order, None)
    _know_prompt(state, order, request)
    answer_seen(state, order, event)
    booking.free_prefill(state, order)
    booking.free_decode(state, order)
    end_loans(state, order, out)
    del state.orders[order.order_id]
    request.order_id = ""
    orders.end(state, request)
    state.counters.finished += 1
    if event.finish_reason != "abort":
        kind = answer_class(request.event.max_tokens)
        learn_answer(
            state.answers.setdefault(kind, Answers()),
            min(event.completion_tokens, request.event.max_tokens),
            event.decode_ns,
        )
