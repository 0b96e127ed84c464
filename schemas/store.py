"""Control of the store agents, by request and reply on `halfmoon.store.<node_id>.<verb>`. Never bytes of blocks.

The first half is spoken by a node's workers to their own agent (by way of `halfmoon.store.agent_client`), the second
between agents. Any request may be answered by a ProcessError; its codes are those of `halfmoon.store.errors`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import (
    BLOCKS_MAX,
    BlockKeys,
    Blocks,
    Bytes,
    Count,
    Id,
    Layers,
    LayersOfRun,
    Message,
    Ns,
    PackedTokens,
    Part,
    Text,
    Tokens,
)

Slots = Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=BLOCKS_MAX)]
Tenant = Annotated[str, Meta(max_length=128)]
#: A tenant as pools and their files know it (`halfmoon.store.pool.slots.tenant_mark`).
Mark = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?$(?!\n)")]


_REFERENCE = "-reference"


def reference_hold(order_id: str) -> str:
    """The id under which an order's similar prompt is held, beside the prompt's own hold; it ends with the order."""
    return order_id + _REFERENCE


def order_of_hold(hold_id: str) -> str:
    """The order that has a hold, be it of its prompt or of a similar one."""
    return hold_id.removesuffix(_REFERENCE)


class Done(Message, frozen=True):
    """The request was obeyed; there is no result."""


# --- worker to its own agent ------------------------------------------------------------------------------------


class Attach(Message, frozen=True):
    """Verb `attach`: where is the node's memory?

    Asked again with `mapped`, the incarnation whose memory the worker has mapped: from then on orders open for it.
    """

    worker_id: Id
    mapped: str = ""
    #: Differs between two processes that bear the same name, one after the other.
    process: str = ""
    #: It understands `KvReady.layers`.
    hears_runs: bool = False


class Attached(Message, frozen=True):
    """Where the node's memory is, and how it is laid out."""

    node_id: Id
    incarnation: Id
    #: Name of the segment in /dev/shm.
    segment: str
    slots: Blocks
    layout: Layout
    lease_ttl_ns: Ns
    #: No transfer of this agent takes longer.
    transfer_ns_max: Ns
    #: It publishes the tokens of blocks: `OpenPut.token_ids`.
    wants_tokens: bool = False
    #: A `push` may be published, and may be of several layers. Pushes with a number are told apart, and `close_push`
    #: says when some were lost.
    hears_pushes: bool = False


class OpenPut(Message, frozen=True):
    """Verb `open_put`: lease the blocks of these keys that are here, reserve slots for the others.

    `blocks` counts slots; those after the last key (a partial tail) get none.
    """

    order_id: Id
    worker_id: Id
    block_keys: BlockKeys
    blocks: Blocks
    #: Keys of the chain before `block_keys`: they count as used with them, so that they are not evicted first.
    head_keys: BlockKeys = b""
    #: Whose quota the new blocks count in; a block of another tenant is refused.
    tenant: Tenant = ""
    #: Bytes that the caller takes a block to have; 0: it has asked (`Attached.layout`).
    block_bytes: Bytes = 0
    #: Of the blocks with keys, where the agent wants them: it publishes them (`--kv-events-tokens`).
    token_ids: PackedTokens = b""


class PutOpened(Message, frozen=True):
    """`slots[i]`, in its epoch `epochs[i]`, is for block i. Those in `present` hold their bytes already and must not be
    written.

    Reserved slots may be written until `lease_ttl_ns` after the last activity of the order.
    """

    slots: Slots
    epochs: list[int]
    incarnation: Id
    lease_ttl_ns: Ns
    present: Slots = []


class FetchBlocks(Message, frozen=True):
    """Verb `fetch`: read these blocks of the order from another node; `KvLoaded` announces layers as they come."""

    order_id: Id
    worker_id: Id
    source_node_id: Id
    first_block: Blocks
    blocks: Blocks
    replica_node_ids: list[Id] = []  # that have them too, for the case that the source fails
    traceparent: str = ""


class Fetched(Message, frozen=True):
    """`blocks` blocks are readable and committed here; `bytes` were moved, from the source or a replica. With `missing`
    nothing was: no node that was asked has more than the first `held` of them."""

    bytes: Bytes
    elapsed_ns: Ns
    blocks: Blocks
    missing: bool = False
    held: Blocks = 0
    source_node_id: str = ""


class CommitBlocks(Message, frozen=True):
    """Verb `commit`: the blocks are written; make those that have keys visible."""

    order_id: Id
    worker_id: Id
    first_block: Blocks
    blocks: Blocks


class OpenPush(Message, frozen=True):
    """Verb `open_push`: reserve room for the order's blocks at the target and notify the decode worker
    (`TransferOpened`)."""

    order_id: Id
    request_id: Id
    worker_id: Id
    target_node_id: Id
    decode_worker_id: Id
    #: Of the prompt: of its last block no more is moved than what they fill. 0: that is not known, it is moved whole.
    tokens: Tokens = 0


class PushLayer(Part, frozen=True):
    """Layers `layer .. layer + layers - 1` of these blocks are written here: move them."""

    order_id: Id
    layer: Layers
    first_block: Blocks
    blocks: Blocks
    #: Of the order's pushes, from 1 on: one that comes again is passed over. 0: the worker does not number them.
    number: Count = 0
    layers: LayersOfRun = 1


class PushLayers(Message, frozen=True):
    """Verb `push`, published. Asked by a worker that does not number its pushes, it is answered once it is heard."""

    worker_id: Id
    pushes: list[PushLayer]


class ClosePush(Message, frozen=True):
    """Verb `close_push`: there were `pushes` of them; answer when all are readable at the target."""

    order_id: Id
    worker_id: Id
    pushes: Count
    traceparent: str = ""
    #: They were published before this was asked: those that have not come were lost.
    published: bool = False


class Pushed(Message, frozen=True):
    """`elapsed_ns`: spent moving, not from open to close. With `lost` nothing is closed: so many of the pushes have not
    come, and the worker publishes all of them again.
    """

    bytes: Bytes
    elapsed_ns: Ns
    lost: Count = 0


class KeepOrders(Message, frozen=True):
    """Subject verb `keep`, published: these orders of the worker wait for their turn, and go on."""

    worker_id: Id
    order_ids: list[Id]


class ReleaseBlocks(Message, frozen=True):
    """Verb `release`: the worker will neither read nor write anything of the order any more. Idempotent."""

    order_id: Id
    worker_id: Id


class StoreStatusRequest(Message, frozen=True):
    """Verb `status`."""


class StoreStatus(Message, frozen=True):
    """The agent's slots by use, and its counters since it started."""

    node_id: Id
    incarnation: Id
    slots: Blocks
    slots_free: Blocks
    slots_reserved: Blocks
    slots_committed: Blocks
    slots_condemned: Blocks
    #: Committed slots that somebody holds, and how many holds there are on committed slots.
    slots_leased: Blocks
    leases: Count
    #: Parties of orders that hold anything.
    holds: Count
    pushes_open: Count
    #: By name: bytes moved by transport and direction, refusals by reason, failures by kind.
    counters: dict[str, int] = {}
    #: Transports that this agent has not, and why.
    absent: dict[str, str] = {}


# --- any program beside its own agent (`halfmoon.store.client`) -------------------------------------------------


class ProbeBlocks(Message, frozen=True):
    """Verb `probe`: which of these are here? Renews nothing."""

    block_keys: BlockKeys
    tenant: Tenant = ""
    mark: Mark = ""  # in place of the tenant, from agents that know no more than its mark


class Probed(Message, frozen=True):
    """Indices of the keys that are committed here, in memory and on the SSD; those of other tenants are not named."""

    dram: Slots = []
    ssd: Slots = []


class TakeBlocks(Message, frozen=True):
    """Verb `take`: lease those of these blocks that are here for `party`, until `end_lease`; from the SSD too."""

    order_id: Id
    party: Id
    block_keys: BlockKeys
    tenant: Tenant = ""
    #: Bytes that the caller takes a block to have; 0: it has asked.
    block_bytes: Bytes = 0


class Taken(Message, frozen=True):
    """`slots[i]`, with its checksum and in its epoch, holds the block of key `present[i]`; the other keys are not
    here.
    """

    incarnation: Id
    present: Slots = []
    slots: Slots = []
    epochs: list[int] = []
    checksums: list[int] = []


class RemoveBlocks(Message, frozen=True):
    """Verb `remove`: forget those of these blocks that nobody holds, in every tier."""

    block_keys: BlockKeys
    tenant: Tenant = ""
    mark: Mark = ""


class Removed(Message, frozen=True):
    """Indices of the keys that were here and are gone."""

    removed: Slots = []


class PinBlocks(Message, frozen=True):
    """Verb `pin`, for `ttl_ns` (0: no longer). All of them or none; a pin that nobody renews ends by itself.

    `hard`: never evicted; at most half of a pool. Otherwise they go only when nothing else can.
    """

    party: Id
    block_keys: BlockKeys
    ttl_ns: Ns
    hard: bool = False
    tenant: Tenant = ""


# --- agent to agent ---------------------------------------------------------------------------------------------


class RemoteMemory(Part, frozen=True):
    """Registered memory as a peer names it: a decimal address, because it may need all 64 bits, bytes, and the key."""

    address: Annotated[str, Meta(pattern=r"^[0-9]{1,20}$")]
    size: Bytes
    rkey: Count


class Hello(Message, frozen=True):
    """Verb `hello`, asked and answered with the same message: an agent's identity and the ways to its memory.

    `proof`: HMAC-SHA256 of the fields under the cluster's secret; without it an agent is refused.
    """

    node_id: Id
    incarnation: Id
    host: Text
    #: A name in /dev/shm, and no way out of it.
    segment: Annotated[str, Meta(pattern=r"^halfmoon-[A-Za-z0-9_-]{1,160}$(?!\n)")]
    slots: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    layout: Layout
    endpoints: Annotated[list[Endpoint], Meta(max_length=64)]
    proof: str = ""


class LeaseBlocks(Message, frozen=True):
    """Verb `lease`: keep `block_keys[first_block:]` for a reader. All keys from the head of the chain are named, so
    that heads stay newer."""

    order_id: Id
    party: Id
    block_keys: BlockKeys
    first_block: Blocks


class Leased(Message, frozen=True):
    """With `missing`, nothing is leased and only the first `held` blocks asked for are here."""

    incarnation: Id
    slots: Slots = []
    checksums: list[int] = []
    missing: bool = False
    held: Blocks = 0


class EndLease(Message, frozen=True):
    """Verb `end_lease`."""

    order_id: Id
    party: Id


class LeaseEnded(Message, frozen=True):
    """`held`: the lease held until now, so bytes that were read in it are the committed ones."""

    held: bool


class ReserveBlocks(Message, frozen=True):
    """Verb `reserve`: an `open_put` on behalf of the decode worker of this node, into which `writer_node_id` will
    write.
    """

    order_id: Id
    decode_worker_id: Id
    writer_node_id: Id
    block_keys: BlockKeys
    blocks: Blocks
    tenant: Mark = ""
    #: Of the blocks with keys, where the writer's agent knows them.
    token_ids: PackedTokens = b""


class Reserved(Message, frozen=True):
    """The writer must not write later than `lease_ttl_ns` after it sent this request, or its last `renew`. `epochs`, of
    the slots, are for the reader.
    """

    incarnation: Id
    slots: Slots
    epochs: list[int]
    lease_ttl_ns: Ns
    present: Slots = []
    #: A block that is filled in part may be written in part.
    takes_part: bool = False
    #: The decode worker understands `KvReady.layers`.
    hears_runs: bool = False


class RenewBlocks(Message, frozen=True):
    """Verb `renew`: the push still runs."""

    order_id: Id
    decode_worker_id: Id
    writer_node_id: Id


class SettleBlocks(Message, frozen=True):
    """Verb `settle`: everything is written; commit it. The writer will not write any more."""

    order_id: Id
    decode_worker_id: Id
    writer_node_id: Id


class DropBlocks(Message, frozen=True):
    """Verb `drop`: the push ends without success. The writer will not write any more. Idempotent."""

    order_id: Id
    decode_worker_id: Id
    writer_node_id: Id


class QueuePair(Message, frozen=True):
    """Verb `pair`, asked and answered alike: one end of an RDMA connection, for the other to connect its own to.

    `region`: the pool's segment in this agent's memory, and `mailbox`: the memory for messages to this end.
    `proof`: HMAC-SHA256 of the fields under the cluster's secret.
    """

    node_id: Id
    incarnation: Id
    #: For whom it is made; nobody else takes it.
    to_node_id: Id
    to_incarnation: Id
    #: Number of this incarnation's message to that one, from 1; the answer repeats it. No message is taken twice.
    number: Count
    answer: bool
    qpn: Count
    psn: Count
    gid: Annotated[str, Meta(max_length=39)]
    lid: Count
    ethernet: bool
    mtu: Count
    region: RemoteMemory
    mailbox: RemoteMemory
    #: The receiver's queue pairs that this agent still uses; its others for this agent can go.
    still: Annotated[list[Count], Meta(max_length=1024)] = []
    proof: str = ""


# --- copies, for programs, operators and other agents -----------------------------------------------------------


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
