"""Coming blocks: the prefixes that workers will hold once all prompts that they have accepted are computed.

A prompt waits at its worker for the blocks of one before it in the queue (`workers/prefill/state.py`,
`workers/mixed/state.py`), and one that counts on such blocks passes none. So to a new prompt these blocks are as good
as held, at that worker alone.

They follow from the orders, and are in no snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from halfmoon.conductor.core.state.records import Order, Request
from halfmoon.schemas.keys import common_blocks, share_block
from halfmoon.schemas.types import KEY_BYTES, Blocks


class ComingBlocks:
    """Prompts that workers have accepted and not computed, by their first block. `at_mixed`: of mixed workers too."""

    __slots__ = ("_at_mixed", "_by_first", "_first")

    def __init__(self, orders: Iterable[Order], requests: Mapping[str, Request], *, at_mixed: bool) -> None:
        self._at_mixed = at_mixed
        #: First key → order → worker and keys.
        self._by_first: dict[bytes, dict[str, tuple[str, bytes]]] = {}
        #: First key of each order.
        self._first: dict[str, bytes] = {}
        for order in orders:
            if order.phase == "prefill":
                self.add(order, requests[order.request_id].event.block_keys)

    def add(self, order: Order, block_keys: bytes) -> None:
        """Mixed workers of older logs did not wait, and what a similar prompt stood in for is shared by none: these
        promise nothing.
        """
        if (order.mixed and not self._at_mixed) or order.prefill.similar or not block_keys:
            return
        first = block_keys[:KEY_BYTES]
        self._by_first.setdefault(first, {})[order.order_id] = order.prefill_id, block_keys
        self._first[order.order_id] = first

    def remove(self, order_id: str) -> None:
        first = self._first.pop(order_id, None)
        if first is not None:
            alike = self._by_first[first]
            del alike[order_id]
            if not alike:
                del self._by_first[first]

    def match(self, block_keys: bytes) -> dict[str, Blocks]:
        """By worker, how many blocks of a prompt from the first on it will have; workers with none are absent."""
        found: dict[str, Blocks] = {}
        for worker_id, coming in self._by_first.get(block_keys[:KEY_BYTES], {}).values():
            known = found.setdefault(worker_id, 1)
            # Many share their first block and no more, so the next one says mostly that this prompt brings no others.
            if share_block(block_keys, coming, known):
                found[worker_id] = common_blocks(block_keys, coming)
        return found
