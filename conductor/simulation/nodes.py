"""A simulated node: a pool that announces the blocks that it gains and loses, as a store agent does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfmoon.conductor.simulation.block_cache import BlockCache
from halfmoon.schemas.events import BlocksEvicted, BlocksStored, Event


class Node:
    """A node by its name, and its pool; `say` appends an event to the log."""

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
