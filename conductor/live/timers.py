"""Timers of the log, held by a shell: a key has one time, the last that was set."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


class Timers:
    """Due in the order of time, then key."""

    def __init__(self, timers: Mapping[str, int] | None = None) -> None:
        self._at_ns: dict[str, int] = dict(timers or {})
        self._heap: list[tuple[int, str]] = [(at_ns, key) for key, at_ns in self._at_ns.items()]
        heapq.heapify(self._heap)

    def set(self, key: str, at_ns: int) -> None:
        self._at_ns[key] = at_ns
        heapq.heappush(self._heap, (at_ns, key))

    def fired(self, key: str, at_ns: int) -> None:
        """The log has it: forget it, unless it was set for another time since."""
        if self._at_ns.get(key) == at_ns:
            del self._at_ns[key]

    def next_ns(self) -> int | None:
        """The time of the next timer; None when none is set."""
        while self._heap and self._at_ns.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ns: int) -> list[tuple[str, int]]:
        """(key, time) of all that are due, once each; they stay set until `fired`."""
        due = []
        while (at_ns := self.next_ns()) is not None and at_ns <= now_ns:
            due.append((heapq.heappop(self._heap)[1], at_ns))
        return due
