"""The invariants of the state, true after every step. A violation is a fault of ours; it names the values.

Each has a number, which its message begins with and `docs/invariants.md` lists.
"""

from __future__ import annotations

from halfmoon.conductor.core import moves
from halfmoon.conductor.core.loans import held_for
from halfmoon.conductor.core.state.core_state import FINISHED_MAX, State
from halfmoon.conductor.core.state.records import BatchDuty, Order, PromptDuty, WorkerRecord
from halfmoon.conductor.core.state.similar_index import DOCUMENTS_KNOWN_MAX, PROMPTS_MAX
from halfmoon.schemas.keys import split_keys


def check(state: State) -> None:
    """Raises AssertionError."""
    _check_orders(state)
    check_ledger(state)
    _check_requests(state)
    _check_load(state)
    _check_members(state)
    state.index.check()
    _check_similar(state)
    assert state.index.node_ids == sorted(state.stores), (
        "I38 index",
        state.index.node_ids,
        list(state.stores),
    )


def check_ledger(state: State) -> None:
    """The invariants of loans and moves alone: cheap enough for every step. Raises AssertionError."""
    for order in state.orders.values():
        if (
            order.decode.loans
            or order.decode.cache
            or order.decode.move is not None
            or order.decode.moved_loans
        ):
            _check_borrowed(state, order, state.workers[order.decode_id])
    for worker in state.workers.values():
        if worker.holds is not None:
            _check_loans(state, worker)


def _check_orders(state: State) -> None:
    for order_id, order in state.orders.items():
        request = state.requests.get(order.request_id)
        assert request is not None, ("I1 order of no request", order)
        assert request.order_id == order_id, ("I2 a second order", order, request)
        prefills = order.phase == "prefill"
        if order.decode_id:
            decode = state.workers.get(order.decode_id)
            assert decode is not None, ("I3 decode half nowhere", order)
            assert order_id in decode.orders, ("I3 decode half nowhere", order)
        else:
            assert prefills, ("I124 computed, and nobody to answer it", order)
            assert request.event.max_tokens == 1, ("I124 tokens that nobody decodes", order)
        prefill = state.workers.get(order.prefill_id)
        held = prefill is not None and order_id in prefill.prefills
        assert held == prefills, ("I4 prefill half", order.phase, order)
        # Else a stage is booked on a worker that will never report its end.
        assert prefills or not order.prefill.staged, ("I5 stages after the prefill", order)
        for worker_id in order.prefill.staged:
            stage = state.workers.get(worker_id)
            assert stage is not None, ("I6 a stage nowhere", order)
            assert order_id in stage.orders, ("I6 a stage nowhere", order)
        leaves = order_id in state.leaving.get(order.prefill.fetch_node_id, {})
        assert leaves == (prefills and order.prefill.fetch_node_id != ""), ("I7 fetch", order)
    for node_id, ends in state.leaving.items():
        assert ends, ("I8 no transfer", node_id)
        for order_id in ends:
            assert state.orders[order_id].prefill.fetch_node_id == node_id, (
                "I9 transfer of no order",
                node_id,
                order_id,
            )


def _check_borrowed(state: State, order: Order, decode: WorkerRecord) -> None:
    """Each block has one place: at a lender, on its way to one, or at the decode worker."""
    half, held = order.decode, held_for(state, order)
    moving = [half.move.loan] if half.move is not None else []
    assert len(held) == len(half.loans) + len(moving) + len(half.cache), ("I23 borrowed of nobody", order)
    # Those of whole prompt segments have all heads; the others have them together, from the next segment on.
    ends = [place for place in half.cache if not place.segments]
    heads = sum(len(place.heads(decode.layout.kv_heads)) for place in ends)
    assert heads == (decode.layout.kv_heads if half.cache else 0), ("I24 heads of its cache", order)
    first_segments = [sum(place.segments for place in half.cache[:i]) for i in range(len(half.cache))]
    assert [place.first_segment for place in half.cache] == first_segments, (
        "I25 segments of its cache",
        order,
    )
    for lender, _ in held:
        assert order.order_id in lender.lent, ("I26 borrowed and not lent", order)
        assert lender is not decode, ("I27 borrowed of itself", order)
    assert 0 <= half.moved_loans <= len(half.loans), ("I28 moved loans", order)
    if not (moving or half.moved_loans):
        return
    assert half.running, ("I29 moves and does not run", order)
    assert moves.movable_segments(state, order) >= sum(loan.segments for loan in moving), (
        "I30 moved twice",
        order,
    )
    # No part moves on, and no debts go round: a worker that has moved KV away holds no moved KV.
    for order_id in decode.lent:
        other = state.orders[order_id].decode
        made = other.loans[len(other.loans) - other.moved_loans :]
        made += [other.move.loan] if other.move is not None else []
        lenders = [loan.worker_id for loan in made]
        assert decode.worker_id not in lenders, ("I31 a chain of moves", decode.worker_id, order, other)


def _check_requests(state: State) -> None:
    for request_id, request in state.requests.items():
        assert request_id == request.event.request_id, ("I10 another id", request_id, request)
        assert request_id not in state.finished, ("I11 ended and alive", request_id)
        parked = request_id in state.parked
        assert request.placements >= 1 or parked, ("I12 placed never", request)
        assert parked == (request.order_id == ""), ("I13 neither placed nor parked, or both", request)
        if parked:
            assert f"unplaced:{request_id}:{request.placements}" in state.timers, (
                "I14 parked for ever",
                request,
            )
        else:
            assert request.order_id in state.orders, ("I15 order unknown", request)
    for request_id in state.parked:
        assert request_id in state.requests, ("I16 parked and gone", request_id)
    assert len(state.finished) <= FINISHED_MAX, ("I17 too many remembered", len(state.finished))


def _check_similar(state: State) -> None:
    prompts = state.similar.prompts
    assert len(prompts) <= PROMPTS_MAX, ("I115 too many known", len(prompts))
    documents = len(state.similar.documents)
    assert documents <= DOCUMENTS_KNOWN_MAX, ("I123 too many documents known", documents)
    for name, prompt in prompts.items():
        keys = split_keys(prompt.block_keys)
        assert name == keys[-1].hex(), ("I116 another name", name, keys[-1].hex())


def _check_load(state: State) -> None:
    for worker_id, worker in state.workers.items():
        if worker.prompts is not None:
            _check_prompts(state, worker_id, worker.prompts)
        blocks = sum(worker.lent.values())
        if worker.batch is not None:
            blocks += _check_batch(state, worker_id, worker.batch)
        assert worker.reserved_blocks == blocks, (
            "I18 reserved load",
            worker_id,
            worker.reserved_blocks,
            blocks,
        )
        cost = worker.cost
        for name in cost.__struct_fields__:
            assert getattr(cost, name) >= 0, ("I19 negative cost", name, cost)


def _check_prompts(state: State, worker_id: str, duty: PromptDuty) -> None:
    orders = [state.orders[order_id] for order_id in duty.orders]
    own = [order for order in orders if order.prefill_id == worker_id and order.phase == "prefill"]
    others = [order for order in orders if worker_id in order.prefill.staged]
    assert len(own) + len(others) == len(orders), ("I20 computes no part of it", worker_id, duty)
    reserved = duty.reserved_ns, duty.pending_blocks, duty.prompt_blocks
    expected = (
        sum(order.prefill.reserved_ns for order in orders),
        sum(order.prefill.pending_blocks for order in own),
        sum(order.prefill.prompt_blocks for order in own),
    )
    assert reserved == expected, ("I18 reserved load", worker_id, reserved, expected)
    assert duty.head_since_ns <= state.at_ns, ("I21 began later", worker_id, duty)


def _check_batch(state: State, worker_id: str, duty: BatchDuty) -> int:
    """KV blocks that are reserved for the worker's own sequences."""
    orders = [state.orders[order_id] for order_id in duty.orders]
    assert all(order.decode_id == worker_id for order in orders), ("I22 decodes of others", worker_id, duty)
    context = sum(order.decode.context_tokens for order in orders)
    assert duty.context_tokens == context, ("I18 reserved load", worker_id, duty.context_tokens, context)
    return sum(order.decode.reserved_blocks for order in orders)


def _check_loans(state: State, worker: WorkerRecord) -> None:
    """Every loan is in its order too, and fits beside the future blocks of the worker's own borrowers."""
    promised = 0
    for order_id, blocks in worker.lent.items():
        assert order_id in state.orders, ("I32 lent to no order", worker.worker_id, order_id)
        held = held_for(state, state.orders[order_id])
        borrowed = [each for lender, each in held if lender is worker]
        assert borrowed, ("I33 lent and not borrowed", worker.worker_id, order_id, blocks)
        assert sum(borrowed) == blocks, (
            "I33 lent and not borrowed",
            worker.worker_id,
            order_id,
            blocks,
            borrowed,
        )
        promised += blocks
    for order_id, blocks in worker.orders.items():
        # A placement loan covers the longest possible request; a later move covers its current length.
        order = state.orders[order_id]
        if len(order.decode.loans) > order.decode.moved_loans:
            promised += blocks
    assert promised <= worker.kv_blocks, ("I34 promised twice", worker.worker_id, promised)


def _check_members(state: State) -> None:
    assert list(state.workers) == sorted(state.workers), ("I35 not sorted", list(state.workers))
    for worker in state.workers.values():
        assert worker.draining or not worker.change.becomes, ("I36 changes its role and takes orders", worker)
    members = [
        *((worker.role, worker.worker_id, worker.incarnation) for worker in state.workers.values()),
        *(("store", store.node_id, store.incarnation) for store in state.stores.values()),
        *(("frontend", frontend.frontend_id, frontend.incarnation) for frontend in state.frontends.values()),
    ]
    for role, process_id, incarnation in members:
        assert f"lost:{role}:{process_id}:{incarnation}" in state.timers, ("I37 never lost", role, process_id)
