"""The parts of a sequence that others hold: what a lender was asked for, and what it has. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.schemas.decisions import CachePlace, StartDecode
from halfmoon.schemas.policy import Layout


class LentPart:
    """Consecutive whole segments of a sequence, which `worker_id` holds once it has said so."""

    def __init__(self, worker_id: str, first_block: int, blocks: int) -> None:
        self.worker_id, self.first_block, self.blocks = worker_id, first_block, blocks
        #: 0: it does not hold them yet.
        self.hold = 0
        #: When it was asked first.
        self.asked_ns = 0


class CachePart(LentPart):
    """Some KV heads of a sequence from `first_block` on, which the attention worker of `place` holds once it has said
    so. The prompt's `blocks` whole blocks it brings there itself; what follows them is sent there, where the part
    `grows`: it has the sequence's end.
    """

    def __init__(self, place: CachePlace, prompt_blocks: int, segment_blocks: int) -> None:
        first = place.first_segment * segment_blocks
        super().__init__(place.worker_id, first, place.segments * segment_blocks or prompt_blocks - first)
        self.first_kv_head, self.kv_heads = place.first_kv_head, place.kv_heads
        self.grows = not place.segments


def blocks_away(parts: Sequence[LentPart]) -> int:
    """Blocks of a prompt that do not come here, the first ones."""
    return max([part.first_block + part.blocks for part in parts]) if parts else 0


def parts_of(order: StartDecode, layout: Layout) -> list[LentPart]:
    """The parts that an order's loans are, from the sequence's first block on, or that its cache has."""
    segment_blocks = layout.segment_tokens // layout.block_tokens
    if order.cache:
        whole = order.prompt_tokens // layout.block_tokens
        return [CachePart(place, whole, segment_blocks) for place in order.cache]
    parts: list[LentPart] = []
    first_block = 0
    for loan in order.loans:
        blocks = loan.segments * segment_blocks
        parts.append(LentPart(loan.worker_id, first_block, blocks))
        first_block += blocks
    return parts
