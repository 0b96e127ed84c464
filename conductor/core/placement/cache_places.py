"""Where the KV of a request lies when its decode worker keeps none: at attention workers, all of it.

One attention worker holds all KV heads of a request, or several hold a range of heads each, as their caches are made.
Where none has room for all, and they take parts of sequences (`lends`), the prompt's first segments lie at some and
what follows at another, at as few as possible. Room for the prompt and the longest answer is booked at each of them
(`loans`) the moment the order is given.

Source: Lamina (arXiv 2405.01814), section 4.2: attention split by requests or by heads; by sequence it is that of
Infinite-LLM (arXiv 2401.02669), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    for pools in _pools(holders, worker.layout):
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
    """The prompt's first segments at others than what follows; as few as possible, the emptiest by `room`."""
    layout = worker.layout
    blocks = layout.blocks(request.prompt_tokens + request.max_tokens)
    able = emptiest_first(_splitting(holders, layout), room)
    for count in range(2, len(able) + 1):
        for last in able[:count]:
            first = [one for one in able[:count] if one is not last]
            most = request.prompt_tokens // layout.segment_tokens
            found = shares(blocks, last, first, room, least=1, most=most)
            if found is not None:
                return FoundPlaces(_parts(layout, found, last), blocks, True)
    return None


def _parts(layout: Layout, first: Sequence[tuple[WorkerRecord, int]], last: WorkerRecord) -> list[KvPart]:
    """One for each of `first`, with its segments, and one for what follows."""
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
    split = _splitting(holders, worker.layout)
    longest = max(unsplit, longest_in_parts(split)) if len(split) > 1 else unsplit
    return longest * worker.block_tokens


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
