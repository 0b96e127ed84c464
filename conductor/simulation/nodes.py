"""A simulated node and its pool of KV blocks: whole blocks by key, held blocks stay, the longest unused goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from halfmoon.schemas.events import BlocksEvicted, BlocksStored, Event


class BlockCache:
    """`hold` and `release` as a store agent's leases; `commit` makes blocks readable. Sizes are blocks."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        #: Readable blocks and by how many each is held; those that nobody holds in the order of their last use.
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        #: The number of blocks that are held.
        self.held = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def held_of(self, keys: Sequence[bytes]) -> int:
        """The number of `keys` that are held."""
        return sum(self._blocks.get(key, 0) > 0 for key in keys)

    def resize(self, slots: int) -> None:
        """Set another size; blocks that no longer fit are evicted."""
        self.slots = slots
        self._evict(min(len(self) - slots, len(self) - self.held))

    def run(self, keys: Sequence[bytes]) -> int:
        """The number of `keys`, from the first, that are here without a gap."""
        blocks = self._blocks
        for place, key in enumerate(keys):
            if key not in blocks:
                return place
        return len(keys)

    def hold(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keep those of `keys` that are here until `release`; returns them."""
        blocks = self._blocks
        here = [key for key in keys if key in blocks]
        for key in here:
            holders = blocks[key]
            if not holders:
                self.held += 1
            blocks[key] = holders + 1
        return here

    def release(self, keys: Sequence[bytes]) -> None:
        """Let go of `keys`. A block without holders is idle, as if used now, the last of a chain first."""
        blocks, used, idle = self._blocks, self._blocks.move_to_end, 0
        for key in reversed(keys):
            holders = blocks[key] - 1
            blocks[key] = holders
            if not holders:
                used(key)
                idle += 1
        self.held -= idle

    def commit(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Make blocks readable, held once for the caller; blocks without room are left out. (Added, evicted)."""
        blocks, free = self._blocks, self.slots - len(self)
        added: list[bytes] = []
        evicted: list[bytes] = []
        for key in keys:
            if key in blocks:
                continue
            if free > 0:
                free -= 1
            elif self.held < len(blocks):
                evicted += self._evict(1)
            else:
                break
            blocks[key] = 1
            self.held += 1
            added.append(key)
        return added, evicted

    def commit_released(
        self, keys: Sequence[bytes], held: Sequence[bytes]
    ) -> tuple[list[bytes], list[bytes]]:
        """`commit`, and `release` of what the caller holds then: `held`, some of `keys`, and what was added."""
        blocks = self._blocks
        absent = [key for key in keys if key not in blocks]
        lacking = len(absent) - (self.slots - len(blocks))
        # Mostly a prompt's first blocks are held and there is room for the others, which nobody holds in the end.
        if keys[len(held) :] == absent and lacking <= len(blocks) - self.held:
            evicted = self._evict(lacking)
            blocks.update(dict.fromkeys(reversed(absent), 0))
            self.release(held)
            return absent, evicted
        added, evicted = self.commit(keys)
        ours = dict.fromkeys([*held, *added])
        self.release([key for key in keys if key in ours])
        return added, evicted

    def _evict(self, count: int) -> list[bytes]:
        """The blocks that go, of which nobody may hold so many."""
        blocks, evicted = self._blocks, list[bytes]()
        while len(evicted) < count:
            key, holders = blocks.popitem(False)
            if holders:
                # Its place says nothing until it is released.
                blocks[key] = holders
            else:
                evicted.append(key)
        return evicted


class Node:
    """A node and its pool, which announces the blocks that it gains and loses, as a store agent does.

    `say` appends an event to the log.
    """

    def __init__(self, say: Callable[[Event], None], node_id: str, slots: int) -> None:
        self.node_id = node_id
        self._say = say
        self.pool = BlockCache(slots)

    def commit(self, keys: Sequence[bytes], held: Sequence[bytes]) -> None:
        """Make the blocks of a prompt readable, and release those that its order holds (`held`)."""
        added, evicted = self.pool.commit_released(keys, held)
        if evicted:
            self._say(BlocksEvicted(node_id=self.node_id, incarnation="i1", block_keys=b"".join(evicted)))
        if added:
            self._say(BlocksStored(node_id=self.node_id, incarnation="i1", block_keys=b"".join(added)))
