"""Room to come: when enough will have ended for a request that finds none now, and where it will be then.

It is searched by the predicted ends of the orders that are there: whatever ends gives back its blocks at its decode
worker and at all who hold some for it, and its place in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from halfmoon.conductor.core.placement.cache_places import place_blocks, places_for
from halfmoon.conductor.core.placement.candidates import decode_fits, has_room
from halfmoon.conductor.core.placement.lending import borrowings
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import answer_class, expected_tokens
from halfmoon.conductor.core.state.records import Order, WorkerRecord, loan_blocks
from halfmoon.schemas.decisions import CachePlace, Loan
from halfmoon.schemas.events import RequestArrived


class RoomToCome(msgspec.Struct, kw_only=True):
    """The soonest room for a request: when, who decodes it then, and blocks by who holds them."""

    at_ns: int
    worker_id: str
    blocks: dict[str, int]
    #: Requests that are to have room before it.
    ahead: int = 0


class _Then:
    """Blocks and batches as they are once some orders have ended."""

    def __init__(self, state: State, ended: Sequence[Order]) -> None:
        self._blocks: dict[str, int] = {}
        self._orders: dict[str, int] = {}
        for order in ended:
            self._orders[order.decode_id] = self._orders.get(order.decode_id, 0) + 1
            self._give_back(order.decode_id, order.reserved_blocks)
            for worker_id in dict.fromkeys(_holders(order)):
                worker = state.workers.get(worker_id)
                self._give_back(worker_id, worker.lent.get(order.order_id, 0) if worker is not None else 0)

    def _give_back(self, worker_id: str, blocks: int) -> None:
        self._blocks[worker_id] = self._blocks.get(worker_id, 0) + blocks

    def reserved(self, worker: WorkerRecord) -> int:
        return worker.reserved_blocks - self._blocks.get(worker.worker_id, 0)

    def free(self, worker: WorkerRecord) -> int:
        return worker.kv_blocks - self.reserved(worker)

    def joined(self, worker: WorkerRecord) -> int:
        return len(worker.orders) - self._orders.get(worker.worker_id, 0)


def _holders(order: Order) -> Iterator[str]:
    for loan in order.loans:
        yield loan.worker_id
    for place in order.cache:
        yield place.worker_id
    if order.move is not None:
        yield order.move.loan.worker_id


def soonest_room(
    state: State, request: RequestArrived, now_ns: int, *, avoid: Sequence[str] = ()
) -> RoomToCome | None:
    """Where the request finds room first, behind those who wait for some already; None: nowhere, ever."""
    ends = sorted((_end_ns(order, now_ns), order.order_id) for order in state.orders.values())
    orders = [state.orders[order_id] for _, order_id in ends]

    def after(ended: int) -> RoomToCome | None:
        at_ns = ends[ended - 1][0] if ended else now_ns
        return next(_rooms(state, request, _Then(state, orders[:ended]), at_ns, avoid), None)

    found, least, most = after(len(orders)), 0, len(orders)
    while found is not None and least < most:  # what has ended takes no room: the more, the better
        middle = (least + most) // 2
        here = after(middle)
        if here is None:
            least = middle + 1
        else:
            found, most = here, middle
    if found is not None:
        _behind_others(state, request, found, ends)
    return found


def _end_ns(order: Order, now_ns: int) -> int:
    return max(order.prefill_end_ns + order.decode_ns, now_ns)


def _rooms(
    state: State, request: RequestArrived, then: _Then, at_ns: int, avoid: Sequence[str]
) -> Iterator[RoomToCome]:
    """Decode workers that have room, or find it at others."""
    fitting = [worker for worker in state.loads.decode.workers if decode_fits(state, worker, request)]
    for worker in [worker for worker in fitting if worker.worker_id not in avoid] or fitting:
        if worker.cache_elsewhere:
            found = places_for(state, worker, request, then.free)
            if found is not None and found.room and then.joined(worker) < worker.batch_max:
                blocks = _at_places(worker, found.places, found.blocks)
                yield RoomToCome(at_ns=at_ns, worker_id=worker.worker_id, blocks=blocks)
        else:
            need = worker.layout.blocks(request.prompt_tokens + _answer_tokens(state, request))
            if has_room(worker, then.joined(worker), then.reserved(worker), need):
                blocks = {worker.worker_id: need}
                yield RoomToCome(at_ns=at_ns, worker_id=worker.worker_id, blocks=blocks)
    if fitting:
        return
    for worker, loans, room in borrowings(state, request, avoid=avoid, free=then.free, joined=then.joined):
        if room:
            blocks = _at_lenders(worker, loans, request.prompt_tokens + request.max_tokens)
            yield RoomToCome(at_ns=at_ns, worker_id=worker.worker_id, blocks=blocks)


def _answer_tokens(state: State, request: RequestArrived) -> int:
    return expected_tokens(state.answers.get(answer_class(request.max_tokens)), request.max_tokens)


def _at_places(worker: WorkerRecord, places: Sequence[CachePlace], blocks: int) -> dict[str, int]:
    return {place.worker_id: place_blocks(worker.layout, place, blocks) for place in places}


def _at_lenders(worker: WorkerRecord, loans: Sequence[Loan], tokens: int) -> dict[str, int]:
    lent = {loan.worker_id: loan_blocks(worker, loan) for loan in loans}
    return {worker.worker_id: worker.layout.blocks(tokens) - sum(lent.values()), **lent}


def _behind_others(
    state: State, request: RequestArrived, found: RoomToCome, ends: Sequence[tuple[int, str]]
) -> None:
    """Postpone it until there is room for those before it too, wherever that is.

    Should all that runs not leave so much, they take turns, each as long as what runs now takes on average.
    """
    before = list(_before(state, request.request_id))
    if not before:
        return
    found.ahead = len(before)
    worker = state.workers[found.worker_id]
    need = sum(map(_blocks_of(worker), [*before, request]))
    holders = [one for one in state.loads.decode.workers if not one.cache_elsewhere]
    holders += state.loads.attention.workers
    total = sum(one.kv_blocks for one in holders)
    free = total - sum(one.reserved_blocks for one in holders)
    for end_ns, order_id in ends:
        if free >= need:
            return
        order = state.orders[order_id]
        free += order.reserved_blocks + sum(one.lent.get(order_id, 0) for one in holders)
        found.at_ns = max(found.at_ns, end_ns)
    if free < need and ends:
        mean_ns = sum(order.decode_ns for order in state.orders.values()) // len(ends)
        found.at_ns += (need - free) * mean_ns // max(1, total)


def _before(state: State, request_id: str) -> Iterator[RequestArrived]:
    for other_id in state.line:
        if other_id == request_id:
            return
        yield state.requests[other_id].event


def _blocks_of(worker: WorkerRecord) -> Callable[[RequestArrived], int]:
    return lambda request: worker.layout.blocks(request.prompt_tokens + request.max_tokens)
