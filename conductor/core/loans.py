"""The ledger of KV that other workers hold for an order (its loans and its cache): booked there until the order ends.

A move is booked at the lender the moment that it is ordered. Once the KV is there it is a loan like any other, and the
owner's room grows by it; where it is refused, nothing stays booked.
"""

# The problem is Infinite-LLM's: memory of one worker serves another, and both must agree about it. There each instance
# owns its memory and grants or refuses a debtor's request (`try_move_kvcache`), and a central manager plans on figures
# that may be stale. Here the ledger is a function of the log. A plan never spends the same room twice, and nothing is
# rebuilt from heartbeats after a crash. A lender may still refuse: its process may have restarted in the meantime.
#
# Each entry stands twice, as in bookkeeping: in the order (`loans`, `cache`, `move`) and at the lender (`holds`).
# The order's side finds its lenders without a search, the lender's side is its room, and invariants I23 to I33
# compare the two.
#
# Turned down: booking when the KV has arrived. While it travels another order could take the room.
#
# In doubt: at attention workers the room of the longest possible answer is booked from the start. Most answers end
# earlier, so a part of every ledger is room that stays empty.

from __future__ import annotations

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Order, PendingMove, WorkerRecord, part_blocks
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import CancelOrder, EndMove
from halfmoon.schemas.events import KvMoved, KvMoveRefused


def held_for(state: State, order: Order) -> list[tuple[WorkerRecord, int]]:
    """Holders that are still members, each with the blocks that it holds or has promised for the order."""
    half = order.decode
    moving = [half.move.loan] if half.move is not None else []
    parts = [*half.loans, *moving, *half.cache]
    holders = [(state.workers.get(part.worker_id), part) for part in parts]
    return [
        (holder, part_blocks(holder.layout, part, half.cache_blocks))
        for holder, part in holders
        if holder is not None
    ]


def book_loans(state: State, order: Order) -> None:
    """Reserve the order's blocks at each holder."""
    for lender, blocks in held_for(state, order):
        _book(state, order, lender, blocks)


def _book(state: State, order: Order, lender: WorkerRecord, blocks: int) -> None:
    assert lender.holds is not None, (lender, order)
    lender.holds.orders[order.order_id] = lender.lent.get(order.order_id, 0) + blocks
    lender.reserved_blocks += blocks
    state.loads.changed(lender)


def end_loans(state: State, order: Order, out: StepOutput) -> None:
    """The order is over: each holder gets a CancelOrder, and its blocks are free."""
    for lender, _ in held_for(state, order):
        # A holder that restarted has nothing to give back. One with two loans was handled at the first of them.
        if lender.holds is None or order.order_id not in lender.lent:
            continue
        lender.reserved_blocks -= lender.holds.orders.pop(order.order_id)
        state.loads.changed(lender)
        out.append(
            CancelOrder(order_id=order.order_id, request_id=order.request_id, worker_id=lender.worker_id)
        )


# --- moves --------------------------------------------------------------------------------------------------


def book_move(state: State, order: Order, move: PendingMove) -> None:
    """Reserve the room of segments that are to go to a lender."""
    assert order.decode.move is None, order
    order.decode.move = move
    lender = state.workers[move.loan.worker_id]
    _book(state, order, lender, part_blocks(lender.layout, move.loan))


def end_move(state: State, order: Order) -> None:
    """The move came to nothing: its booking ends, if the lender is still the process that was asked."""
    move = order.decode.move
    assert move is not None, order
    order.decode.move = None
    lender = state.workers.get(move.loan.worker_id)
    if lender is None or lender.holds is None or order.order_id not in lender.lent:
        return
    # Loans of the same order may lie at this lender: only the move's own blocks go.
    blocks, held = part_blocks(lender.layout, move.loan), lender.holds.orders
    held[order.order_id] -= blocks
    if not held[order.order_id]:
        del held[order.order_id]
    lender.reserved_blocks -= blocks
    state.loads.changed(lender)


def kv_moved(state: State, order: Order, event: KvMoved) -> bool:
    """Make the move a loan, and give its blocks back to the owner. False: the event is of another move, or repeated."""
    half, move = order.decode, order.decode.move
    if move is None or move.plan_id != event.plan_id:
        return False
    # The moved segments follow those that are away already: parts stay a prefix of the sequence.
    half.move = None
    half.loans = [*half.loans, move.loan]
    half.moved_loans += 1
    owner = state.workers[order.decode_id]
    blocks = part_blocks(owner.layout, move.loan)
    owner.give_back(order, blocks)
    state.loads.changed(owner)
    counters = state.counters
    counters.moves += 1
    counters.moved_tokens += blocks * owner.block_tokens
    counters.moved_bytes += event.moved_bytes
    return True


def kv_move_refused(state: State, order: Order, event: KvMoveRefused, out: StepOutput) -> bool:
    """The request goes on as it was, and nothing stays booked. False: the event is of another move, or repeated."""
    move = order.decode.move
    if move is None or move.plan_id != event.plan_id:
        return False
    give_up_move(state, order, out)
    return True


def give_up_move(state: State, order: Order, out: StepOutput) -> None:
    """End the booking, and have the lender drop the tokens that it got."""
    move = order.decode.move
    assert move is not None, order
    end_move(state, order)
    state.counters.moves_refused += 1
    # With the booking gone, the end of the order need not reach this lender. So its hold ends now.
    if move.loan.worker_id in state.workers:
        out.append(EndMove(plan_id=move.plan_id, order_id=order.order_id, worker_id=move.loan.worker_id))
