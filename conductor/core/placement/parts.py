"""Parts: which workers hold the KV of a request that its decode worker does not hold alone.

*Lenders* are decode workers: the prompt's first segments lie at some, which attend to them (`workers.attention`); the
rest, and every new token, is the decode worker's own. *Attention workers* hold all KV for a decode worker that keeps
none: one has all KV heads of a request, or several a range of heads each, by the shape of their caches. Where none has
room for all, and they take parts of sequences (`lends`), the prompt's first segments lie at some and the rest at
another.

Either way as few whole segments as possible lie apart from the rest, at as few workers as possible, the emptiest first.
Room is booked at its worker (`loans`) the moment the order is given; at attention workers for all KV, and for the
longest answer. A loan ends with its order, and with the worker at either end of it.

Source: Infinite-LLM (arXiv 2401.02669), sections 4 and 5: debtors, creditors, and a ledger of both; Lamina (arXiv
2405.01814), section 4.2: attention split by requests or by heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.state.slow_places import slow_mark
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.policy import Layout

#: Blocks that a worker could give to one more request.
BlocksOf = Callable[[WorkerRecord], int]


def free_blocks(worker: WorkerRecord) -> int:
    """Blocks of its cache that are not booked."""
    return worker.kv_blocks - worker.reserved_blocks


def kv_blocks(worker: WorkerRecord) -> int:
    """Blocks of its cache, were it empty."""
    return worker.kv_blocks


def emptiest_first(holders: Sequence[WorkerRecord], room: BlocksOf) -> list[WorkerRecord]:
    return sorted(holders, key=lambda one: (-room(one), one.worker_id))


def by_speed(state: State, holders: Sequence[WorkerRecord]) -> list[Sequence[WorkerRecord]]:
    """Choices to try one after the other: slow workers only where the others have no room now."""
    quick = [one for one in holders if slow_mark(state, one) is None]
    return [quick, holders] if len(quick) < len(holders) else [holders]


def shares(
    blocks: int,
    end: WorkerRecord,
    others: Sequence[WorkerRecord],
    room: BlocksOf,
    *,
    least: int,
    most: int,
) -> list[tuple[WorkerRecord, int]] | None:
    """The number of segments for each of `others`, from `least` to `most` in all, of a request of `blocks` blocks;
    `end` holds the rest. None: they have no room.
    """
    each = end.layout.segment_blocks
    missing = max(least, -(-(blocks - room(end)) // each))
    if missing > most:
        return None
    found = []
    for one in others:
        segments = min(missing, room(one) // each)
        if segments > 0:
            found.append((one, segments))
            missing -= segments
    return found if missing <= 0 else None


# --- at lenders ---------------------------------------------------------------------------------------------


class Borrowing(NamedTuple):
    """A decode worker that could take a request with the help of others, and whether they have room for it now."""

    worker: WorkerRecord
    loans: list[KvPart]
    room: bool


def borrowings(state: State, request: RequestArrived, *, avoid: Sequence[str] = ()) -> Iterator[Borrowing]:
    """One for each decode worker that could take the request with the help of others, by id."""
    lenders = [worker for worker in state.loads.decode.workers if worker.lends]
    trusted = [worker for worker in lenders if worker.worker_id not in avoid]
    # With the others' help rather than alone: a worker that failed a request may still hold a part of it.
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


# --- at attention workers -----------------------------------------------------------------------------------


class FoundPlaces(NamedTuple):
    """Places for the KV of a request, its `blocks` there, and whether there is room for them now."""

    places: list[KvPart]
    blocks: int
    room: bool


def places_for(state: State, worker: WorkerRecord, request: RequestArrived) -> FoundPlaces | None:
    """The emptiest attention workers that could hold it for the decode worker, were they empty; None: there are none.

    Where caches of several widths are there, those that leave the most blocks free. By sequence where only so there is
    room now, or where only so there ever is. Slow ones only where the others have no room now.
    """
    found = None
    for holders in by_speed(state, state.loads.attention.workers):
        found = _places_among(holders, worker, request)
        if found is not None and found.room:
            break
    return found


def _places_among(
    holders: Sequence[WorkerRecord], worker: WorkerRecord, request: RequestArrived
) -> FoundPlaces | None:
    found = _unsplit(holders, worker, request)
    if found is not None and found.room:
        return found
    split = _by_sequence(holders, worker, request, free_blocks)
    if split is None and found is None:
        split = _by_sequence(holders, worker, request, kv_blocks)
        return None if split is None else split._replace(room=False)
    return split or found


def _unsplit(
    holders: Sequence[WorkerRecord], worker: WorkerRecord, request: RequestArrived
) -> FoundPlaces | None:
    """Places that have all tokens."""
    blocks = worker.layout.blocks(request.prompt_tokens + request.max_tokens)
    found: list[tuple[int, int, list[WorkerRecord]]] = []
    for pools in pools_of(holders, worker.layout):
        able = [[one for one in pool if one.kv_blocks >= blocks] for pool in pools]
        if all(able):
            chosen = [emptiest_first(pool, free_blocks)[0] for pool in able]
            found.append((-min(map(free_blocks, chosen)), len(chosen), chosen))
    if not found:
        return None
    free, _, chosen = min(found, key=lambda one: one[:2])
    places = [
        KvPart(worker_id=one.worker_id, first_kv_head=_heads(one)[0], kv_heads=_heads(one)[1])
        for one in chosen
    ]
    return FoundPlaces(places, blocks, -free >= blocks)


def _by_sequence(
    holders: Sequence[WorkerRecord],
    worker: WorkerRecord,
    request: RequestArrived,
    room: BlocksOf,
) -> FoundPlaces | None:
    """The prompt's first segments at other workers than the rest; as few as possible, the emptiest by `room`."""
    layout = worker.layout
    blocks = layout.blocks(request.prompt_tokens + request.max_tokens)
    able = emptiest_first(splitting(holders, layout), room)
    for count in range(2, len(able) + 1):
        for last in able[:count]:
            first = [one for one in able[:count] if one is not last]
            most = request.prompt_tokens // layout.segment_tokens
            found = shares(blocks, last, first, room, least=1, most=most)
            if found is not None:
                return FoundPlaces(_parts(layout, found, last), blocks, True)
    return None


def _parts(layout: Layout, first: Sequence[tuple[WorkerRecord, int]], last: WorkerRecord) -> list[KvPart]:
    """One part for each of `first`, with its segments, and one for the rest."""
    parts: list[KvPart] = []
    begin = 0
    for holder, segments in [*first, (last, 0)]:
        part = KvPart(
            worker_id=holder.worker_id,
            first_kv_head=0,
            kv_heads=layout.kv_heads,
            first_segment=begin,
            segments=segments,
        )
        parts.append(part)
        begin += segments
    return parts


def splitting(holders: Sequence[WorkerRecord], layout: Layout) -> list[WorkerRecord]:
    """Attention workers that take parts of sequences."""
    return [
        one
        for one in holders
        if one.lends
        and layout.segment_tokens
        and one.layout == layout
        and _heads(one) == (0, layout.kv_heads)
    ]


def pools_of(holders: Sequence[WorkerRecord], layout: Layout) -> list[list[list[WorkerRecord]]]:
    """For each width of caches that covers all KV heads: the workers of each range of heads, first heads first."""
    by_width: dict[int, dict[int, list[WorkerRecord]]] = {}
    for one in holders:
        if one.layout == layout:
            first, width = _heads(one)
            by_width.setdefault(width, {}).setdefault(first, []).append(one)
    return [
        [ranges[first] for first in sorted(ranges)]
        for width, ranges in sorted(by_width.items(), reverse=True)
        if sorted(ranges) == list(range(0, layout.kv_heads, width)) and layout.kv_heads % width == 0
    ]


def _heads(worker: WorkerRecord) -> tuple[int, int]:
    """The first KV head that an attention worker's cache has, and how many."""
    duty = worker.holds
    assert duty is not None, worker
    return duty.first_kv_head, duty.kv_heads or worker.layout.kv_heads
