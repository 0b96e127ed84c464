"""Where the KV of a request lies when its decode worker keeps none: at attention workers, all of it.

One attention worker holds all KV heads of a request, or several hold a range of heads each, as their caches are made.
Where none has room for all, and they take parts of sequences (`lends`), the prompt's first segments lie at some and
what follows at another, at as few as possible. Room for the prompt and the longest answer is booked at each of them
(`loans`) the moment the order is given.

Source: Lamina (arXiv 2405.01814), section 4.2: attention split by requests or by heads; by sequence it is that of
Infinite-LLM (arXiv 2401.02669), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.state.slow_places import slow_mark
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.policy import Layout


class FoundPlaces(NamedTuple):
    """Who would hold the KV of a request, of `blocks`, and whether they have room for it now."""

    places: list[KvPart]
    blocks: int
    room: bool


def places_for(state: State, worker: WorkerRecord, request: RequestArrived) -> FoundPlaces | None:
    """The emptiest attention workers that could hold it for the decode worker, were they empty; None: there are none.

    Where caches of several widths are there, those that leave the most blocks free. By sequence where only so there is
    room now, or where only so there ever is. Slow ones only where the others have no room now.
    """
    every = state.loads.attention.workers
    quick = [one for one in every if slow_mark(state, one) is None]
    if len(quick) < len(every):
        found = _places_among(quick, worker, request)
        if found is not None and found.room:
            return found
    return _places_among(every, worker, request)


def _places_among(
    holders: Sequence[WorkerRecord], worker: WorkerRecord, request: RequestArrived
) -> FoundPlaces | None:
    found = _unsplit(holders, worker, request)
    if found is not None and found.room:
        return found
    split = _by_sequence(holders, worker, request, free_blocks)
    if split is None and found is None:
        split = _by_sequence(holders, worker, request, lambda one: one.kv_blocks)
        return None if split is None else split._replace(room=False)
    return split or found


def _unsplit(
    holders: Sequence[WorkerRecord], worker: WorkerRecord, request: RequestArrived
) -> FoundPlaces | None:
    """Places that have all tokens."""
    blocks = worker.layout.blocks(request.prompt_tokens + request.max_tokens)
    found: list[tuple[int, int, list[WorkerRecord]]] = []
    for pools in _pools(holders, worker.layout):
        able = [[one for one in pool if one.kv_blocks >= blocks] for pool in pools]
        if all(able):
            chosen = [min(pool, key=lambda one: (-free_blocks(one), one.worker_id)) for pool in able]
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
    room: Callable[[WorkerRecord], int],
) -> FoundPlaces | None:
    """The prompt's first segments at others than what follows; as few as possible, the emptiest by `room`."""
    layout = worker.layout
    blocks = layout.blocks(request.prompt_tokens + request.max_tokens)
    able = sorted(_splitting(holders, layout), key=lambda one: (-room(one), one.worker_id))
    for count in range(2, len(able) + 1):
        for last in able[:count]:
            first = [one for one in able[:count] if one is not last]
            places = _shares(layout, request.prompt_tokens, blocks, first, last, room)
            if places is not None:
                return FoundPlaces(places, blocks, True)
    return None


def _shares(
    layout: Layout,
    prompt_tokens: int,
    blocks: int,
    first: list[WorkerRecord],
    last: WorkerRecord,
    room: Callable[[WorkerRecord], int],
) -> list[KvPart] | None:
    """`last` has what it has room for, the others whole segments of the prompt before that; None: they have no room."""
    segment_blocks, begin = layout.segment_blocks, 0
    missing = max(1, -(-(blocks - room(last)) // segment_blocks))
    if missing > prompt_tokens // layout.segment_tokens:
        return None
    places = []
    for one in first:
        segments = min(missing - begin, room(one) // segment_blocks)
        if segments > 0:
            places.append(_part(layout, one, begin, segments))
            begin += segments
    return [*places, _part(layout, last, begin, 0)] if begin == missing else None


def _part(layout: Layout, holder: WorkerRecord, first_segment: int, segments: int) -> KvPart:
    return KvPart(
        worker_id=holder.worker_id,
        first_kv_head=0,
        kv_heads=layout.kv_heads,
        first_segment=first_segment,
        segments=segments,
    )


def free_blocks(worker: WorkerRecord) -> int:
    """Blocks of an attention worker that are not booked."""
    return worker.kv_blocks - worker.reserved_blocks


def longest_elsewhere(state: State, worker: WorkerRecord) -> int:
    """Tokens of the longest request that attention workers could hold for the decode worker, were they empty."""
    holders = state.loads.attention.workers
    unsplit = max(
        (
            min(max(one.kv_blocks for one in pool) for pool in pools)
            for pools in _pools(holders, worker.layout)
        ),
        default=0,
    )
    split = [one.kv_blocks for one in _splitting(holders, worker.layout)]
    if len(split) < 2:
        return unsplit * worker.block_tokens
    # All but one of them hold whole segments; that is best the one that would waste the most of its room.
    segment_blocks = worker.layout.segment_blocks
    over = max(blocks % segment_blocks for blocks in split)
    whole = sum(blocks - blocks % segment_blocks for blocks in split)
    return max(unsplit, whole + over) * worker.block_tokens


def nowhere_to_hold(state: State, worker: WorkerRecord) -> str:
    """Why attention workers can hold no KV for the decode worker, however little; "": they can, or it keeps its own."""
    if not worker.cache_elsewhere or longest_elsewhere(state, worker):
        return ""
    if not state.loads.attention.workers:
        return "decode workers keep no KV, and no attention worker is ready"
    return "decode workers keep no KV, and the attention workers that are ready have not all KV heads"


def _splitting(holders: Sequence[WorkerRecord], layout: Layout) -> list[WorkerRecord]:
    """Attention workers that take parts of sequences."""
    return [
        one
        for one in holders
        if one.lends
        and layout.segment_tokens
        and one.layout == layout
        and _heads(one) == (0, layout.kv_heads)
    ]


def _pools(holders: Sequence[WorkerRecord], layout: Layout) -> list[list[list[WorkerRecord]]]:
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
