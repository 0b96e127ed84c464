"""Who holds KV of others' sequences in a make-believe cluster, decode workers that lend and attention workers alike:
answers who asks, brings blocks through the own node's pool, offers and drops them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, assert_never

from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.lending import HoldRequest
from halfmoon.store.pool.slots import Owner
from halfmoon.workers.attention.actions import AnswerHold, DropHold, HoldAction, LoadHold, OfferHold
from halfmoon.workers.attention.events import HoldAsked, HoldLoaded
from tests.chaos.stores import Fetching
from tests.chaos.workers import Worker


class Holder(Worker):
    """See the module. `offered` are the blocks of each hold, `pushed` the tokens that it has."""

    def hold_nothing(self) -> None:
        """A new life begins."""
        #: What it attends to for others, by the number of the hold; whose answers are waited for.
        self.offered: dict[int, list[int]] = {}
        #: Tokens that each of them has.
        self.pushed: dict[int, int] = {}
        self.hold_asks: dict[int, Callable[[AnswerHold], None]] = {}
        self.ask_number = 0

    @abstractmethod
    def hear(self, kind: type[Any], **fields: Any) -> None:
        """The machine hears, the shell obeys."""

    @abstractmethod
    def fill(self, block: int, marks: list[bytes]) -> None:
        """A block of the cache gets what a slot of the pool has."""

    def asked(self, request: HoldRequest, answer: Callable[[AnswerHold], None]) -> None:
        """Somebody wants something held here."""
        self.ask_number += 1
        self.hold_asks[self.ask_number] = answer
        self.hear(HoldAsked, ask_id=self.ask_number, request=request)

    def do_hold(self, action: HoldAction) -> None:
        match action:
            case AnswerHold():
                self.hold_asks.pop(action.ask_id)(action)
            case LoadHold():
                self.load_hold(action)
            case OfferHold():
                self.net.counts["parts lent"] += not action.expected
                self.offered[action.hold] = action.blocks
                self.pushed[action.hold] = action.tokens
            case DropHold():
                del self.offered[action.hold], self.pushed[action.hold]
            case _:
                assert_never(action)

    def load_hold(self, action: LoadHold) -> None:
        """Through the own node's pool into the cache."""
        request, order_id = action.request, f"{action.request.order_id}-hold-{action.hold}"
        owner, keys = Owner(order_id, self.process_id), split_keys(request.block_keys)
        holders = [self.world.store(node) for node in request.source_node_ids]
        mine = keys[request.first_block :]

        def ended(problem: str) -> None:
            self.release(order_id)
            self.hear(HoldLoaded, hold=action.hold, problem=problem)

        def copy(_: str, problem: str) -> None:
            if problem:
                ended(problem)
                return
            assert self.view is not None
            slots = self.store.guard.hold(owner).slots
            # What it has more room for comes later.
            for slot, block in zip(slots, action.blocks, strict=False):
                self.fill(block, self.view[slot])
            ended("")

        def work() -> None:
            hold = self.store.open_put(owner, mine, len(mine), keys[: request.first_block])
            self.kept[order_id] = True
            answer = self.watched(copy, ended)
            if len(hold.present) == len(mine):
                answer("", "")
            else:
                Fetching(self.store, owner, 0, len(mine), holders, answer)

        self.ask(work, lambda problem: ended(str(problem)))
