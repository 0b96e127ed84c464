"""Displaced blocks: how often a block that was evicted is asked for again and has to be computed.

A copy of blocks that another node has displaces as many others where the pool is full. Its cost depends on the
displaced ones: a block that nobody asks for again costs nothing, and neither does one of which another node has a copy.
So the blocks that have left the last node are remembered for the time in which their pools turn over once, as the ghost
lists of ARC are (Megiddo and Modha, FAST'03), and requests are compared with them. One block in `SAMPLE` stands for
all, by its key, so that every conductor samples alike (as SHARDS does, Waldspurger et al., FAST'15).
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.state.block_index import BlockIndex
from halfmoon.schemas.types import KEY_BYTES, Blocks

SAMPLE = 16
#: By a byte of a key: 1 where it is in the sample.
_DRAWN = bytes(value % SAMPLE == 0 for value in range(256))
#: Evictions in the sample after which those before count half: the workload changes.
_COUNTED_MAX = 4_096
#: Remembered at least, in a cluster of small pools.
_GONE_MIN = 64
#: Of computing the blocks, in percent. Without a least price requests go wherever their first token comes a moment
#: earlier: their prefixes end up on all nodes, and the workers that idle, which a long prompt wants together, are few.
#: Of 2, 5, 10 and 20 percent, 5 was never behind no price at all on the hours of agents' sessions that it was tuned on.
_PRICE_PERCENT_MIN = 5
#: Most prompts that the price counts as held up. Without a bound a burst about one text stayed with the worker that had
#: read it first; 4 in place of 2 made no difference.
_HELD_UP_MAX = 2


class Displaced(msgspec.Struct, kw_only=True):
    """Counts of the sample, and its blocks that no node has any more."""

    evicted: int = 0
    #: Asked for again, when no node had them.
    missed: int = 0
    #: Blocks that no node has, oldest first.
    gone: dict[bytes, bool] = {}

    def evict(self, index: BlockIndex, block_keys: bytes, pool_blocks: Blocks) -> None:
        """Call after `index` has dropped a node's blocks. `pool_blocks`: of all nodes."""
        for key in _sampled(block_keys):
            self.evicted += 1
            if not index.holds(key):
                self.gone.pop(key, None)
                self.gone[key] = True
        while len(self.gone) > max(_GONE_MIN, pool_blocks // SAMPLE):
            del self.gone[next(iter(self.gone))]
        if self.evicted > _COUNTED_MAX:
            self.evicted, self.missed = self.evicted // 2, self.missed // 2

    def ask(self, index: BlockIndex, block_keys: bytes) -> None:
        """A request has these blocks."""
        if not self.gone:
            return
        for key in _sampled(block_keys):
            if self.gone.pop(key, False) and not index.holds(key):
                self.missed += 1

    def rate(self, prompts_permille: int) -> tuple[int, int]:
        """The expected cost of copying blocks, as a share of computing them: part and whole.

        A worker that computes displaced blocks again holds up all its prompts: `prompts_permille` is the mean number of
        prompts that a worker has in hand, times a thousand.
        """
        part, whole = min(self.missed, self.evicted), max(1, self.evicted)
        if part * 100 < whole * _PRICE_PERCENT_MIN:
            part, whole = _PRICE_PERCENT_MIN, 100
        return part * (1_000 + min(prompts_permille, 1_000 * _HELD_UP_MAX)), whole * 1_000


def _sampled(block_keys: bytes) -> list[bytes]:
    # The keys of simulated blocks count in the low bytes of their halves; real ones are random in all. A byte for each
    # key, so that no loop goes over those that are passed over.
    low, high = block_keys[7::KEY_BYTES], block_keys[15::KEY_BYTES]
    drawn = (int.from_bytes(low) ^ int.from_bytes(high)).to_bytes(len(low)).translate(_DRAWN)
    found, place = [], drawn.find(1)
    while place >= 0:
        found.append(block_keys[place * KEY_BYTES : (place + 1) * KEY_BYTES])
        place = drawn.find(1, place + 1)
    return found
