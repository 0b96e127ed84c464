"""The machine of an attention worker: events in, actions out. Pure.

Its cache is for sequences that others decode. A decode worker asks for room, and has whole blocks brought from a pool
(`holds`); later tokens come over a channel, one by one, past this machine. The conductor has booked the room, and takes
the order back when it ends.
"""

from __future__ import annotations

from typing import assert_never

from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.policy import Layout
from halfmoon.workers.attention.actions import HoldAction
from halfmoon.workers.attention.events import HoldAsked, HoldLoaded
from halfmoon.workers.attention.holds import Holds
from halfmoon.workers.machines import Announce, AnnounceRequested, OrderCancelled, WorkerStopped
from halfmoon.workers.model.block_allocator import BlockAllocator

Event = HoldAsked | HoldLoaded | OrderCancelled | AnnounceRequested | WorkerStopped
Action = HoldAction | Announce


class AttentionState:
    """See the module. Its cache has `kv_heads` KV heads of each token, from `first_kv_head` on."""

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        layout: Layout,
        kv_blocks: int,
        first_kv_head: int,
        kv_heads: int,
    ) -> None:
        self.worker_id, self.incarnation = worker_id, incarnation
        self.blocks = BlockAllocator(kv_blocks)
        self.holds = Holds(layout, self.blocks, incarnation, heads=(first_kv_head, kv_heads))
        self.stopped = False

    def on(self, event: Event) -> list[Action]:
        """The actions that follow from `event`: to be done in this order, before the next event."""
        out: list[Action] = []
        match event:
            case HoldAsked():
                self.holds.ask(event.ask_id, event.request, out)
            case HoldLoaded():
                self.holds.loaded(event.hold, event.problem, out)
            case OrderCancelled():
                self.holds.drop(event.order_id, out)
            case AnnounceRequested():
                self.holds.drop_all(out)
                out.append(Announce())
            case WorkerStopped():
                self.stopped = True
                self.holds.drop_all(out)
            case _:
                assert_never(event)
        return out

    @property
    def kv_blocks_used(self) -> int:
        return self.blocks.num_blocks - self.blocks.free_blocks

    def heartbeat(self, obeyed_seq: int) -> WorkerHeartbeat:
        """How the worker is. `obeyed_seq`: cause of the newest decision that it was fed."""
        orders = self.holds.order_ids()
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            running=len(orders),
            kv_blocks_used=self.kv_blocks_used,
            orders=orders,
            obeyed_seq=obeyed_seq,
        )

    def validate(self) -> None:
        """Raises AssertionError, with values, when an invariant does not hold."""
        self.blocks.check()
        held = [block for hold in self.holds.open.values() for block in hold.blocks]
        assert len(set(held)) == len(held) == self.kv_blocks_used, ("I76 blocks of nobody, or of two", held)
        assert self.blocks.are_used(held), ("I76 a free block in a hold", held)
        for number, hold in self.holds.open.items():
            assert hold.loading or not hold.over, ("I76 over and here", number)
