"""The workers that are asked to hold parts of this worker's sequences, or all of their KV. Pure.

Source: Infinite-LLM (arXiv 2401.02669), section 4: a debtor's side of a loan.
"""

from __future__ import annotations

import msgspec

from halfmoon.schemas.lending import HoldRequest, KvPart
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.decode.actions import Action, AskHold, PushTail
from halfmoon.workers.decode.sequence import DecodeSequence

#: How long, and how often, a lender that does not take a part is asked again.
LENDER_NS = 60 * SECOND_NS
LENDER_PAUSE_NS = SECOND_NS // 10


class Lenders:
    """See the module. Methods append their actions to `out`."""

    def __init__(self, worker_id: str, node_id: str, block_tokens: int) -> None:
        self.worker_id, self.node_id, self.block_tokens = worker_id, node_id, block_tokens

    def ask_all(self, sequence: DecodeSequence, now_ns: int, out: list[Action]) -> None:
        """Once all of its KV is in the node's pool, and its keys are known, the lenders fetch their parts."""
        if sequence.asked_ns or not sequence.taken or not (sequence.kv.announced or sequence.order.resumes):
            return
        sequence.asked_ns = now_ns
        for part in sequence.parts:
            self._ask(sequence, part, 0, out)

    def _ask(self, sequence: DecodeSequence, part: KvPart, after_ns: int, out: list[Action]) -> None:
        order, blocks = sequence.order, sequence.blocks_of(part)
        tokens = order.prompt_tokens + order.max_tokens - blocks.start * self.block_tokens
        request = HoldRequest(
            owner_id=self.worker_id,
            order_id=order.order_id,
            source_node_ids=list(dict.fromkeys(filter(None, (self.node_id, order.prefill_node_id)))),
            first_block=blocks.start,
            block_keys=b"" if order.resumes else sequence.block_keys[: blocks.stop * KEY_BYTES],
            tenant=sequence.tenant,
            tokens=tokens if part.grows else 0,
            first_kv_head=part.first_kv_head or 0,
            kv_heads=part.kv_heads or 0,
            adopts=order.resumes,
        )
        out.append(AskHold(part.worker_id, request, after_ns))

    def push_tail(
        self, sequence: DecodeSequence, pushing: dict[str, DecodeSequence], out: list[Action]
    ) -> None:
        """Once all of its parts are held, and the end of its prompt is here, that goes to them too."""
        ends = tuple(part for part in sequence.parts if part.grows)
        if not sequence.tail_due or sequence.order_id in pushing or not sequence.kv.complete:
            return
        if not all(part.hold for part in sequence.parts):
            return
        (block,) = sequence.own_blocks
        first = sequence.away * self.block_tokens
        # All of them begin at the same block: by heads there are several, by sequence there is one.
        before = sequence.blocks_of(ends[0]).start * self.block_tokens
        pushing[sequence.order_id] = sequence
        tokens = sequence.prompt_tokens - first
        out.append(PushTail(sequence.order_id, block, first - before, tokens, ends))

    def held(self, sequence: DecodeSequence, worker_id: str, hold: int) -> bool:
        """A lender has a part. False: it was not waited for."""
        part = _awaited(sequence, worker_id)
        if part is None:
            return False
        sequence.parts[sequence.parts.index(part)] = msgspec.structs.replace(part, hold=hold)
        return True

    def not_held(self, sequence: DecodeSequence, worker_id: str, now_ns: int, out: list[Action]) -> bool:
        """It has not: the blocks are not in the pool yet, or it is full for now. It is asked again; False: no more."""
        part = _awaited(sequence, worker_id)
        if part is None:
            return True
        # What it once had and has no more will not come back.
        if now_ns - sequence.asked_ns > LENDER_NS or sequence.order.resumes:
            return False
        self._ask(sequence, part, LENDER_PAUSE_NS, out)
        return True


def _awaited(sequence: DecodeSequence, worker_id: str) -> KvPart | None:
    """The part of an open order that the lender was asked for, and has not confirmed."""
    waits = (part for part in sequence.parts if part.worker_id == worker_id and not part.hold)
    return next(waits, None) if sequence.asked_ns else None


def borrows_of(sequence: DecodeSequence, worker_id: str) -> bool:
    """Something of it lies, or is to lie, at that worker."""
    return any(part.worker_id == worker_id for part in sequence.parts)


def holds_under(sequence: DecodeSequence, worker_id: str, hold: int) -> bool:
    """True where the sequence has a part that the worker holds under this number."""
    return any((part.worker_id, part.hold) == (worker_id, hold) for part in sequence.parts)
