"""Policies of eviction. The pool gives a policy its idle slots; the policy names a victim.

Only idle slots (committed, no holder, no writer) can be victims, so that no policy can evict a
leased block. A policy may remember a slot while it is held: it is the same block until it was a victim.

Chains are evicted from their tail because the pool adds and touches the blocks of a chain last to first:
among blocks that were used together the tail comes first in every order below. `benchmarks/eviction.py`
compares the policies.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, Protocol

EvictionName = Literal["lru", "lfu", "s3fifo"]


class Eviction(Protocol):
    """Order of eviction among idle slots."""

    def add(self, slot: int, key: bytes) -> None:
        """`slot`, which holds the block `key`, became idle: it was used just now."""

    def touch(self, slot: int) -> None:
        """An idle slot was used without being held; no effect on a slot that is not idle."""

    def remove(self, slot: int) -> None:
        """`slot` is held again; no effect when it is not idle."""

    def victim(self) -> int:
        """Takes out and returns the slot to evict. Raises LookupError when nothing is idle."""

    def order(self) -> Iterator[int]:
        """Idle slots in about the order in which they would go, were nothing used meanwhile. Changes nothing."""

    def discard(self, slot: int) -> None:
        """`slot` was emptied, or goes to another order: it is forgotten, idle or not."""

    def __len__(self) -> int:
        """Idle slots."""

    def __contains__(self, slot: object) -> bool: ...


class LeastRecentlyUsed:
    """The slot that was used longest ago.

    Source: Mooncake (FAST'25), section 4 (LRU).
    """

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def add(self, slot: int, key: bytes) -> None:
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

    def order(self) -> Iterator[int]:
        return iter(self._idle)

    def discard(self, slot: int) -> None:
        self._idle.pop(slot, None)

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, slot: object) -> bool:
        return slot in self._idle


class LeastFrequentlyUsed:
    """The slot with the fewest uses, the oldest of them first; a block that was popular long ago grows old.

    A block's worth is its uses since it came plus the worth of the last victim before that: so a new block starts level
    with the victims of that time, and an old favourite that is used no more is overtaken.

    Source: LFU with dynamic aging (Arlitt et al., 2000).
    """

    def __init__(self) -> None:
        self._worth: dict[int, int] = {}
        self._idle: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._age = 0
        self._stamp = 0

    def add(self, slot: int, key: bytes) -> None:
        self._worth[slot] = self._worth.get(slot, self._age) + 1
        self._enter(slot)

    def touch(self, slot: int) -> None:
        if slot in self._idle:
            self._worth[slot] += 1
            self._enter(slot)

    def remove(self, slot: int) -> None:
        self._idle.pop(slot, None)

    def victim(self) -> int:
        while self._heap:
            worth, stamp, slot = heapq.heappop(self._heap)
            # An entry that is not the slot's latest was overtaken by a later use. It is skipped here, which costs less
            # than to find and remove it at that use.
            if self._idle.get(slot) == (worth, stamp):
                del self._idle[slot], self._worth[slot]
                # New blocks start level with this victim, so that an old favourite is overtaken in the end.
                self._age = worth
                return slot
        raise LookupError("nothing is idle")

    def order(self) -> Iterator[int]:
        return iter(sorted(self._idle, key=self._idle.__getitem__))

    def discard(self, slot: int) -> None:
        self._idle.pop(slot, None)
        self._worth.pop(slot, None)

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, slot: object) -> bool:
        return slot in self._idle

    def _enter(self, slot: int) -> None:
        self._stamp += 1
        place = (self._worth[slot], self._stamp)
        self._idle[slot] = place
        heapq.heappush(self._heap, (*place, slot))
        if len(self._heap) > 64 + 4 * len(self._idle):  # mostly entries that were overtaken
            self._heap = [(*at, idle) for idle, at in self._idle.items()]
            heapq.heapify(self._heap)


class S3Fifo:
    """New blocks wait in a queue of their own, and only blocks that were used there again enter the main one.

    Blocks that leave the first queue unused are remembered by key; should they come back, they enter the main
    queue at once. In the main queue a used block gets another round.

    Source: S3-FIFO (SOSP'23). Two constants differ, by `benchmarks/eviction.py`: the first queue has half of
    the pool (there a tenth: the next turn of a conversation comes minutes later, not at once), and twice as
    many keys are remembered as blocks are held. Chosen on the first half of the trace, they hold on the
    second.
    """

    FIRST_SHARE = 2
    REMEMBERED = 2
    USES_MAX = 3

    def __init__(self) -> None:
        self._first: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: set[int] = set()
        self._idle_in_main = 0

    def add(self, slot: int, key: bytes) -> None:
        if slot in self._uses:
            self._uses[slot] = min(self.USES_MAX, self._uses[slot] + 1)
        else:
            self._uses[slot] = 0
            self._keys[slot] = key
            # It came back soon after it had left the first queue unused: it was evicted too early.
            queue = self._main if key in self._ghosts else self._first
            queue[slot] = None
            self._ghosts.pop(key, None)
        if slot not in self._idle:
            self._idle.add(slot)
            self._idle_in_main += slot in self._main

    def touch(self, slot: int) -> None:
        if slot in self._idle:
            self._uses[slot] = min(self.USES_MAX, self._uses[slot] + 1)

    def remove(self, slot: int) -> None:
        if slot in self._idle:
            self._idle.remove(slot)
            self._idle_in_main -= slot in self._main

    def victim(self) -> int:
        if not self._idle:
            raise LookupError("nothing is idle")
        while True:
            # This ends: the first queue gets shorter by each try; in the main one, which has something idle,
            # each round lowers its uses. Were all of it held, it would go round for ever.
            if len(self._first) * self.FIRST_SHARE >= len(self._uses) or not self._idle_in_main:
                if (slot := self._from_first()) is not None:
                    return slot
            elif (slot := self._from_main()) is not None:
                return slot

    def order(self) -> Iterator[int]:
        queues = [self._first, self._main]
        if len(self._first) * self.FIRST_SHARE < len(self._uses):
            queues.reverse()
        for used in (False, True):
            for queue in queues:
                yield from (slot for slot in queue if slot in self._idle and (self._uses[slot] > 0) is used)

    def discard(self, slot: int) -> None:
        if slot in self._uses:
            self.remove(slot)
            self._first.pop(slot, None)
            self._main.pop(slot, None)
            del self._uses[slot], self._keys[slot]

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, slot: object) -> bool:
        return slot in self._idle

    def _from_first(self) -> int | None:
        slot, _ = self._first.popitem(last=False)
        # A slot that is held now cannot be a victim. Being held is a use, so that it moves on like a used one.
        if self._uses[slot] > 0 or slot not in self._idle:
            self._uses[slot] = 0
            self._main[slot] = None
            self._idle_in_main += slot in self._idle
            return None
        self._ghosts[self._keys[slot]] = None
        while len(self._ghosts) > self.REMEMBERED * len(self._uses):
            self._ghosts.popitem(last=False)
        return self._forget(slot)

    def _from_main(self) -> int | None:
        slot, _ = self._main.popitem(last=False)
        if self._uses[slot] > 0 or slot not in self._idle:
            self._uses[slot] = max(0, self._uses[slot] - 1)
            self._main[slot] = None
            return None
        self._idle_in_main -= 1
        return self._forget(slot)

    def _forget(self, slot: int) -> int:
        self._idle.remove(slot)
        del self._uses[slot], self._keys[slot]
        return slot


def make_eviction(name: EvictionName) -> Eviction:
    kinds: dict[EvictionName, type[LeastRecentlyUsed | LeastFrequentlyUsed | S3Fifo]] = {
        "lru": LeastRecentlyUsed,
        "lfu": LeastFrequentlyUsed,
        "s3fifo": S3Fifo,
    }
    return kinds[name]()
