"""Which blocks of the paged cache are free, and which to give.

Imports no torch: a worker without a model (see `null_engine`) allocates the same way. Ask `can_allocate`
first;
`allocate` beyond it is our own mistake and an assertion. Blocks are given in one run where a run is free, since a
sequence whose blocks lie in a row is read in place, without a gather.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from itertools import pairwise


class BlockAllocator:
    """`num_blocks` blocks, numbered from 0. Free runs are kept as start to length, and by their starts in
    order.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, num_blocks
        self.num_blocks = num_blocks
        self._used = bytearray(num_blocks)
        self._length = {0: num_blocks} if num_blocks else {}
        self._starts = [0] if num_blocks else []
        self._free = num_blocks

    @property
    def free_blocks(self) -> int:
        return self._free

    def are_used(self, blocks: Iterable[int]) -> bool:
        """None of them is free."""
        return all(map(self._used.__getitem__, blocks))

    def can_allocate(self, count: int) -> bool:
        return count <= self._free

    def allocate(self, count: int) -> list[int]:
        """The smallest free run that holds `count`; without one, the longest runs, so that few pieces
        result.
        """
        assert 0 <= count <= self._free, (count, self._free)
        if count == 0:
            return []
        fitting = [(length, start) for start, length in self._length.items() if length >= count]
        if fitting:
            return self._take(min(fitting)[1], count)
        taken: list[int] = []
        while len(taken) < count:
            length, start = max((length, -start) for start, length in self._length.items())
            taken += self._take(-start, min(length, count - len(taken)))
        return taken

    def extend(self, table: list[int], count: int = 1) -> list[int]:
        """Appends `count` blocks to `table` and returns them: the next in the row while it is free.

        A new piece starts in the middle of the longest free run, where it and the run's left neighbour can
        both grow.
        """
        assert 0 <= count <= self._free, (count, self._free)
        added: list[int] = []
        while len(added) < count:
            after = table[-1] + 1 if table else self.num_blocks
            if after < self.num_blocks and not self._used[after]:
                block = after
            else:
                length, start = max((length, -start) for start, length in self._length.items())
                block = -start + (length // 2 if table else 0)
            self._take(block, 1)
            table.append(block)
            added.append(block)
        return added

    def free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert 0 <= block < self.num_blocks, (block, self.num_blocks)
            assert self._used[block], f"block {block} is freed twice"
            self._used[block] = 0
            self._free += 1
            self._join(block)

    def check(self) -> None:
        """Asserts that runs, marks and count agree: for tests."""
        spans = [(start, self._length[start]) for start in self._starts]
        assert len(self._length) == len(self._starts), ("I54 runs", self._length, self._starts)
        assert all(a + n < b for (a, n), (b, _) in pairwise(spans)), ("I54 runs that touch", spans)
        used, free = bytearray(b"\1") * self.num_blocks, 0
        for start, length in spans:
            used[start : start + length] = bytes(length)
            free += length
        assert used == self._used, ("I54 marks", spans, self._used)
        assert free == self._free, ("I54 count", free, self._free)

    def _take(self, first: int, count: int) -> list[int]:
        """Marks `[first, first + count)`, which lies inside one free run, as used."""
        at = bisect_right(self._starts, first) - 1
        start = self._starts[at]
        end = start + self._length[start]
        assert start <= first < first + count <= end, (first, count, start, end)
        if start == first:
            del self._starts[at], self._length[start]
        else:
            self._length[start] = first - start
        if first + count < end:
            insort(self._starts, first + count)
            self._length[first + count] = end - first - count
        self._used[first : first + count] = b"\1" * count
        self._free -= count
        return list(range(first, first + count))

    def _join(self, block: int) -> None:
        """Adds one free block to the runs, merging it with both neighbours."""
        start, length = block, 1
        if block + 1 in self._length:
            length += self._length.pop(block + 1)
            del self._starts[bisect_right(self._starts, block + 1) - 1]
        at = bisect_right(self._starts, block) - 1
        if at >= 0 and self._starts[at] + self._length[self._starts[at]] == block:
            start = self._starts[at]
            self._length[start] += length
            return
        insort(self._starts, start)
        self._length[start] = length
