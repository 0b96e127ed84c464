"""The mixed worker's cache as the batch former asks for it: blocks enter with a prompt and grow with an answer. Pure.

Blocks are given between two iterations only, when no thread works on any.
"""

from __future__ import annotations

from collections.abc import Mapping

from halfmoon.schemas.policy import Layout
from halfmoon.workers.mixed.request import MixedRequest
from halfmoon.workers.model.block_allocator import BlockAllocator


class CacheRoom:
    """`requests` are the open ones, by order. An engine that computes nothing has no blocks to run out of."""

    def __init__(self, requests: Mapping[str, MixedRequest], layout: Layout, kv_blocks: int) -> None:
        self.blocks = BlockAllocator(kv_blocks)
        self._requests, self._layout = requests, layout

    @property
    def blocks_used(self) -> int:
        return self.blocks.num_blocks - self.blocks.free_blocks

    def enter(self, name: str, tokens: int) -> int | None:
        """How many of the tokens are in the node's pool."""
        request = self._requests[name]
        count = self._layout.blocks(tokens)
        if self._layout.layers == 0:
            request.sequence.table = [0] * count
            return 0
        if not self.blocks.can_allocate(count):
            return None
        request.sequence.table = self.blocks.allocate(count)
        return request.cached_tokens

    def grow(self, name: str) -> bool:
        """A block for the token that is fed next, where it begins one."""
        request = self._requests[name]
        table = request.sequence.table
        if request.position // self._layout.block_tokens < len(table):
            return True
        if self._layout.layers == 0:
            table.append(0)
        elif self.blocks.can_allocate(1):
            self.blocks.extend(table)
        else:
            return False
        return True

    def leave(self, name: str) -> None:
        """Its rows of an iteration that is being made have its table still, and write to blocks that nobody gets before
        the next one is formed.
        """
        sequence = self._requests[name].sequence
        table, sequence.table = sequence.table, []
        if self._layout.layers:
            self.blocks.free(table)
