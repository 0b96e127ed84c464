"""The choice of workers for segments of a request that no single cache holds, alike for lenders and attention workers.

As few whole segments of the prompt as possible lie elsewhere than what follows them, at as few workers as possible, the
emptiest first.

Source: Infinite-LLM (arXiv 2401.02669), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.state.slow_places import slow_mark

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
    """How many segments each of `others` holds, from `least` to `most` in all, of a request of so many blocks; `end`
    holds what follows them. None: they have no room.
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


def longest_in_parts(holders: Sequence[WorkerRecord]) -> int:
    """Blocks of the longest request that these could hold together, were they empty. Their layout is one."""
    each = holders[0].layout.segment_blocks
    # All but one of them hold whole segments; that is best the one that would waste the most of its room.
    over = max(one.kv_blocks % each for one in holders)
    return over + sum(one.kv_blocks - one.kv_blocks % each for one in holders)
