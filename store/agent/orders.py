"""Running work by owner of a hold: fetches, loads, and at most one push.

A release may come at any moment. It ends running work, waits until none of it touches a slot any more, and only then
are the slots freed: that order is the reason for this table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from halfmoon.store.agent.push import Push
from halfmoon.store.errors import OrderUnknown
from halfmoon.store.pool.slots import Owner

T = TypeVar("T")


class _OwnerTasks:
    """One owner's tasks, and its push."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.push: Push | None = None


class OrderTasks:
    """The table. On one event loop."""

    def __init__(self) -> None:
        self._by_owner: dict[Owner, _OwnerTasks] = {}

    def push_of(self, owner: Owner) -> Push | None:
        running = self._by_owner.get(owner)
        return running.push if running is not None else None

    def set_push(self, owner: Owner, push: Push) -> None:
        self._by_owner.setdefault(owner, _OwnerTasks()).push = push

    def pushes_open(self) -> int:
        return sum(it.push is not None and not it.push.finished for it in self._by_owner.values())

    def owners(self, order_id: str) -> list[Owner]:
        """Owners for whom something of this order runs."""
        return [owner for owner in self._by_owner if owner.order_id == order_id]

    async def run(self, owner: Owner, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` as the owner's, so that `end` cancels it. Raises OrderUnknown then."""
        task = asyncio.create_task(work)
        self._by_owner.setdefault(owner, _OwnerTasks()).tasks.add(task)
        try:
            # Shielded, so that a cancelled caller and an ended order can be distinguished below.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise OrderUnknown(f"order {owner.order_id} was released") from None
            task.cancel()
            raise
        finally:
            if (entry := self._by_owner.get(owner)) is not None:
                entry.tasks.discard(task)
                if not entry.tasks and entry.push is None:
                    del self._by_owner[owner]

    async def end(self, owner: Owner, reason: str) -> None:
        """Ends the owner's running work. When this returns, none of it touches a slot any more."""
        running = self._by_owner.pop(owner, None)
        if running is None:
            return
        for task in running.tasks:
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)
        if running.push is not None:
            await running.push.end(reason)

    async def end_all(self, reason: str) -> None:
        for owner in list(self._by_owner):
            await self.end(owner, reason)
