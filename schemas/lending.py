"""Parts of a sequence that other workers hold and attend to, and the requests to hold them.

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
    """The wait of a step for another worker that holds parts of its sequences, and the measured time of such parts.

    Median of the newest steps.
    """

    worker_id: Id
    waited_ns: Ns
    expected_ns: Annotated[int, Meta(ge=1, le=2**62)]


class JoinedHolder(Message, frozen=True):
    """Of a worker that joins: whose KV it holds, and whether its own is elsewhere."""

    #: Decode: it holds, and attends to, segments of others' sequences, and has others hold some of its own. Attention:
    #: it holds part of a sequence, in whole segments, where no such worker has room for all.
    lends: bool = False
    #: Decode: the KV of its sequences lies at attention workers, all of it.
    cache_elsewhere: bool = False
    #: Attention: its cache has `kv_heads` KV heads of each token, from this one on; 0: all heads.
    first_kv_head: KvHeads = 0
    kv_heads: KvHeads = 0
    #: Decode with `cache_elsewhere`: groups of rows that take turns; 0: the number that is best by its profile.
    decode_groups: Count = 0


class KvPart(Part, frozen=True):
    """Consecutive segments (`Layout.segment_tokens` tokens each) of a sequence's KV, or some heads of them, at the
    worker that attends to them.
    """

    worker_id: Id
    #: The first KV head, and how many; None: all that the model has.
    first_kv_head: KvHeads | None = None
    kv_heads: KvHeads | None = None
    #: Segments of the sequence before it. 0 in a list of loans, where each part begins at the end of the one before.
    first_segment: Blocks = 0
    #: Whole segments of the prompt; 0: the part grows, and has all tokens from `first_segment` on, new ones too.
    segments: Blocks = 0
    #: The number under which the worker holds it; 0, as in every message: the worker has not confirmed it yet.
    hold: Count = 0

    @property
    def grows(self) -> bool:
        return not self.segments

    def heads(self, kv_heads: int) -> range:
        """Its KV heads, of a model with `kv_heads`."""
        first = self.first_kv_head or 0
        return range(first, first + (kv_heads if self.kv_heads is None else self.kv_heads))

    def size(self, whole: int, segment: int) -> int:
        """Tokens of it in a sequence of `whole` tokens, in segments of `segment` each; or blocks, of both in blocks."""
        return self.segments * segment or max(0, whole - self.first_segment * segment)


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
    #: Of a move: `room_blocks` blocks follow over a channel, and none is read from a pool.
    plan_id: Text = ""
    room_blocks: Blocks = 0
    #: At an attention worker: the tokens from `first_block` on that there must be room for, beyond those blocks too,
    #: and the KV heads (0: all). 0 tokens: those blocks are all there is to hold.
    tokens: Tokens = 0
    first_kv_head: KvHeads = 0
    kv_heads: KvHeads = 0
    #: At an attention worker: no new hold, but the holds of this earlier order, from now on under `order_id`.
    adopts: Text = ""

    def __post_init__(self) -> None:
        check_whole_keys(self.block_keys)


class HoldReply(Message, frozen=True):
    """`refused` "": the blocks are held under the number `hold`; the owner connects to one of `addresses`."""

    hold: Count = 0
    addresses: list[Text] = []
    refused: Text = ""
