"""Segments of other workers' sequences that lie in this worker's cache. Pure, as the machine.

A *hold* is asked for, loaded from a pool by the copy thread, offered to whoever attends to it over a channel, and
dropped when the conductor takes back the order that it belongs to. Its blocks are of the same cache as the worker's
own.

Source: Infinite-LLM (arXiv 2401.02669), section 4: a creditor's side of a loan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from halfmoon.schemas.lending import HoldRequest
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.decode.actions import Action, AnswerHold, DropHold, LoadHold, OfferHold
from halfmoon.workers.model.block_allocator import BlockAllocator


@dataclass(slots=True)
class Holding:
    """Blocks of the cache for one request. `asks` wait for the answer while it loads."""

    number: int
    request: HoldRequest
    blocks: list[int]
    asks: list[int] = field(default_factory=list)
    loading: bool = True
    #: Its order was taken back while it loads: the copy thread still writes into the blocks.
    over: bool = False


class Holds:
    """See the module. Every method appends what is to be done to `out`."""

    def __init__(self, layout: Layout, blocks: BlockAllocator) -> None:
        self.layout, self.blocks = layout, blocks
        self.open: dict[int, Holding] = {}
        self._number = 0

    def order_ids(self) -> list[str]:
        """Orders of others that have something here, and are not known to be over."""
        return list(dict.fromkeys(hold.request.order_id for hold in self.open.values() if not hold.over))

    def ask(self, ask_id: int, request: HoldRequest, out: list[Action]) -> None:
        """Begin to load it, or refuse. What is here already is not loaded twice: the answer was lost."""
        for hold in self.open.values():
            if hold.request == request and not hold.over:
                if hold.loading:
                    hold.asks.append(ask_id)
                else:
                    out.append(AnswerHold(ask_id, hold.number))
                return
        problem = self._problem(request)
        if problem:
            out.append(AnswerHold(ask_id, refused=problem))
            return
        count = len(request.block_keys) // KEY_BYTES - request.first_block
        self._number += 1
        hold = Holding(self._number, request, self.blocks.allocate(count), [ask_id])
        self.open[hold.number] = hold
        out.append(LoadHold(hold.number, request, list(hold.blocks)))

    def _problem(self, request: HoldRequest) -> str:
        """Why it is not taken, or nothing."""
        segment_blocks = self.layout.segment_tokens // self.layout.block_tokens
        count = len(request.block_keys) // KEY_BYTES - request.first_block
        if not segment_blocks:
            return "segment_tokens: there are no segments in these numerics"
        if count <= 0 or count % segment_blocks:
            return f"block_keys: {count} blocks from first_block on are no whole segments of {segment_blocks}"
        if not request.source_node_ids:
            return "source_node_ids: none"
        if not self.blocks.can_allocate(count):
            return f"full: {self.blocks.free_blocks} blocks are free, {count} were asked for"
        return ""

    def loaded(self, number: int, problem: str, out: list[Action]) -> bool:
        """LoadHold is done. True when its blocks are free again."""
        hold = self.open[number]
        hold.loading = False
        if hold.over:
            problem = "the order is over"
        if problem:
            del self.open[number]
            self.blocks.free(hold.blocks)
        else:
            out.append(OfferHold(number, list(hold.blocks)))
        out += [AnswerHold(ask_id, 0 if problem else number, problem) for ask_id in hold.asks]
        hold.asks.clear()
        return bool(problem)

    def drop(self, order_id: str, out: list[Action]) -> bool:
        """The order is over. True when blocks are free again."""
        mine = [hold for hold in self.open.values() if hold.request.order_id == order_id]
        return any([self._drop(hold, out) for hold in mine])

    def drop_all(self, out: list[Action]) -> None:
        """All orders are."""
        for hold in list(self.open.values()):
            self._drop(hold, out)

    def _drop(self, hold: Holding, out: list[Action]) -> bool:
        if hold.loading:
            hold.over = True
            return False
        # First nobody attends to it any more, then others may write into its blocks.
        out.append(DropHold(hold.number))
        del self.open[hold.number]
        self.blocks.free(hold.blocks)
        return True
