"""Places that answer far more slowly than was measured: attention workers, and decode workers that lend.

Each heartbeat of a decode worker has, for each place that it asks, the median wait of its newest steps and the expected
wait. A place whose wait is `slow_place_percent` of the expected one is marked, until the wait is less than half of
that. New parts go to others while these have room. A marked place may then have no askers left: a mark that nothing has
renewed for `slow_place_ns` ends, and the next part that goes there shows the place's speed.
"""

from __future__ import annotations

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import SlowMark, WorkerRecord
from halfmoon.schemas.events import WorkerHeartbeat


def judge_places(state: State, owner: WorkerRecord, event: WorkerHeartbeat) -> None:
    """Judge the places of a decode worker by its heartbeat."""
    percent = state.policy.slow_place_percent
    for seen in event.places if percent else ():
        place = state.workers.get(seen.worker_id)
        if place is None or place.holds is None:
            continue
        marks = {
            owner_id: mark
            for owner_id, mark in place.holds.slow_by.items()
            if owner_id in state.workers and _counts(state, mark)
        }
        known = marks.pop(owner.worker_id, None)
        if seen.waited_ns * 100 >= seen.expected_ns * (percent if known is None else percent // 2):
            marks[owner.worker_id] = SlowMark(
                since_ns=state.at_ns if known is None else known.since_ns,
                seen_ns=state.at_ns,
                waited_ns=seen.waited_ns,
                expected_ns=seen.expected_ns,
            )
        place.holds.slow_by = marks


def slow_mark(state: State, place: WorkerRecord) -> SlowMark | None:
    """The mark for which new parts avoid the place, by the worker that waited longest; None: they do not."""
    slow_by = place.holds.slow_by if place.holds is not None else {}
    marks = [mark for mark in slow_by.values() if _counts(state, mark)]
    return max(marks, key=lambda mark: mark.waited_ns, default=None)


def _counts(state: State, mark: SlowMark) -> bool:
    return state.at_ns - mark.seen_ns < state.policy.slow_place_ns
