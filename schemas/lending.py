"""Lending between decode workers: one asks another to hold segments of a sequence, and to attend to them.

Only these few words go over NATS; queries and states go over a channel (`halfmoon.store.channels`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from halfmoon.schemas.types import (
    BlockKeys,
    Blocks,
    Count,
    Id,
    KvHeads,
    Message,
    Ns,
    Part,
    Text,
    Tokens,
    check_whole_keys,
)


class PlaceWait(Part, frozen=True):
    """How long a step waits for another worker that holds parts of its sequences, and what that was measured to take.

    Of the newest steps it is the one in the middle.
    """

    worker_id: Id
    waited_ns: Ns
    expected_ns: Annotated[int, Meta(ge=1, le=2**62)]


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
    #: Of a move: the blocks follow over a channel, and none is read from a pool; so many.
    plan_id: Text = ""
    room_blocks: Blocks = 0
    #: At an attention worker: the tokens from `first_block` on that there must be room for, beyond those blocks too,
    #: and the KV heads (0: all). 0 tokens: those blocks are all there is to hold.
    tokens: Tokens = 0
    first_kv_head: KvHeads = 0
    kv_heads: KvHeads = 0
    #: At an attention worker: nothing new, but what it holds of this earlier order, from now on under `order_id`.
    adopts: Text = ""

    def __post_init__(self) -> None:
        check_whole_keys(self.block_keys)


class HoldReply(Message, frozen=True):
    """`refused` "": they are held under the number `hold`, and who asks for them connects to one of `addresses`."""

    hold: Count = 0
    addresses: list[Text] = []
    refused: Text = ""
