"""The order in which idle slots are evicted: first copies that were made ahead of need and not read since, then
blocks without a pin, then softly pinned ones. A tenant at its quota gives up blocks of its own only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from halfmoon.store.pool.eviction import Eviction, LeastRecentlyUsed


class IdleQueues:
    """Idle slots, in the order in which they go. Spare copies and softly pinned slots have orders of their
    own.
    """

    def __init__(self, eviction: Eviction) -> None:
        self._eviction = eviction
        self._pinned = LeastRecentlyUsed()
        self._spare = LeastRecentlyUsed()

    def add(self, slot: int, key: bytes, *, pinned: bool, spare: bool = False) -> None:
        """`slot`, which holds `key`, became idle."""
        (self._pinned if pinned else self._spare if spare else self._eviction).add(slot, key)

    def remove(self, slot: int) -> None:
        """It is held again."""
        self._eviction.remove(slot)
        self._pinned.remove(slot)
        self._spare.remove(slot)

    def touch(self, slot: int) -> None:
        self._eviction.touch(slot)
        self._pinned.touch(slot)
        self._spare.touch(slot)

    def victim(self) -> int:
        """Takes out and returns the slot to evict. Raises LookupError when nothing is idle."""
        if len(self._spare):
            return self._spare.victim()
        return self._eviction.victim() if len(self._eviction) else self._pinned.victim()

    def first(self, count: int, wanted: Callable[[int], bool]) -> list[int]:
        """Up to `count` idle slots that are `wanted`, in about the order in which they go. O(idle slots)."""
        return list(itertools.islice(filter(wanted, self.order()), count))

    def order(self) -> Iterator[int]:
        """Idle slots in about the order in which they go. Valid until the next change."""
        yield from self._spare.order()
        yield from self._eviction.order()
        yield from self._pinned.order()

    def discard(self, slot: int) -> None:
        """An idle slot was emptied out of turn."""
        self._eviction.discard(slot)
        self._pinned.discard(slot)
        self._spare.discard(slot)

    def __len__(self) -> int:
        return len(self._eviction) + len(self._pinned) + len(self._spare)

    def __contains__(self, slot: object) -> bool:
        return slot in self._eviction or slot in self._pinned or slot in self._spare
