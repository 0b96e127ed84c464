"""Lending between decode workers: one asks another to hold segments of a sequence, and to attend to them.

Only these few words go over NATS; queries and states go over a channel (`halfmoon.store.channels`).
"""

from __future__ import annotations

from halfmoon.schemas.types import BlockKeys, Blocks, Count, Id, Message, Text, check_whole_keys


class HoldRequest(Message, frozen=True):
    """From a decode worker to a lender: bring these blocks of my sequence from a node's pool into your cache.

    They are whole segments. The conductor has booked their room, and takes the order back when it ends.
    """

    owner_id: Id
    order_id: Id
    #: Nodes whose pools have the blocks, best first.
    source_node_ids: list[Id]
    #: Of the sequence: where the blocks begin.
    first_block: Blocks
    #: Keys of all blocks up to the last one wanted, from the sequence's first on.
    block_keys: BlockKeys
    tenant: Text = ""

    def __post_init__(self) -> None:
        check_whole_keys(self.block_keys)


class HoldReply(Message, frozen=True):
    """`refused` "": they are held under the number `hold`, and who asks for them connects to one of `addresses`."""

    hold: Count = 0
    addresses: list[Text] = []
    refused: Text = ""
