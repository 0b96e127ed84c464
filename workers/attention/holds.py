"""KV of other workers' sequences that lies in this worker's cache. Pure, as the machine.

A *hold* is requested, loaded from a pool by the copy thread, offered over channels to the worker that decodes, and
dropped when the conductor takes back its order. Its blocks are of the same cache as the worker's own.

Source: Infinite-LLM (arXiv 2401.02669), section 4: a creditor's side of a loan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from halfmoon.schemas.lending import HoldRequest
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.attention.actions import AnswerHold, DropHold, HoldActions, LoadHold, OfferHold
from halfmoon.workers.model.block_allocator import BlockAllocator

#: A life numbers its holds from anywhere below this on (a prime, so that incarnations spread); a channel has i32 for
#: a number.
FIRST_MAX = 1_073_741_789


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
    """See the module. Every method appends its actions to `out`."""

    def __init__(
        self,
        layout: Layout,
        blocks: BlockAllocator,
        incarnation: str,
        *,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """`heads`: for an attention worker, the first KV head of its cache and the number of heads from there on."""
        self.layout, self.blocks, self._heads = layout, blocks, heads
        self.open: dict[int, Holding] = {}
        # Another worker may still know a number of an earlier incarnation, so numbers are not used again.
        self._number = int.from_bytes(incarnation.encode()) % FIRST_MAX

    def order_ids(self) -> list[str]:
        """Orders of others that have something here, and are not known to be over."""
        return list(dict.fromkeys(hold.request.order_id for hold in self.open.values() if not hold.over))

    def ask(self, ask_id: int, request: HoldRequest, out: HoldActions) -> None:
        """Begin to load a hold, or refuse. A repeated request, whose answer was lost, gets the hold that is here."""
        for hold in self.open.values():
            if hold.request == request and not hold.over:
                if hold.loading:
                    hold.asks.append(ask_id)
                else:
                    out.append(AnswerHold(ask_id, hold.number))
                return
        if request.adopts:
            out.append(self._adopt(ask_id, request))
            return
        problem = self._problem(request)
        if problem:
            out.append(AnswerHold(ask_id, refused=problem))
            return
        self._number += 1
        hold = Holding(self._number, request, self.blocks.allocate(self._blocks(request)), [ask_id])
        self.open[hold.number] = hold
        if request.block_keys:
            out.append(LoadHold(hold.number, request, list(hold.blocks)))
        else:  # all of it will come over a channel
            self.loaded(hold.number, "", out)

    def _adopt(self, ask_id: int, request: HoldRequest) -> AnswerHold:
        """Makes a hold of an earlier order this one's: its decode worker is gone, and another goes on."""
        for hold in self.open.values():
            known = hold.request
            theirs = known.order_id, known.tokens, known.first_block, known.first_kv_head, known.kv_heads
            same = theirs == (
                request.adopts,
                request.tokens,
                request.first_block,
                request.first_kv_head,
                request.kv_heads,
            )
            if same and not hold.loading and self._heads is not None:
                hold.request = request
                return AnswerHold(ask_id, hold.number)
        return AnswerHold(
            ask_id, refused=f"adopts: nothing of order {request.adopts} is here, or not so much"
        )

    def _blocks(self, request: HoldRequest) -> int:
        """Blocks of the cache that it takes."""
        if request.tokens:
            return self.layout.blocks(request.tokens)
        if request.room_blocks:
            return request.room_blocks
        return len(request.block_keys) // KEY_BYTES - request.first_block

    def _problem(self, request: HoldRequest) -> str:
        """Why it is not taken, or nothing."""
        segment_blocks = self.layout.segment_blocks
        count = request.room_blocks or len(request.block_keys) // KEY_BYTES - request.first_block
        if not segment_blocks:
            return "segment_tokens: there are no segments in these numerics"
        if self._heads is not None:
            problem = self._growing_problem(request, self._heads)
            if problem:
                return problem
        elif request.tokens or request.kv_heads:
            return "tokens: only attention workers hold what grows, and single heads"
        if not request.tokens and (count <= 0 or count % segment_blocks):
            named = "room_blocks" if request.room_blocks else "block_keys"
            return f"{named}: {count} blocks from first_block on are no whole segments of {segment_blocks}"
        if request.block_keys and not request.source_node_ids:
            return "source_node_ids: none"
        blocks = self._blocks(request)
        if not self.blocks.can_allocate(blocks):
            return f"full: {self.blocks.free_blocks} blocks are free, {blocks} were asked for"
        return ""

    def _growing_problem(self, request: HoldRequest, heads: tuple[int, int]) -> str:
        """Why an attention worker does not take it, or nothing."""
        wanted = request.first_kv_head, request.kv_heads or self.layout.kv_heads
        tokens = (len(request.block_keys) // KEY_BYTES - request.first_block) * self.layout.block_tokens
        if wanted != heads:
            return (
                f"kv_heads: {wanted[1]} from {wanted[0]} on, and this cache has {heads[1]} from {heads[0]} on"
            )
        segment_blocks = self.layout.segment_blocks
        if request.first_block % segment_blocks:
            return f"first_block: no segment of {segment_blocks} blocks begins at {request.first_block}"
        if request.tokens and tokens > request.tokens:
            return f"tokens: no room for {request.tokens}, where {tokens} are to be brought here"
        return ""

    def loaded(self, number: int, problem: str, out: HoldActions) -> bool:
        """LoadHold is done. True when its blocks are free again."""
        hold = self.open[number]
        hold.loading = False
        if hold.over:
            problem = "the order is over"
        if problem:
            del self.open[number]
            self.blocks.free(hold.blocks)
        else:
            loaded = len(hold.request.block_keys) // KEY_BYTES
            tokens = max(0, loaded - hold.request.first_block) * self.layout.block_tokens
            expected = hold.request.room_blocks * self.layout.block_tokens
            out.append(OfferHold(number, list(hold.blocks), tokens, expected))
        for ask_id in hold.asks:
            out.append(AnswerHold(ask_id, 0 if problem else number, problem))
        hold.asks.clear()
        return bool(problem)

    def drop(self, order_id: str, out: HoldActions) -> bool:
        """The order is over. True when blocks are free again."""
        mine = [hold for hold in self.open.values() if hold.request.order_id == order_id]
        return any([self._drop(hold, out) for hold in mine])

    def end_move(self, plan_id: str, out: HoldActions) -> bool:
        """A move to here came to nothing. True when blocks are free again."""
        mine = [hold for hold in self.open.values() if plan_id and hold.request.plan_id == plan_id]
        return any([self._drop(hold, out) for hold in mine])

    def drop_all(self, out: HoldActions) -> None:
        """All orders are."""
        for hold in list(self.open.values()):
            self._drop(hold, out)

    def _drop(self, hold: Holding, out: HoldActions) -> bool:
        if hold.loading:
            hold.over = True
            return False
        # First nobody attends to it any more, then others may write into its blocks.
        out.append(DropHold(hold.number))
        del self.open[hold.number]
        self.blocks.free(hold.blocks)
        return True
