"""Which block goes when room is needed. The pool tells a policy what is idle; the policy names a victim.

Only idle slots (committed, held by nobody, no writer on them) are ever known to a policy, so that none can evict a
leased block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Eviction(Protocol):
    """Order of eviction among idle slots."""

    def add(self, slot: int) -> None:
        """`slot` became idle: it was used just now."""

    def touch(self, slot: int) -> None:
        """An idle slot was used without being held; no effect on a slot that is not idle."""

    def remove(self, slot: int) -> None:
        """`slot` is held again; no effect when it is not idle."""

    def victim(self) -> int:
        """Takes out and returns the slot to evict. Raises LookupError when nothing is idle."""

    def __len__(self) -> int:
        """Idle slots."""

    def __contains__(self, slot: object) -> bool: ...


class LeastRecentlyUsed:
    """The slot that was used longest ago.

    Chains are evicted from their tail because the pool adds and touches the blocks of a chain last to first, which
    leaves every head newer than its tail.

    Source: Mooncake (FAST'25), section 4 (LRU).
    """

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def add(self, slot: int) -> None:
        self._idle[slot] = None
        self._idle.move_to_end(slot)

    def touch(self, slot: int) -> None:
        if slot in self._idle:
            self._idle.move_to_end(slot)

    def remove(self, slot: int) -> None:
        self._idle.pop(slot, None)

    def victim(self) -> int:
        if not self._idle:
            raise LookupError("nothing is idle")
        return self._idle.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, slot: object) -> bool:
        return slot in self._idle
