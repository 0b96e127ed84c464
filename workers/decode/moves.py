"""Segments of running sequences on their way to a lender. Pure.

A move asks for empty room (a HoldRequest with no sources), sends some tokens with each decode step, and when all of
them are there the sequence goes on without those blocks: between two steps. Until then nothing of it has changed, and
any failure leaves it so; the conductor has the lender drop the tokens (EndMove).

Source: Infinite-LLM (arXiv 2401.02669), section 5.3: `try_move_kvcache`, and migration behind inference.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.schemas.decisions import MoveKv
from halfmoon.schemas.events import KvMoved, KvMoveRefused
from halfmoon.schemas.lending import HoldRequest, KvPart
from halfmoon.schemas.policy import Layout
from halfmoon.workers.decode.actions import Action, AskHold, PushTokens
from halfmoon.workers.decode.sequence import DecodeSequence, Stage
from halfmoon.workers.machines import Report
from halfmoon.workers.model.block_allocator import BlockAllocator
from halfmoon.workers.model.segments import AWAY


@dataclass(slots=True, eq=False)
class KvMove:
    """`blocks` blocks of a running sequence, the first that are its worker's own."""

    order: MoveKv
    sequence: DecodeSequence
    blocks: int
    #: 0: the lender has not answered yet.
    hold: int = 0
    #: Tokens that are there, and the bytes of their KV.
    tokens: int = 0
    moved_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Push:
    """Another thread sends `tokens` of a move, and reads `blocks` for it."""

    move: KvMove
    tokens: int
    blocks: list[int]
    #: The sequence has given them up meanwhile.
    orphaned: bool = False


class Moves:
    """See the module. At most one for each sequence, and one push at a time. Methods append to `out`."""

    def __init__(self, worker_id: str, layout: Layout, blocks: BlockAllocator) -> None:
        self.worker_id, self.layout, self.blocks = worker_id, layout, blocks
        #: By order.
        self.open: dict[str, KvMove] = {}
        self.push: _Push | None = None

    def begin(self, order: MoveKv, sequence: DecodeSequence | None, out: list[Action]) -> None:
        """Ask the lender for room, or refuse."""
        known = self.open.get(order.order_id)
        if known is not None and known.order.plan_id == order.plan_id:
            return
        problem = "another move of it is under way" if known is not None else self._problem(order, sequence)
        if problem:
            self._refuse(order, problem, out)
            return
        assert sequence is not None
        blocks = order.segments * self.layout.segment_blocks
        self.open[order.order_id] = KvMove(order, sequence, blocks)
        request = HoldRequest(
            owner_id=self.worker_id,
            order_id=order.order_id,
            source_node_ids=[],
            first_block=sequence.away,
            block_keys=b"",
            tenant=sequence.tenant,
            plan_id=order.plan_id,
            room_blocks=blocks,
        )
        out.append(AskHold(order.lender_id, request))

    def _problem(self, order: MoveKv, sequence: DecodeSequence | None) -> str:
        if sequence is None or sequence.stage is not Stage.RUNNING:
            return "the request does not run"
        if not self.layout.segment_tokens or not self.layout.layers:
            return "segment_tokens: there are no segments in these numerics"
        # Steps write to the segment of the next token.
        whole = sequence.length // self.layout.segment_tokens
        own = whole - sequence.away * self.layout.block_tokens // self.layout.segment_tokens
        if not 0 < order.segments <= own:
            return f"segments: {order.segments} of {own} that are whole and here"
        return ""

    def held(self, order_id: str, plan_id: str, hold: int) -> None:
        """The lender has room."""
        move = self.open.get(order_id)
        if move is not None and move.order.plan_id == plan_id:
            move.hold = hold

    def not_held(self, order_id: str, plan_id: str, reason: str, out: list[Action]) -> None:
        """The lender has no room for the move."""
        move = self.open.get(order_id)
        if move is not None and move.order.plan_id == plan_id:
            self.give_up(order_id, f"lender {move.order.lender_id}: {reason}", out)

    def send_some(self, out: list[Action]) -> None:
        """A step begins: at most `tokens_per_step` tokens of one move are pushed beside it."""
        if self.push is not None:
            return
        size = self.layout.block_tokens
        for move in self.open.values():
            left = move.blocks * size - move.tokens
            if not move.hold or not left:
                continue
            tokens = min(left, move.order.tokens_per_step)
            first = move.sequence.away + move.tokens // size
            end = move.sequence.away + -(-(move.tokens + tokens) // size)
            blocks = move.sequence.table[first:end]
            self.push = _Push(move, tokens, blocks)
            order = move.order
            out.append(
                PushTokens(
                    order.order_id, order.plan_id, order.lender_id, move.hold, blocks, move.tokens, tokens
                )
            )
            return

    def pushed(self, moved_bytes: int, problem: str, out: list[Action]) -> bool:
        """The push is over. True when blocks are free again."""
        push, self.push = self.push, None
        assert push is not None
        if push.orphaned:
            self.blocks.free(push.blocks)
        move = push.move
        if self.open.get(move.order.order_id) is move:
            if problem:
                self.give_up(move.order.order_id, f"lender {move.order.lender_id}: {problem}", out)
            else:
                move.tokens += push.tokens
                move.moved_bytes += moved_bytes
        return push.orphaned

    def finish_some(self, out: list[Action]) -> bool:
        """No step is under way: complete moves take effect. True when blocks are free again."""
        done = [move for move in self.open.values() if move.tokens == move.blocks * self.layout.block_tokens]
        for move in done:
            order, sequence = move.order, move.sequence
            del self.open[order.order_id]
            first, end = sequence.away, sequence.away + move.blocks
            self.blocks.free(sequence.table[first:end])
            sequence.table[first:end] = [AWAY] * move.blocks
            part = KvPart(
                worker_id=order.lender_id,
                first_segment=first // self.layout.segment_blocks,
                segments=order.segments,
                hold=move.hold,
            )
            sequence.parts.append(part)
            sequence.asked_ns = sequence.asked_ns or sequence.started_ns
            sequence.away = end
            moved = KvMoved(
                plan_id=order.plan_id,
                order_id=order.order_id,
                request_id=order.request_id,
                worker_id=self.worker_id,
                blocks=move.blocks,
                moved_bytes=move.moved_bytes,
            )
            out.append(Report(moved))
        return bool(done)

    def give_up(self, order_id: str, reason: str, out: list[Action]) -> None:
        """The sequence stays as it is. Nothing, when none of it moves."""
        move = self.open.pop(order_id, None)
        if move is not None:
            self._refuse(move.order, reason, out)

    def forget(self, order_id: str) -> None:
        """The order is over: its move ends without a report, because the conductor knows."""
        self.open.pop(order_id, None)

    def unread(self, sequence: DecodeSequence) -> list[int]:
        """Blocks of the sequence that others may use at once when it gives up all: a push keeps those that it reads."""
        push = self.push
        if push is None or push.move.sequence is not sequence or push.orphaned:
            return sequence.own_blocks
        read = dict.fromkeys(push.blocks)
        push.orphaned = True
        return [block for block in sequence.own_blocks if block not in read]

    def _refuse(self, order: MoveKv, reason: str, out: list[Action]) -> None:
        refused = KvMoveRefused(
            plan_id=order.plan_id,
            order_id=order.order_id,
            request_id=order.request_id,
            worker_id=self.worker_id,
            reason=reason[:500],
        )
        out.append(Report(refused))
