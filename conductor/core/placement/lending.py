"""Lending: a request that no decode worker's own cache holds is spread over several.

The prompt's first segments lie at *lenders*, which attend to them (`workers.attention`); what follows, and every new
token, is the decode worker's own. Room is booked where it is: at the lenders the moment the order is given. A loan ends
with its order, and with the worker at either end of it.

Source: Infinite-LLM (arXiv 2401.02669), sections 4 and 5: debtors, creditors, and a ledger of both. Here a loan is made
when a request is placed; it is not moved while it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.state.slow_places import slow_mark
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.lending import KvPart

#: Blocks that a worker could give to one more request.
BlocksOf = Callable[[WorkerRecord], int]


class Borrowing(NamedTuple):
    """A decode worker that could take a request with the help of others, and whether they have room for it now."""

    worker: WorkerRecord
    loans: list[KvPart]
    room: bool


def borrowings(state: State, request: RequestArrived, *, avoid: Sequence[str] = ()) -> Iterator[Borrowing]:
    """One for each decode worker that could take the request with the help of others, by id."""
    lenders = [worker for worker in state.loads.decode.workers if worker.lends]
    trusted = [worker for worker in lenders if worker.worker_id not in avoid]
    # With the others' help rather than alone: who failed a request may still hold a part of it.
    helpers = trusted if len(trusted) > 1 else lenders
    tokens = request.prompt_tokens + request.max_tokens
    for worker in trusted or lenders:
        if tokens > worker.context_tokens_max or request.prompt_tokens > state.pool_tokens(worker):
            continue
        others = [one for one in helpers if one is not worker and one.layout == worker.layout]
        quick = [one for one in others if slow_mark(state, one) is None]
        loans = None
        if len(worker.orders) < worker.batch_max:
            # Slow ones only where the others have no room now.
            loans = _loans(worker, quick, request, tokens, _free_blocks)
            if loans is None and len(quick) < len(others):
                loans = _loans(worker, others, request, tokens, _free_blocks)
        room = loans is not None
        if loans is None:
            loans = _loans(worker, others, request, tokens, lambda one: one.kv_blocks)
        if loans is not None:
            yield Borrowing(worker, loans, room)


def _loans(
    worker: WorkerRecord,
    others: list[WorkerRecord],
    request: RequestArrived,
    tokens: int,
    blocks_of: BlocksOf,
) -> list[KvPart] | None:
    """As few segments elsewhere as possible, at as few lenders as possible; None when it does not fit."""
    segment_tokens = worker.layout.segment_tokens
    if not segment_tokens:
        return None
    segment_blocks = segment_tokens // worker.block_tokens
    blocks = -(-tokens // worker.block_tokens)
    missing = -(-(blocks - blocks_of(worker)) // segment_blocks)
    # The last token of a prompt is decoded here, so its segment stays here.
    if missing > (request.prompt_tokens - 1) // segment_tokens:
        return None
    loans = []
    for one in sorted(others, key=lambda one: (-blocks_of(one), one.worker_id)):
        segments = min(missing, blocks_of(one) // segment_blocks)
        if segments > 0:
            loans.append(KvPart(worker_id=one.worker_id, segments=segments))
            missing -= segments
    return loans if missing <= 0 else None


def _free_blocks(worker: WorkerRecord) -> int:
    return worker.kv_blocks - worker.reserved_blocks


def longest_with_loans(state: State) -> int:
    """Tokens of the longest request, prompt and answer together, that the lenders could hold, were they empty."""
    lenders = [
        worker for worker in state.loads.decode.workers if worker.lends and worker.layout.segment_tokens
    ]
    if len(lenders) < 2:
        return 0
    first = lenders[0]
    segment_blocks = first.layout.segment_blocks
    alike = [worker for worker in lenders if worker.layout == first.layout]
    # One worker keeps all of its cache for its own part, which is best the one that would waste the most of it.
    own = max(worker.kv_blocks - worker.kv_blocks // segment_blocks * segment_blocks for worker in alike)
    whole = sum(worker.kv_blocks // segment_blocks * segment_blocks for worker in alike)
    return min((whole + own) * first.block_tokens, max(worker.context_tokens_max for worker in alike))
