"""RowClient: an engine's rows in a store whose blocks have another length: a row is stored as the blocks that it fills.

So an agent holds the KV of engines whose rows differ: give it blocks of a length that divides them all. A row is there
when all of its blocks are. Each is evicted, and brought from another node, for itself.
"""

# Blocks of one length keep the pool a plain array of slots, which cannot be fragmented. A pool with classes of sizes,
# as memcached has, must share its memory out between them, and move it when the load changes. Here the engine's side
# cuts rows up instead, and what a row's last block lacks is the waste.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from halfmoon.store.client import StoreClient
from halfmoon.store.errors import StoreError, WrongSize

T = TypeVar("T")
Row = npt.NDArray[np.uint8]
#: Most blocks of a row: each is a key in the log, and in every question.
PARTS_MAX = 64
#: Of a row's blocks, the part that may be no row's: one of so many.
WASTE_ONE_OF = 5
#: Most keys of an exchange with the store.
KEYS_MAX = 4096


class RowClient:
    """The three calls of a `StoreClient` that an engine needs, for rows: u8 `[row_bytes]`, contiguous."""

    def __init__(self, client: StoreClient, row_bytes: int) -> None:
        """Raises WrongSize where blocks of this length do not suit the rows."""
        block_bytes = client.block_bytes
        self._parts = -(-row_bytes // block_bytes)
        waste = self._parts * block_bytes - row_bytes
        if self._parts > PARTS_MAX or waste * WASTE_ONE_OF > self._parts * block_bytes:
            raise WrongSize(f"blocks of {block_bytes} bytes, this engine's have {row_bytes}")
        self._client = client
        self._row_bytes, self._block_bytes = row_bytes, block_bytes
        self._rows_at_once = max(1, KEYS_MAX // self._parts)

    async def batch_exists(self, keys: Sequence[bytes]) -> list[bool | StoreError]:
        """As `StoreClient.batch_exists`: an error where the row may be there."""
        found: list[bool | StoreError] = []
        for part in self._batches(len(keys)):
            answers = await self._client.batch_exists(self._block_keys(keys[part]))
            found += [_worst(of_row) for of_row in self._by_row(answers)]
        return found

    async def batch_put(self, values: Mapping[bytes, Row]) -> list[StoreError | None]:
        """As `StoreClient.batch_put`. What it stored of a row that failed stays until it is evicted."""
        stored: list[StoreError | None] = []
        keys, rows = list(values), list(values.values())
        for part in self._batches(len(keys)):
            blocks = [block for row in rows[part] for block in self._blocks(row, filled=True)]
            block_keys = self._block_keys(keys[part])
            answers = await self._client.batch_put(dict(zip(block_keys, blocks, strict=True)))
            stored += [_first(of_row) for of_row in self._by_row(answers)]
        return stored

    async def batch_get_into(
        self, keys: Sequence[bytes], into: Sequence[Row], *, verify: bool = False
    ) -> list[StoreError | None]:
        """As `StoreClient.batch_get_into`. A row that failed may have some of its bytes."""
        moved: list[StoreError | None] = []
        for part in self._batches(len(keys)):
            blocks = [block for row in into[part] for block in self._blocks(row, filled=False)]
            answers = await self._client.batch_get_into(self._block_keys(keys[part]), blocks, verify=verify)
            problems = [_first(of_row) for of_row in self._by_row(answers)]
            lasts = blocks[self._parts - 1 :: self._parts]
            for row, last, problem in zip(into[part], lasts, problems, strict=True):
                if problem is None:
                    self._take_last(row, last)
            moved += problems
        return moved

    def _batches(self, rows: int) -> list[slice]:
        each = self._rows_at_once
        return [slice(first, first + each) for first in range(0, rows, each)]

    def _by_row(self, answers: Sequence[T]) -> list[Sequence[T]]:
        return [answers[first : first + self._parts] for first in range(0, len(answers), self._parts)]

    def _block_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """A row of one block has its own key; a part of one names the length of blocks too, which other nodes of the
        cluster may have chosen otherwise.
        """
        size = self._block_bytes
        if self._row_bytes == size:
            return list(keys)
        tails = [b"%d of %d" % (part, size) for part in range(self._parts)]
        return [xxhash.xxh3_128_digest(key + tail) for key in keys for tail in tails]

    def _blocks(self, row: Row, *, filled: bool) -> list[Row]:
        """Views of the row, but for a last one that is longer than what is left of it. `filled`: it has its bytes."""
        size = self._block_bytes
        blocks = [row[first : first + size] for first in range(0, self._row_bytes, size)]
        if (left := len(blocks[-1])) < size:
            last = np.zeros(size, np.uint8)
            if filled:
                last[:left] = blocks[-1]
            blocks[-1] = last
        return blocks

    def _take_last(self, row: Row, last: Row) -> None:
        """The bytes of a last block that is no view of the row."""
        if self._row_bytes % self._block_bytes:
            left = row[(self._parts - 1) * self._block_bytes :]
            left[:] = last[: len(left)]


def _first(answers: Sequence[StoreError | None]) -> StoreError | None:
    return next((problem for problem in answers if problem is not None), None)


def _worst(answers: Sequence[bool | StoreError]) -> bool | StoreError:
    """False where a block is missing, whatever the others are."""
    if False in answers:
        return False
    return next((problem for problem in answers if isinstance(problem, StoreError)), True)
