"""A simulated node: a pool of blocks that announces what it gains and loses, as a store agent does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfmoon.conductor.simulation.block_cache import BlockCache
from halfmoon.schemas.events import BlocksEvicted, BlocksStored

if TYPE_CHECKING:
    from halfmoon.conductor.simulation.world import World


class Node:
    """Name, pool, and the world that hears of both."""

    def __init__(self, world: World, node_id: str, slots: int) -> None:
        self.world, self.node_id = world, node_id
        self.pool = BlockCache(slots)

    def commit(self, keys: Sequence[bytes], held: Sequence[bytes]) -> None:
        """The blocks of a prompt are on the node, and no order of it holds them any more (those in `held`
        were).
        """
        added, evicted = self.pool.commit(keys)
        if evicted:
            self.world.say(
                BlocksEvicted(node_id=self.node_id, incarnation="i1", block_keys=b"".join(evicted))
            )
        if added:
            self.world.say(BlocksStored(node_id=self.node_id, incarnation="i1", block_keys=b"".join(added)))
        ours = dict.fromkeys([*held, *added])
        self.pool.release([key for key in keys if key in ours])
