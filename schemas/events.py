"""Events: facts for the conductor, past tense, appended to the EVENTS stream.

They carry lengths, keys, times and names; never text, never tokens. A late, repeated or unknown event is normal and
changes nothing. Every order of a decision (`order_id`) has one event for each way that it can end.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import EngineRefusal
from halfmoon.schemas.lending import JoinedHolder, PlaceWait
from halfmoon.schemas.policy import Layout, Policy
from halfmoon.schemas.roles import WorkerRole
from halfmoon.schemas.similar import NamedDocuments, SimilarReuse, Sketch
from halfmoon.schemas.types import (
    BlockKeys,
    Blocks,
    Bytes,
    Count,
    ExactNumerics,
    Id,
    Message,
    Ns,
    Part,
    Seq,
    Text,
    Tokens,
    check_whole_keys,
)
from halfmoon.schemas.weights import PlacementsPaused, WeightsChanged

Tier = Literal["dram", "ssd"]
FinishReason = Literal["stop", "length", "abort"]

# --- the log itself ---------------------------------------------------------------------------------------------


class ClusterConfigured(Message, frozen=True):
    """Begins a log: the code and the policy under which it is made. Nothing from before it counts any more.

    From a conductor that finds none, and no snapshot: the log is empty, or its head has expired.
    """

    code_version: str
    log_version: int
    policy: Policy


class PolicyChanged(Message, frozen=True):
    """An operator chose another policy; in force from the next event on."""

    policy: Policy


class RoleWanted(Message, frozen=True):
    """An operator wants a worker to take another of the roles that it may have. `ChangeRole` is the answer.

    It is passed over where no worker of the role that it has would be left, or the worker may not.
    """

    #: The worker; the event's author is in its subject.
    target_id: Id
    role: WorkerRole


class TimerFired(Message, frozen=True):
    """A timer set by `SetTimer` is due. Published by every conductor with the same message id, stored once."""

    key: str
    at_ns: Ns


class StateDigested(Message, frozen=True):
    """Digest of a conductor's state after event `at_seq`; all conductors' are equal, or some are ill.

    From every conductor, after each `Policy.digest_events` events. The core passes over it."""

    conductor_id: Id
    incarnation: Id
    code_version: Text
    at_seq: Seq
    digest: Id


# --- workers ----------------------------------------------------------------------------------------------------


class WorkerJoined(JoinedHolder, frozen=True, kw_only=True):
    """A worker can take orders. Repeats (after `AnnounceYourself`) replace the record of it."""

    worker_id: Id
    role: WorkerRole
    node_id: Id
    incarnation: Id
    layout: Layout
    #: Blocks of the worker's own paged cache, tokens one request may have, sequences in one batch.
    kv_blocks: Blocks
    context_tokens_max: Tokens
    batch_max: Annotated[int, Meta(ge=1, le=1_000_000)]
    profile: CostProfile
    #: Whether exact numerics hold on its CPU, by its own test; "", as in older logs: it did not try, or claims none.
    exact_numerics: ExactNumerics = ""
    #: Prefill: the longest prompt, where one may be longer than the worker's cache; 0, as in older logs: none may.
    prompt_tokens_max: Tokens = 0
    #: Roles that the process can take on a `ChangeRole`, its own among them; []: it keeps its own.
    may_become: list[WorkerRole] = []
    #: Mixed: tokens of prompts and of answers that one iteration computes at most.
    token_budget: Tokens = 0
    #: Mixed: time that an iteration may take by the profile; 0, as in older logs: only its tokens are bounded.
    iteration_ns: Ns = 0
    #: Prefill: where it listens for workers that have it compute some layers of their prompts; []: nowhere. And bytes
    #: of one token between two layers.
    stage_addresses: list[Text] = []
    activation_bytes: Bytes = 0
    #: Prefill: it answers requests of one token itself; False, as in older logs: a decode worker does.
    answers: bool = False


class WorkerHeartbeat(Message, frozen=True):
    """Sent every `heartbeat_ns`. The step figures are means since the last one; 0 when no step was made.

    `orders` and `obeyed_seq` belong together: an order that the worker must have had and does not list is lost.
    """

    worker_id: Id
    incarnation: Id
    queued: Count = 0
    running: Count = 0
    kv_blocks_used: Blocks = 0
    steps: Count = 0
    step_ns: Ns = 0
    step_sequences: Count = 0
    step_context_tokens: Count = 0
    #: Orders taken, neither answered nor cancelled, and others' orders of which it holds segments; None: not reported.
    orders: list[Id] | None = None
    #: Decode: those of `orders` that wait for KV or a first token, not for room.
    lacking: list[Id] = []
    #: `cause_seq` of the newest decision that the worker has obeyed, of whatever kind; 0: none yet.
    obeyed_seq: Seq = 0
    #: Decode: one for each place that was asked for attention in several steps since the last heartbeat.
    places: list[PlaceWait] = []
    #: Decode with `cache_elsewhere`: groups in which the rows of its newest step took turns; 0: no step yet.
    groups: Count = 0


class WorkerDraining(Message, frozen=True):
    """The worker finishes its orders and takes nothing new; with `draining` False it takes orders again."""

    worker_id: Id
    incarnation: Id
    draining: bool = True


class WorkerLeft(Message, frozen=True):
    """The worker is gone: it left, or its supervisor saw it die. `incarnation` "" means any."""

    worker_id: Id
    incarnation: str = ""
    reason: Text = ""


# --- frontends --------------------------------------------------------------------------------------------------


class FrontendJoined(Message, frozen=True):
    """A frontend takes requests. After `AnnounceYourself` it sends its open requests again as well."""

    frontend_id: Id
    incarnation: Id


class FrontendHeartbeat(Message, frozen=True):
    """Sent every `heartbeat_ns`. `silent`: open requests of which no order was ever heard, for long."""

    frontend_id: Id
    incarnation: Id
    open_requests: Count = 0
    silent: list[Id] = []


class FrontendLeft(Message, frozen=True):
    """Its open requests have no reader any more: they are cancelled."""

    frontend_id: Id
    incarnation: str = ""
    reason: Text = ""


# --- store agents -----------------------------------------------------------------------------------------------


#: How bytes of blocks move between two nodes: the one list of names. `store/agent/open_transports.py` opens each.
TransportName = Literal["shm", "tcp", "rdma"]


class Endpoint(Part, frozen=True):
    """Where a store agent's data plane listens; over TCP `tcp://HOST:PORT`."""

    transport: TransportName
    address: str
    #: NUMA distance of the agent's memory to the NIC, as Linux counts: 10 is near.
    distance: Annotated[int, Meta(ge=1, le=10_000)] = 10


class StoreJoined(Message, frozen=True):
    """A store agent serves. Its inventory follows (`StoreInventory`), in parts; nothing older counts."""

    node_id: Id
    incarnation: Id
    #: Equal on two agents when they can map each other's memory.
    host: str
    layout: Layout
    slots: Blocks
    endpoints: list[Endpoint]


class StoreHeartbeat(Message, frozen=True):
    """Sent every `heartbeat_ns`."""

    node_id: Id
    incarnation: Id
    slots_used: Blocks = 0
    slots_leased: Blocks = 0
    leases: Count = 0


class StoreLeft(Message, frozen=True):
    """The store agent is gone, and with it all that it held. `incarnation` "" means whichever."""

    node_id: Id
    incarnation: str = ""
    reason: Text = ""


class _NodeBlocks(Message, frozen=True, kw_only=True):
    node_id: Id
    incarnation: Id
    block_keys: BlockKeys
    tier: Tier = "dram"

    def __post_init__(self) -> None:
        check_whole_keys(self.block_keys)


class StoreInventory(_NodeBlocks, frozen=True, kw_only=True):
    """Part `part` of `parts` of all blocks that the agent holds, in every tier, sent after each StoreJoined."""

    part: Count
    parts: Count


class BlocksStored(_NodeBlocks, frozen=True):
    """These blocks are committed on the node: anybody may ask to read them."""


class BlocksEvicted(_NodeBlocks, frozen=True):
    """These blocks are no longer on this tier of the node."""


class TierLost(Message, frozen=True):
    """Nothing is left on this tier of the node (full, failing, its file gone); later blocks are announced anew."""

    node_id: Id
    incarnation: Id
    tier: Tier
    reason: Text


class StoreSuspected(Message, frozen=True):
    """`reporter_id` could not read from or write to the node just now; long before its heartbeat lapses."""

    node_id: Id
    reporter_id: Id
    reason: Text


# --- requests ---------------------------------------------------------------------------------------------------


class RequestArrived(Message, frozen=True):
    """A frontend took a request. Sent again, word for word, by a frontend that is asked to announce itself anew."""

    request_id: Id
    frontend_id: Id
    prompt_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    #: Keys of the whole blocks of the prompt.
    block_keys: BlockKeys
    #: 0: by the cluster's policy.
    ttft_slo_ns: Ns = 0
    tbt_slo_ns: Ns = 0
    tenant: Text = ""
    #: Larger is more important; under overload smaller is refused first.
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    #: Sent again because the client lacks tokens and no worker has them: placed anew even when it counts as ended.
    answer_lost: bool = False
    #: W3C, of the span that the frontend's request is; "": not traced. The core passes over it.
    traceparent: Text = ""
    #: A sample of the prompt's runs of tokens, where KV of a similar prompt may stand in; b"": it may not.
    sketch: Sketch = b""
    #: Of which the block keys are.
    weight_version: Text = ""
    documents: NamedDocuments = []

    def __post_init__(self) -> None:
        check_whole_keys(self.block_keys)


class RequestCancelled(Message, frozen=True):
    """The client is gone, or asked for an end. Nothing more of the request is wanted."""

    request_id: Id
    reason: Text = ""


class PrefillFinished(Message, frozen=True):
    """Every KV block of the prompt was delivered to the decode node. Answers one `StartPrefill`; of a mixed worker: the
    prompt is computed, and stays.
    """

    order_id: Id
    request_id: Id
    worker_id: Id
    queue_ns: Ns
    transfer_ns: Ns
    compute_ns: Ns
    #: Tokens not computed, by where they came from.
    cached_local_tokens: Tokens = 0
    cached_fetched_tokens: Tokens = 0
    fetched_bytes: Bytes = 0
    fetch_node_id: str = ""
    fetch_ns: Ns = 0
    pushed_bytes: Bytes = 0
    push_ns: Ns = 0
    #: Tokens of the prompt as it was computed, cached ones included; 0, as in older logs: unknown.
    prompt_tokens: Tokens = 0
    #: Workers that computed it together, each some layers; 0, as in older logs: one did. Then the part of `compute_ns`
    #: that this one waited for the stage before its own.
    stages: Count = 0
    stage_wait_ns: Ns = 0
    #: KV of a similar prompt stood in for some of it; None: all is its own.
    similar: SimilarReuse | None = None
    #: Of a mixed worker: the answer goes on, in the batch that the prompt was computed in. In older logs DecodeStarted
    #: said so.
    decodes: bool = False


class StageFinished(Message, frozen=True):
    """The worker's part of a prompt that several compute is over, well or not. Answers one `StartStage`; the worker
    with the last part answers the order.
    """

    order_id: Id
    request_id: Id
    worker_id: Id
    #: Time from the first chunk to the last, and the part of it that was spent computing.
    elapsed_ns: Ns = 0
    compute_ns: Ns = 0
    #: Why it is over before its last chunk; "": it is not.
    reason: Text = ""


class PrefillFailed(Message, frozen=True):
    """The order failed. Answers one `StartPrefill` or `StartMixed`. `retryable`: another placement may do better."""

    order_id: Id
    request_id: Id
    worker_id: Id
    reason: Text
    retryable: bool = True
    #: The worker that did not do its part of a prompt which several compute; "": it was this one.
    stage_id: str = ""
    #: What its engine answered, in place of a token.
    refusal: EngineRefusal | None = None


class DecodeStarted(Message, frozen=True):
    """The request joined the running batch of a decode worker. `wait_ns`: from the end of prefill to here."""

    order_id: Id
    request_id: Id
    worker_id: Id
    wait_ns: Ns = 0


class DecodeRefused(Message, frozen=True):
    """By the worker's own check the SLO would be broken: the prefill was wasted. Answers one `StartDecode`."""

    order_id: Id
    request_id: Id
    worker_id: Id
    reason: Text
    predicted_tbt_ns: Ns = 0


class DecodeFailed(Message, frozen=True):
    """Answers one `StartDecode`. `prefill_in_doubt`: the fault may be the other half's; its worker is avoided too."""

    order_id: Id
    request_id: Id
    worker_id: Id
    reason: Text
    retryable: bool = True
    prefill_in_doubt: bool = False
    refusal: EngineRefusal | None = None


class RequestFinished(Message, frozen=True):
    """The last token was sent. Answers one `StartDecode` or `StartMixed`; it measures the request's whole life."""

    order_id: Id
    request_id: Id
    worker_id: Id
    finish_reason: FinishReason
    completion_tokens: Tokens
    ttft_ns: Ns = 0
    #: Mean of the longest 10 % of token intervals.
    tbt_ns: Ns = 0
    decode_ns: Ns = 0
    preemptions: Count = 0


class KvMoved(Message, frozen=True):
    """Another worker holds these blocks of a running request now, and attends to them. Answers one `MoveKv`.

    `moved_bytes`: of K and V, all layers.
    """

    plan_id: Id
    order_id: Id
    request_id: Id
    worker_id: Id
    blocks: Blocks
    moved_bytes: Bytes = 0


class KvMoveRefused(Message, frozen=True):
    """The request goes on as it was: the lender has no room, or is lost, or the request does not run. Answers one
    `MoveKv`.
    """

    plan_id: Id
    order_id: Id
    request_id: Id
    worker_id: Id
    reason: Text


Event = (
    ClusterConfigured
    | PolicyChanged
    | RoleWanted
    | PlacementsPaused
    | WeightsChanged
    | TimerFired
    | StateDigested
    | WorkerJoined
    | WorkerHeartbeat
    | WorkerDraining
    | WorkerLeft
    | FrontendJoined
    | FrontendHeartbeat
    | FrontendLeft
    | StoreJoined
    | StoreHeartbeat
    | StoreLeft
    | StoreInventory
    | BlocksStored
    | BlocksEvicted
    | StoreSuspected
    | TierLost
    | RequestArrived
    | RequestCancelled
    | PrefillFinished
    | StageFinished
    | PrefillFailed
    | DecodeStarted
    | DecodeRefused
    | DecodeFailed
    | RequestFinished
    | KvMoved
    | KvMoveRefused
)
EVENT_TYPES: tuple[type[Message], ...] = get_args(Event)


class Stamped(Part, frozen=True):
    """An event with its place and time in the log, both given by the stream."""

    seq: int
    at_ns: int
    event: Event
