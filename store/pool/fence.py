"""Keeps late writers out of slots that are no longer their order's. A process may be stopped for any time, also in the
middle of a copy into shared memory, and goes on where it stopped; no deadline holds it back.

The segment names the order of each slot that may be written (`PoolView.marks`). A writer locks the slot's byte of the
segment, reads the mark, copies, and unlocks (`PoolView.writing`). The agent clears the mark first, and gives the slot
away only while nobody has that lock. So a copy has either begun, and the slot waits for its end or for the death of its
process (the kernel drops the locks of a process that dies); or it does not begin.

Readers are not kept out: they look afterwards. A slot's epoch grows before another order may write into it, and every
reader got the epochs of its slots with its lease. When an epoch is still the same after the copy, so are the bytes
(`PoolView.require_unchanged`); a lease that ended meanwhile did no harm. Source of the idea: sequence locks (Linux).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from halfmoon.store.pool.segment import PoolView, order_mark


class Fence(Protocol):
    """How a pool admits an order to a slot, and takes it away."""

    def admit(self, slot: int, order_id: str) -> None:
        """The order's processes may write into the slot."""

    def withdraw(self, slot: int) -> bool:
        """From now on nobody may. False: a copy into it is under way, or stopped halfway."""

    def epoch(self, slot: int) -> int:
        """How often the slot was given to an order."""


class NoFence:
    """A pool without memory has no writers."""

    def admit(self, slot: int, order_id: str) -> None:
        pass

    def withdraw(self, slot: int) -> bool:
        return True

    def epoch(self, slot: int) -> int:
        return 0


class SegmentFence:
    """`view`: the agent's own, of which no writer makes use."""

    def __init__(self, view: PoolView) -> None:
        self._view = view

    def admit(self, slot: int, order_id: str) -> None:
        # The order of the two counts: no byte is written before the epoch has changed.
        self._view.epochs[slot] += np.uint64(1)
        self._view.marks[slot] = order_mark(order_id)

    def withdraw(self, slot: int) -> bool:
        # The order of the two statements matters: a writer that locks after the question finds the mark cleared.
        self._view.marks[slot] = 0
        return not self._view.written_by_others(slot)

    def epoch(self, slot: int) -> int:
        return int(self._view.epochs[slot])
