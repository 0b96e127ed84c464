"""Lending: a request that no decode worker's own cache holds is spread over several.

The prompt's first segments lie at *lenders*, which attend to them (`workers.attention`); what follows, and every new
token, is the decode worker's own. Room is booked where it is: at the lenders the moment the order is given. A loan ends
with its order, and with the worker at either end of it.

Source: Infinite-LLM (arXiv 2401.02669), sections 4 and 5: debtors, creditors, and a ledger of both. Here a loan is made
when a request is placed; it is not moved while it is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from halfmoon.conductor.core.placement.part_choice import (
    BlocksOf,
    by_speed,
    emptiest_first,
    free_blocks,
    kv_blocks,
    longest_in_parts,
    shares,
)
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.lending import KvPart


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
        loans = None
        if len(worker.orders) < worker.batch_max:
            for some in by_speed(state, others):
                loans = _loans(worker, some, request, free_blocks)
                if loans is not None:
                    break
        room = loans is not None
        if loans is None:
            loans = _loans(worker, others, request, kv_blocks)
        if loans is not None:
            yield Borrowing(worker, loans, room)


def _loans(
    worker: WorkerRecord, others: Sequence[WorkerRecord], request: RequestArrived, room: BlocksOf
) -> list[KvPart] | None:
    """As few segments elsewhere as possible, at as few lenders as possible; None when it does not fit."""
    layout = worker.layout
    if not layout.segment_tokens:
        return None
    # The last token of a prompt is decoded here, so its segment stays here.
    most = (request.prompt_tokens - 1) // layout.segment_tokens
    blocks = layout.blocks(request.prompt_tokens + request.max_tokens)
    found = shares(blocks, worker, emptiest_first(others, room), room, least=0, most=most)
    if found is None:
        return None
    return [KvPart(worker_id=one.worker_id, segments=segments) for one, segments in found]


def longest_with_loans(state: State) -> int:
    """Tokens of the longest request, prompt and answer together, that the lenders could hold, were they empty."""
    lenders = [one for one in state.loads.decode.workers if one.lends and one.layout.segment_tokens]
    if len(lenders) < 2:
        return 0
    first = lenders[0]
    alike = [worker for worker in lenders if worker.layout == first.layout]
    longest = longest_in_parts(alike) * first.block_tokens
    return min(longest, max(worker.context_tokens_max for worker in alike))
