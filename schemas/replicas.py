"""Control of copies: asked of a store agent by programs, operators and other agents, like the rest of
`halfmoon.schemas.store`.
"""

from __future__ import annotations

from halfmoon.schemas.store import Mark
from halfmoon.schemas.types import BlockKeys, Blocks, Id, Message


class Replicate(Message, frozen=True):
    """Verb `replicate`: hold copies of these blocks. With `move` the source forgets its own when nobody holds them."""

    block_keys: BlockKeys
    source_node_id: Id
    #: Of the blocks' tenant.
    mark: Mark = ""
    move: bool = False
    #: Ahead of need: the first to go until it is read.
    spare: bool = False


class Replicated(Message, frozen=True):
    """`blocks` were copied (those that were here already are not counted). With `full` there was no room for more."""

    blocks: Blocks
    full: bool = False


class DrainStore(Message, frozen=True):
    """Verb `drain`: hand the blocks that only you hold to these nodes, as far as there is room, then leave."""

    target_node_ids: list[Id]


class Drained(Message, frozen=True):
    """Blocks that were handed over, those that another node held already, and those that go with this node."""

    moved: Blocks
    elsewhere: Blocks
    left: Blocks
