"""The invariants of the state, true after every step. A violation is a fault of ours; it names the values."""

from __future__ import annotations

from halfmoon.conductor.core.records import WorkerRecord, loan_blocks
from halfmoon.conductor.core.role_rules import expected_load
from halfmoon.conductor.core.state import FINISHED_MAX, State


def check(state: State) -> None:
    """Raises AssertionError."""
    _check_orders(state)
    _check_requests(state)
    _check_load(state)
    _check_members(state)
    state.index.check()
    assert state.index.node_ids == sorted(state.stores), ("index", state.index.node_ids, list(state.stores))


def _check_orders(state: State) -> None:
    for order_id, order in state.orders.items():
        request = state.requests.get(order.request_id)
        assert request is not None, ("order of no request", order)
        assert request.order_id == order_id, ("a second order", order, request)
        decode = state.workers.get(order.decode_id)
        assert decode is not None, ("decode half nowhere", order)
        assert order_id in decode.orders, ("decode half nowhere", order)
        prefill = state.workers.get(order.prefill_id)
        held = prefill is not None and order_id in prefill.orders
        assert held == (order.phase == "prefill"), ("prefill half", order.phase, order)
        for loan in order.loans:
            lender = state.workers.get(loan.worker_id)
            assert lender is not None, ("borrowed of nobody", order)
            assert order_id in lender.lent, ("borrowed and not lent", order)
            assert lender is not decode, ("borrowed of itself", order)
        leaves = order_id in state.leaving.get(order.fetch_node_id, {})
        assert leaves == (order.phase == "prefill" and order.fetch_node_id != ""), ("fetch", order)
    for node_id, ends in state.leaving.items():
        assert ends, ("empty", node_id)
        for order_id in ends:
            assert state.orders[order_id].fetch_node_id == node_id, (
                "transfer of no order",
                node_id,
                order_id,
            )


def _check_requests(state: State) -> None:
    for request_id, request in state.requests.items():
        assert request_id == request.event.request_id
        assert request_id not in state.finished, ("ended and alive", request_id)
        parked = request_id in state.parked
        assert request.placements >= 1 or parked, request
        assert parked == (request.order_id == ""), ("neither placed nor parked, or both", request)
        if parked:
            assert f"unplaced:{request_id}:{request.placements}" in state.timers, ("parked for ever", request)
        else:
            assert request.order_id in state.orders, ("order unknown", request)
    for request_id in state.parked:
        assert request_id in state.requests, ("parked and gone", request_id)
    assert len(state.finished) <= FINISHED_MAX


def _check_load(state: State) -> None:
    for worker_id, worker in state.workers.items():
        orders = [state.orders[order_id] for order_id in worker.orders]
        expected = expected_load(worker, orders)
        _check_loans(state, worker)
        reserved = (
            worker.reserved_ns,
            worker.pending_blocks,
            worker.prompt_blocks,
            worker.reserved_blocks - sum(worker.lent.values()),
            worker.context_tokens,
        )
        assert reserved == expected, ("reserved load", worker_id, reserved, expected)
        assert worker.head_since_ns <= state.at_ns, worker
        cost = worker.cost
        for name in cost.__struct_fields__:
            assert getattr(cost, name) >= 0, (name, cost)


def _check_loans(state: State, worker: WorkerRecord) -> None:
    """All that is lent was borrowed, and there is room for it beside what the worker's own borrowers will need."""
    promised = 0
    for order_id, blocks in worker.lent.items():
        assert order_id in state.orders, ("lent to no order", worker.worker_id, order_id)
        loans = [loan for loan in state.orders[order_id].loans if loan.worker_id == worker.worker_id]
        borrowed = [loan_blocks(worker, loan) for loan in loans]
        assert borrowed == [blocks], ("lent and not borrowed", worker.worker_id, order_id, blocks, borrowed)
        promised += blocks
    for order_id, blocks in worker.orders.items():
        if worker.role == "decode" and state.orders[order_id].loans:
            promised += blocks
    assert promised <= worker.kv_blocks or not worker.lends, ("promised twice", worker.worker_id, promised)


def _check_members(state: State) -> None:
    assert list(state.workers) == sorted(state.workers), ("not sorted", list(state.workers))
    members = [
        *((worker.role, worker.worker_id, worker.incarnation) for worker in state.workers.values()),
        *(("store", store.node_id, store.incarnation) for store in state.stores.values()),
        *(("frontend", frontend.frontend_id, frontend.incarnation) for frontend in state.frontends.values()),
    ]
    for role, process_id, incarnation in members:
        assert f"lost:{role}:{process_id}:{incarnation}" in state.timers, ("never lost", role, process_id)
