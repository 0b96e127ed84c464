"""Attention workers of a make-believe cluster: the real `AttentionState`, in a shell with marks instead of KV.

What is played is `SegmentServer` with `HeldCaches`: pushes are taken in order and without gaps, a list says how many
tokens of each hold are its sequence's, and the newest list alone may write. Every token that a step attends to is
compared with the one that the sequence must have there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, assert_never

from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision
from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.workers import machines
from halfmoon.workers.attention.actions import AnswerHold, DropHold, LoadHold, OfferHold
from halfmoon.workers.attention.errors import RowRefusal
from halfmoon.workers.attention.state import Action, AttentionState
from tests.chaos.holders import Holder
from tests.chaos.texts import BLOCK_TOKENS, LAYERS, Text


class Row(NamedTuple):
    """What a list says of a hold: how many of its tokens are the sequence's, from its token `first` on."""

    hold: int
    tokens: int
    first: int
    #: It has the sequence's end, and gets each new token.
    grows: bool


class AttentionWorker(Holder):
    """Drives an `AttentionState`. `cache[block][offset]` stands for the KV of one token, of its heads."""

    role = "attention"

    def make_machine(self) -> None:
        world = self.world
        self.first_kv_head, self.kv_heads = world.kv_heads_of(self.process_id)
        self.state = AttentionState(
            worker_id=self.process_id,
            incarnation=self.incarnation,
            layout=world.layout,
            kv_blocks=self.kv_blocks(),
            first_kv_head=self.first_kv_head,
            kv_heads=self.kv_heads,
        )
        self.cache: list[list[bytes]] = [[b""] * BLOCK_TOKENS for _ in range(self.kv_blocks())]
        #: The newest list that has each hold.
        self.attenders: dict[int, str] = {}
        self.hold_nothing()

    def lends(self) -> bool:
        return self.world.splits

    def kv_blocks(self) -> int:
        return self.world.attention_kv_blocks

    def machine_heartbeat(self) -> WorkerHeartbeat:
        return self.state.heartbeat(self.done[0])

    def open_orders(self) -> list[str]:
        return self.state.holds.order_ids()

    def under_way(self) -> str:
        used = self.state.kv_blocks_used
        return super().under_way() or (f"blocks used at {self.process_id}: {used}" if used else "")

    def obey(self, decision: Decision) -> None:
        match decision:
            case CancelOrder():
                self.hear(machines.OrderCancelled, order_id=decision.order_id)
            case AnnounceYourself():
                self.hear(machines.AnnounceRequested)
            case _:
                raise AssertionError(decision)

    def hear(self, kind: type[Any], **fields: Any) -> None:
        actions = self.state.on(kind(at_ns=self.net.now_ns, **fields))
        self.state.validate()
        for action in actions:
            self.do(action)

    def hear_loaded(self, order_id: str, layer: int) -> None:
        """A hold is waited for as a whole."""

    def do(self, action: Action) -> None:
        match action:
            case machines.Announce():
                self.announce()
            case AnswerHold() | LoadHold() | OfferHold() | DropHold():
                self.do_hold(action)
                if isinstance(action, OfferHold):
                    self.attenders[action.hold] = ""
            case _:
                assert_never(action)

    def fill(self, block: int, marks: list[bytes]) -> None:
        assert marks == [marks[0]] * LAYERS, ("I96 loads other bytes", self.process_id, marks)
        self.cache[block][:] = [self._share(marks[0])] * BLOCK_TOKENS

    def _share(self, mark: bytes) -> bytes:
        """Its heads of a token's KV."""
        return mark + bytes([self.first_kv_head])

    # --- over channels ----------------------------------------------------------------------------------------

    def append(self, hold: int, first: int, marks: list[bytes]) -> str:
        """Tokens of a push. Returns why they are not taken, or nothing."""
        if hold not in self.offered:
            return "it has no such hold"
        if self.pushed[hold] != first:
            return "other tokens were due"
        self._write(hold, first, marks)
        return ""

    def take_list(self, name: str, rows: list[Row]) -> RowRefusal | None:
        """A step is about to begin, and those after it. Returns why not, or nothing."""
        for hold, tokens, _, grows in rows:
            if hold not in self.offered:
                return RowRefusal(f"hold {hold} is not here", hold)
            assert grows or tokens == self.pushed[hold], ("I101 a part of another length", hold, tokens)
            if tokens > self.pushed[hold]:
                return RowRefusal(
                    f"hold {hold} has {self.pushed[hold]} tokens, and {tokens} were meant", hold
                )
        for hold, tokens, _, _ in rows:
            self.pushed[hold], self.attenders[hold] = tokens, name
        return None

    def attend(self, name: str, rows: list[Row], texts: list[Text]) -> RowRefusal | None:
        """A step: what each row's past is, then its new token joins it. Returns why there is no answer, or nothing."""
        for hold, *_ in rows:
            if hold not in self.offered:
                return RowRefusal(f"hold {hold} was dropped", hold)
            if self.attenders[hold] != name:
                return RowRefusal(f"hold {hold} is on a newer list", hold)
        for (hold, tokens, first, grows), text in zip(rows, texts, strict=True):
            assert self.pushed[hold] == tokens, ("I101 another length", self.process_id, hold, tokens)
            wanted = text.token_kv(self.first_kv_head)[first : first + tokens]
            for place in range(0, tokens, BLOCK_TOKENS):
                end = min(BLOCK_TOKENS, tokens - place)
                have = self.cache[self.offered[hold][place // BLOCK_TOKENS]][:end]
                assert have == wanted[place : place + end], (
                    "I96 attends to KV of somebody else",
                    self.process_id,
                    hold,
                    place,
                )
            if grows:
                self._write(hold, tokens, [text.kv(first + tokens)])
        return None

    def _write(self, hold: int, first: int, marks: list[bytes]) -> None:
        blocks = self.offered[hold]
        for place, mark in enumerate(marks, first):
            assert place < len(blocks) * BLOCK_TOKENS, (
                "I102 no room for a token",
                self.process_id,
                hold,
                place,
            )
            self.cache[blocks[place // BLOCK_TOKENS]][place % BLOCK_TOKENS] = self._share(mark)
        self.pushed[hold] = first + len(marks)
