"""Tokens of others' sequences in this worker's cache, and how more of them arrive.

A push (`push.push_tokens`) brings tokens to a hold, some at a time, of which each layer is a message (APPEND), in the
order of the layers; they are there once the last layer is. A push that broke off is begun again where `tokens` stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfmoon.store.channels.header import MessageHeader
from halfmoon.workers.attention.tensors import DTYPES
from halfmoon.workers.model.attention.kernel import Tensor
from halfmoon.workers.model.paged_cache import PagedCache


@dataclass(slots=True, eq=False)
class HeldSegments:
    """`blocks` of the cache, whose first `tokens` tokens are consecutive ones of one sequence, from the begin of a
    segment on.
    """

    blocks: list[int]
    tokens: int
    #: No question is answered before this many tokens are here.
    expected: int = 0
    #: Arriving tokens: the layer that is due, and their number.
    layer_due: int = 0
    rows_due: int = 0
    #: The newest list of whole caches that has it: the only one that may make it longer.
    attender: object = None

    @property
    def complete(self) -> bool:
        return self.tokens >= self.expected

    def room(self, cache: PagedCache) -> int:
        """Tokens that it can have."""
        return len(self.blocks) * cache.block_tokens

    def problem(self, header: MessageHeader, cache: PagedCache) -> str:
        """Why an APPEND is not taken, by field, or nothing."""
        rows, room = header.rows, self.room(cache)
        kv_heads, head_dim = cache.k.shape[-2:]
        size = 2 * rows * kv_heads * head_dim * cache.dtype.itemsize
        if header.dtype is not DTYPES[cache.dtype]:
            return f"dtype: {header.dtype.name}, not {DTYPES[cache.dtype].name}"
        if not rows or header.payload_bytes != size:
            return f"payload_bytes: {header.payload_bytes} of {rows} tokens, where {size} were due"
        # A push that broke off begins again, but nothing changes that somebody may be attending to.
        if header.step > self.tokens or (self.complete and header.step != self.tokens):
            return f"step: token {header.step}, where {self.tokens} are here"
        if header.step + rows > room:
            return f"rows: {rows} tokens from {header.step} on, and there is room for {room}"
        if header.layer >= cache.layers or header.layer not in (0, self.layer_due):
            return f"layer: {header.layer} of {cache.layers}, where {self.layer_due} was due"
        if header.layer and (header.step, rows) != (self.tokens, self.rows_due):
            return f"rows: {rows} tokens from {header.step} on, where {self.rows_due} from {self.tokens} on were due"
        return ""

    def append(self, header: MessageHeader, payload: Tensor, cache: PagedCache) -> None:
        """Writes one layer of the tokens that arrive. `header` has no problem."""
        k, v = payload.view(cache.dtype).view(2, header.rows, *cache.k.shape[-2:])
        write(cache, header.layer, slots_of(self.blocks, header.step, header.rows, cache), k, v)
        self.tokens, self.rows_due, self.layer_due = header.step, header.rows, header.layer + 1
        if self.layer_due == cache.layers:
            self.tokens, self.layer_due = self.tokens + header.rows, 0


def slots_of(blocks: Sequence[int], first: int, tokens: int, cache: PagedCache) -> Tensor:
    """Rows of the cache (block * block_tokens + offset) of consecutive tokens of a hold."""
    size = cache.block_tokens
    rows = [blocks[i // size] * size + i % size for i in range(first, first + tokens)]
    return torch.tensor(rows, dtype=torch.int64, device=cache.device)


def write(cache: PagedCache, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """`k` and `v` `[rows, kv_heads, head_dim]` of one layer."""
    cache.k[layer].flatten(0, 1).index_copy_(0, slots, k)
    cache.v[layer].flatten(0, 1).index_copy_(0, slots, v)
