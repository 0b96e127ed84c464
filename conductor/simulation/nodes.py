"""A simulated node and its pool of KV blocks: whole blocks by key, held blocks stay, the longest unused goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from halfmoon.schemas.events import BlocksEvicted, BlocksStored, Event


class BlockCache:
    """`hold` and `release` as a store agent's leases; `commit` makes blocks readable. Sizes are blocks."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        #: Readable and held by nobody, the longest unused first; and held, with by how many.
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._held: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held or key in self._idle

    @property
    def held(self) -> int:
        """The number of blocks that are held."""
        return len(self._held)

    def held_of(self, keys: Sequence[bytes]) -> int:
        """The number of `keys` that are held."""
        return sum(key in self._held for key in keys)

    def resize(self, slots: int) -> None:
        """Set another size; blocks that no longer fit are evicted."""
        self.slots = slots
        while len(self) > slots and self._idle:
            self._idle.popitem(last=False)

    def run(self, keys: Sequence[bytes]) -> int:
        """The number of `keys`, from the first, that are here without a gap."""
        held, idle = self._held, self._idle
        for place, key in enumerate(keys):
            if key not in held and key not in idle:
                return place
        return len(keys)

    def hold(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keep those of `keys` that are here until `release`; returns them."""
        here = []
        for key in keys:
            if key in self._held:
                self._held[key] += 1
            elif key in self._idle:
                del self._idle[key]
                self._held[key] = 1
            else:
                continue
            here.append(key)
        return here

    def release(self, keys: Sequence[bytes]) -> None:
        """Let go of `keys`. A block without holders is idle, as if used now, the last of a chain first."""
        for key in reversed(keys):
            holders = self._held[key] - 1
            if holders:
                self._held[key] = holders
            else:
                del self._held[key]
                self._idle[key] = None

    def commit(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Make blocks readable, held once for the caller; blocks without room are left out. (Added, evicted)."""
        added: list[bytes] = []
        evicted: list[bytes] = []
        for key in keys:
            if key in self._held or key in self._idle:
                continue
            if len(self) >= self.slots:
                if not self._idle:
                    break
                evicted.append(self._idle.popitem(last=False)[0])
            self._held[key] = 1
            added.append(key)
        return added, evicted


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
        added, evicted = self.pool.commit(keys)
        if evicted:
            self._say(BlocksEvicted(node_id=self.node_id, incarnation="i1", block_keys=b"".join(evicted)))
        if added:
            self._say(BlocksStored(node_id=self.node_id, incarnation="i1", block_keys=b"".join(added)))
        ours = dict.fromkeys([*held, *added])
        self.pool.release([key for key in keys if key in ours])
