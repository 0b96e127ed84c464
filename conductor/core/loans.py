"""The ledger of loans: what an order borrows is booked at its lenders, until the order ends."""

from __future__ import annotations

from halfmoon.conductor.core.records import Order, loan_blocks
from halfmoon.conductor.core.state import State
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import CancelOrder


def book_loans(state: State, order: Order) -> None:
    """Reserve at the lenders what an order of theirs borrows."""
    for loan in order.loans:
        lender = state.workers[loan.worker_id]
        blocks = loan_blocks(lender, loan)
        lender.lent[order.order_id] = blocks
        lender.reserved_blocks += blocks
        state.loads.changed(lender)


def end_loans(state: State, order: Order, out: StepOutput) -> None:
    """The order is over: its lenders are told, and their blocks are free."""
    for loan in order.loans:
        lender = state.workers.get(loan.worker_id)
        # A lender that left, or started again since, has nothing to give back.
        if lender is None or order.order_id not in lender.lent:
            continue
        lender.reserved_blocks -= lender.lent.pop(order.order_id)
        state.loads.changed(lender)
        out.append(
            CancelOrder(order_id=order.order_id, request_id=order.request_id, worker_id=loan.worker_id)
        )
