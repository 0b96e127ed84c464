"""Moves of KV between decode workers while they decode: a periodic plan, greedy and limited.

A *debtor* has its cache full, or requests that wait for room in it; a *creditor* has room. The debtor's longest movable
request gives the number of segments that makes the two most productive together, by their learned costs: every request
that joins the debtor's batch in the room that they leave makes one more token a step there; the creditor's steps grow
by the attention to the segments. The decode worker moves them while it decodes, and may refuse.

A lender does not borrow by a plan, and a borrower does not lend by one: so a plan never makes a circle of debts, and a
lent segment never moves on.

Source: Infinite-LLM (arXiv 2401.02669), sections 5.2 and 5.3.
"""

# The idea is Infinite-LLM's greedy planner: the debtor with the smallest batch gives tokens of its longest request to
# the emptiest creditor for as long as both together become faster. A batch is small because its cache is full, so a
# block that leaves is worth the request that joins in its place.
#
# This planner is simpler than the paper's. Its figures are the log's and never stale, so it books the room itself, and
# a refusal is the exception. A debtor has one move at a time, because one thread of its worker pushes. It is harder
# in what may move. In exact numerics attention is merged segment by segment in a fixed order, so whole segments move;
# and of a request only the prompt, since the core does not know how long an answer is at this moment.
#
# Turned down:
# - The paper's rule that a creditor's share must be hidden behind the debtor's own attention. On a CPU a round trip is
#   seldom hidden, and a request that joins gains more than it costs. Where costs were measured, the time that is not
#   hidden counts as a part of the step; the rule stays where they were not.
# - A solver over all debtors and creditors: costs are fits that change, and a greedy plan is explained move by move.
# - Bringing segments home when room comes back: requests are short beside the pause that this takes.
#
# In doubt: the gain is a forecast of the next steps, and the bytes of a move are paid once. A request that ends soon
# after its move has cost more than it brought; nothing here knows how long it has left.

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from halfmoon.conductor.core.explanation import MoveGrounds
from halfmoon.conductor.core.loans import book_move, give_up_move
from halfmoon.conductor.core.orders import arm, place_borrowers
from halfmoon.conductor.core.placement.policies import check_known
from halfmoon.conductor.core.placement.prices import own_ps, share_ps
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Order, PendingMove, WorkerRecord, part_blocks
from halfmoon.conductor.core.state.slow_places import slow_mark
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import MoveKv
from halfmoon.schemas.events import PolicyChanged
from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.numbers import SECOND_NS

TIMER = "moves:plan"
#: Tokens a second are compared in units of this part of one.
_PARTS = 1_000


class BatchLoad(msgspec.Struct, frozen=True):
    """A decode worker's batch, by reservations: `context_tokens` are those that it attends to itself."""

    sequences: int
    context_tokens: int

    def rate(self, worker: WorkerRecord, waits_ns: int = 0) -> int:
        """Thousandths of a token a second; a step waits `waits_ns` for attention elsewhere."""
        step_ns = worker.cost.step_ns(self.sequences, self.context_tokens) + waits_ns
        return self.sequences * _PARTS * SECOND_NS // step_ns if step_ns else 0


class Debtor(msgspec.Struct, frozen=True, kw_only=True):
    """A decode worker that could do more with more room."""

    worker: WorkerRecord
    batch: BatchLoad
    #: Blocks that running requests leave free (negative: they will outgrow the cache).
    free_blocks: int
    #: Blocks and context tokens of each request that waits for room, oldest first; or of one more like its others.
    waiting: list[tuple[int, int]]
    waits: bool

    def after(self, blocks: int) -> BatchLoad:
        """The batch after `blocks` moved away and waiting requests joined."""
        sequences = self.batch.sequences
        context = self.batch.context_tokens - blocks * self.worker.block_tokens
        free = self.free_blocks + blocks
        for need, tokens in self.waiting:
            if need > free or sequences >= self.worker.batch_max:
                break
            sequences, context, free = sequences + 1, context + tokens, free - need
        return BatchLoad(sequences, context)


def keep_planning(state: State, out: StepOutput, *, moving: bool = False) -> None:
    """Set the timer while something might move. Call it when an order was given, too.

    `moving`: a move under way may have to be ended, though nothing else might move. That need not be known for an
    order: the timer is set then. To find it out takes a look at every order.
    """
    period_ns = state.policy.move_period_ns
    if period_ns and state.orders and (state.loads.lenders > 1 or moving):
        arm(state, TIMER, state.at_ns + period_ns, out)


def _moving(state: State) -> bool:
    """A move is under way, and there is a limit to how long it may take."""
    moves = (order.decode.move for order in state.orders.values())
    return state.policy.move_answer_ns > 0 and any(move is not None for move in moves)


def policy_changed(state: State, event: PolicyChanged, out: StepOutput) -> None:
    """Another policy is in force: it may plan where the last one did not."""
    check_known(event.policy)
    state.policy = event.policy
    state.members_changed()
    keep_planning(state, out, moving=_moving(state))


def plan_moves(state: State, out: StepOutput) -> None:
    """Order the moves that make the cluster more productive, and set the timer again."""
    _give_up_overdue(state, out)
    if state.policy.move_period_ns:
        workers = [one for one in state.loads.decode.workers if one.lends and one.layout.segment_tokens]
        debtors = [found for worker in workers if (found := debtor_of(state, worker)) is not None]
        for debtor in sorted(debtors, key=lambda one: (one.batch.sequences, one.worker.worker_id)):
            # Asked again for each debtor: an earlier one of this plan may have taken a creditor's room.
            creditors = [worker for worker in workers if _may_lend(state, worker)]
            creditors.sort(key=lambda one: (use_percent(one), one.worker_id))
            best = None if debtor.worker.lent else _best_move(state, debtor, creditors)
            if best is not None:
                _order_move(state, *best, out)
    keep_planning(state, out, moving=_moving(state))


def _give_up_overdue(state: State, out: StepOutput) -> None:
    """A decode worker that answers one later finds that nobody waits for it; should it have given its blocks away, the
    lender refuses that row, and the request is placed again.
    """
    limit_ns = state.policy.move_answer_ns
    pending = [order for order in state.orders.values() if order.decode.move is not None] if limit_ns else []
    overdue = [
        one for one in pending if one.decode.move and state.at_ns - one.decode.move.since_ns >= limit_ns
    ]
    for order in overdue:
        give_up_move(state, order, out)
    if overdue:
        place_borrowers(state, out)


def use_percent(worker: WorkerRecord) -> int:
    return worker.reserved_blocks * 100 // max(1, worker.kv_blocks)


def _orders(state: State, worker: WorkerRecord) -> Iterator[Order]:
    return (state.orders[order_id] for order_id in worker.orders)


def _may_lend(state: State, worker: WorkerRecord) -> bool:
    borrows = any(order.decode.loans or order.decode.move is not None for order in _orders(state, worker))
    # A borrower does not lend, or debts could go round in a circle.
    room = use_percent(worker) < state.policy.move_to_percent
    return room and not borrows and slow_mark(state, worker) is None


def attended_tokens(state: State, worker: WorkerRecord) -> int:
    """Tokens of context that the worker itself attends to; lenders attend to the others."""
    away = sum(
        part_blocks(worker.layout, loan) for order in _orders(state, worker) for loan in order.decode.loans
    )
    return worker.context_tokens + (sum(worker.lent.values()) - away) * worker.block_tokens


def debtor_of(state: State, worker: WorkerRecord) -> Debtor | None:
    """The worker as one that wants room; None: it has enough, or is held up by something else."""
    orders = list(_orders(state, worker))
    # A lender makes no debts, and a worker with a move under way pushes with the one thread that it has for that.
    if worker.lent or any(order.decode.move is not None for order in orders):
        return None
    joined = [order.decode for order in orders if order.decode.running]
    free = worker.kv_blocks - sum(half.reserved_blocks for half in joined)
    waiting: list[tuple[int, int]] = []
    for half in [order.decode for order in orders if not order.decode.running]:
        if half.reserved_blocks > free:
            waiting.append((half.reserved_blocks, half.context_tokens))
        else:
            joined.append(half)
            free -= half.reserved_blocks
    if not joined or len(joined) >= worker.batch_max:
        return None
    # Nobody waits yet. A move takes many steps, so room is made before the cache is full, for a typical request.
    waits = bool(waiting)
    if not waits:
        if use_percent(worker) < state.policy.move_from_percent:
            return None
        waiting.append(_one_more(state))
    away = sum(part_blocks(worker.layout, loan) for half in joined for loan in half.loans)
    context = sum(half.context_tokens for half in joined) - away * worker.block_tokens
    return Debtor(
        worker=worker,
        batch=BatchLoad(len(joined), max(0, context)),
        free_blocks=free,
        waiting=waiting,
        waits=waits,
    )


def _one_more(state: State) -> tuple[int, int]:
    """Blocks and context tokens of a request that might come: the median of all orders."""
    found = sorted(
        (order.decode.reserved_blocks, order.decode.context_tokens) for order in state.orders.values()
    )
    return found[(len(found) - 1) // 2]


def _best_move(
    state: State, debtor: Debtor, creditors: list[WorkerRecord]
) -> tuple[Order, MoveGrounds] | None:
    """The best move of the debtor's longest request that has one, to the emptiest worker that has room for it."""
    owner = debtor.worker
    others = [one for one in creditors if one is not owner and one.layout == owner.layout]
    running = [order for order in _orders(state, owner) if order.decode.running and order.phase == "decode"]
    for order in sorted(running, key=lambda one: (-one.decode.context_tokens, one.order_id)):
        for lender in others:
            segments, before, after = _best_size(state, debtor, order, lender)
            if segments:
                grounds = _grounds(state, debtor, order, lender, segments, (before, after))
                passed = (one for one in others if one is not lender)
                grounds.others = {one.worker_id: use_percent(one) for one in passed}
                return order, grounds
    return None


def _best_size(state: State, debtor: Debtor, order: Order, lender: WorkerRecord) -> tuple[int, int, int]:
    """Segments to move, as few as give the highest rate of both; with the rates before and after. 0: none gains."""
    owner, policy = debtor.worker, state.policy
    segment_blocks = owner.layout.segment_blocks
    reserve = lender.kv_blocks * policy.move_reserve_percent // 100
    own = movable_segments(state, order)
    most = min(own, (lender.kv_blocks - lender.reserved_blocks - reserve) // segment_blocks)
    held, rows = _held_by(state, owner, lender, order)
    theirs = BatchLoad(
        sum(one.decode.running for one in _orders(state, lender)), attended_tokens(state, lender)
    )
    before = debtor.batch.rate(owner) + theirs.rate(lender)
    best, after, joined = 0, before, debtor.after(0).sequences
    for segments in range(1, most + 1):
        blocks = segments * segment_blocks
        away_ps = share_ps(owner, lender, rows, held + segments)
        here = debtor.batch.context_tokens - blocks * owner.block_tokens
        # The lender's share should be hidden behind the owner's own. Where its time was measured, the time that is not
        # hidden is a part of each step; where it was not, the share must not take longer.
        if here < 0 or (not owner.priced and away_ps > own_ps(owner, here)):
            break
        theirs_then = BatchLoad(theirs.sequences, theirs.context_tokens + blocks * owner.block_tokens)
        ours_then = debtor.after(blocks)
        waits_ns = max(0, away_ps - own_ps(owner, ours_then.context_tokens)) // 1_000 if owner.priced else 0
        rate = ours_then.rate(owner, waits_ns) + theirs_then.rate(lender)
        # A move is for requests that join in its room: attention elsewhere alone is not worth its bytes.
        if ours_then.sequences > joined:
            joined = ours_then.sequences
            if rate > after:
                best, after = segments, rate
    return best, before, after


def _held_by(state: State, owner: WorkerRecord, lender: WorkerRecord, order: Order) -> tuple[int, int]:
    """The owner's segments at the lender, and the number of sequences that they belong to, `order` among them."""
    loans = [
        (one.order_id, loan.segments)
        for one in _orders(state, owner)
        for loan in one.decode.loans
        if loan.worker_id == lender.worker_id
    ]
    rows = dict.fromkeys([order.order_id, *(each for each, _ in loans)])
    return sum(segments for _, segments in loans), len(rows)


def movable_segments(state: State, order: Order) -> int:
    """Whole segments of the prompt that are still the owner's, without the one in which its answer begins."""
    worker = state.workers[order.decode_id]
    prompt = state.requests[order.request_id].event.prompt_tokens
    return (prompt - 1) // worker.layout.segment_tokens - sum(loan.segments for loan in order.decode.loans)


def _grounds(
    state: State,
    debtor: Debtor,
    order: Order,
    lender: WorkerRecord,
    segments: int,
    rates: tuple[int, int],
) -> MoveGrounds:
    owner = debtor.worker
    segment_blocks = owner.layout.segment_blocks
    held, rows = _held_by(state, owner, lender, order)
    return MoveGrounds(
        plan_id=f"{state.seq}-{order.order_id}",
        request_id=order.request_id,
        order_id=order.order_id,
        seq=state.seq,
        at_ns=state.at_ns,
        owner_id=owner.worker_id,
        lender_id=lender.worker_id,
        segments=segments,
        tokens=segments * owner.layout.segment_tokens,
        batch=debtor.batch.sequences,
        waiting=len(debtor.waiting) if debtor.waits else 0,
        proactive=not debtor.waits,
        owner_use=use_percent(owner),
        lender_use=use_percent(lender),
        joining=debtor.after(segments * segment_blocks).sequences - debtor.batch.sequences,
        rate_before=rates[0],
        rate_after=rates[1],
        away_ns=share_ps(owner, lender, rows, held + segments) // 1_000,
        own_ns=own_ps(owner, debtor.batch.context_tokens - segments * owner.layout.segment_tokens) // 1_000,
        others={},
    )


def _order_move(state: State, order: Order, grounds: MoveGrounds, out: StepOutput) -> None:
    loan = KvPart(worker_id=grounds.lender_id, segments=grounds.segments)
    book_move(state, order, PendingMove(plan_id=grounds.plan_id, loan=loan, since_ns=state.at_ns))
    out.append(
        MoveKv(
            plan_id=grounds.plan_id,
            order_id=order.order_id,
            request_id=order.request_id,
            worker_id=order.decode_id,
            lender_id=grounds.lender_id,
            segments=grounds.segments,
            tokens_per_step=state.policy.move_step_tokens,
        )
    )
    if out.explains(order.request_id):
        out.moves.append(grounds)
