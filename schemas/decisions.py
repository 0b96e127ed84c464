"""Decisions: the conductor's orders, imperative, published on the DECISIONS stream.

A decision's identity is (sequence of the event that caused it, position among that event's decisions). Any number of
conductors make the same ones; the stream drops the second copy by its message id, and receivers drop a decision that is
not newer than the last one they obeyed.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.roles import MemberRole, WorkerRole
from halfmoon.schemas.similar import Reference
from halfmoon.schemas.types import BlockKeys, Blocks, Count, Id, Message, Ns, Part, Seq, Text, Tokens

RejectReason = Literal[
    "ttft_slo",  # predicted time to first token is over the SLO
    "tbt_slo",  # predicted time between tokens is over the SLO
    "no_room",  # no decode worker will have room for its KV
    "queue_full",  # bounded queues
    "too_long",  # more tokens than any worker's context or cache
    "no_worker",  # a pool is empty
    "decode_refused",  # the decode worker's own check, after prefill
]


class Prediction(Part, frozen=True):
    """The conductor's prediction for a placement, counted from the arrival of the request."""

    queue_ns: Ns = 0
    transfer_ns: Ns = 0
    prefill_ns: Ns = 0
    ttft_ns: Ns = 0
    tbt_ns: Ns = 0


class Fetch(Part, frozen=True):
    """Read blocks `first_block .. first_block + blocks - 1` of the prompt from `node_id`."""

    node_id: Id
    first_block: Blocks
    blocks: Blocks
    #: Other nodes that have all of them, for the case that this one fails.
    replicas: list[Id] = []

    def clipped(self, local: int, usable: int) -> Fetch | None:
        """The part that continues a local prefix of `local` blocks and ends at `usable`; None when there is none."""
        end = min(self.first_block + self.blocks, usable)
        # A prefix has no gap: a fetch that begins after the local blocks is of no use.
        if not self.first_block <= local < end:
            return None
        return Fetch(node_id=self.node_id, first_block=local, blocks=end - local, replicas=self.replicas)


class LayerStage(Part, frozen=True):
    """One worker's part of a prompt that several prefill workers compute as a pipeline: `layers` of the model's, from
    `first_layer` on. `addresses`: where it listens for the worker with the last part.
    """

    worker_id: Id
    first_layer: Count
    layers: Annotated[int, Meta(ge=1, le=10_000)]
    addresses: list[Text] = []


class StartPrefill(Message, frozen=True):
    """To a prefill worker: compute the prompt's KV and push it to `decode_node_id`.

    One of PrefillFinished, PrefillFailed answers. A worker that is its own `decode_worker_id` answers the request too:
    then nothing is pushed, and RequestFinished comes before PrefillFinished.
    """

    order_id: Id
    request_id: Id
    frontend_id: Id
    worker_id: Id
    decode_worker_id: Id
    decode_node_id: Id
    prompt_tokens: Tokens
    #: How many whole blocks the conductor believes to be on the worker's node.
    local_blocks: Blocks = 0
    fetches: list[Fetch] = []
    predicted: Prediction = Prediction()
    #: Workers and their layers, in order, this worker last; []: it computes all layers.
    stages: list[LayerStage] = []
    #: With `stages`: tokens of the chunks that go from one to the next. 0: as the worker is set.
    chunk_tokens: Tokens = 0
    #: A similar prompt, whose KV stands in where it is to be had; None: all is computed.
    reference: Reference | None = None
    #: The first of the waiting orders that it is computed before, where the worker has not begun to prepare that one;
    #: "": it waits behind all.
    before: str = ""
    #: Its block keys are to be of these weights.
    weight_version: Text = ""

    @property
    def answers(self) -> bool:
        """The first token is the whole answer: the worker delivers it itself, and nobody decodes."""
        return self.decode_worker_id == self.worker_id

    @property
    def exact_blocks(self) -> Blocks:
        """Blocks of the prompt that were to be cached when the order was given; behind them a reference stands in."""
        return max([self.local_blocks, *(fetch.first_block + fetch.blocks for fetch in self.fetches)])


class StartStage(Message, frozen=True):
    """To a prefill worker: compute some layers of a prompt for `prefill_worker_id`, whose StartPrefill goes with it and
    which sends the inputs over a channel. `StageFinished` answers, unless the order is cancelled.
    """

    order_id: Id
    request_id: Id
    worker_id: Id
    prefill_worker_id: Id
    prompt_tokens: Tokens
    stage: LayerStage


#: How a request's KV is divided among attention workers.
CacheSplit = Literal["request", "heads", "sequence"]


class StartDecode(Message, frozen=True):
    """To a decode worker: expect the KV of a prompt and decode it. Sent with its StartPrefill, under the same order_id.

    One of RequestFinished, DecodeRefused, DecodeFailed answers.
    """

    order_id: Id
    request_id: Id
    frontend_id: Id
    worker_id: Id
    prefill_worker_id: Id
    prompt_tokens: Tokens
    max_tokens: Tokens
    #: The worker refuses when a step would take longer after this prefill; 0: it takes whatever comes.
    tbt_slo_ns: Ns
    #: 1 for the first placement of the request.
    placement: Count = 1
    predicted: Prediction = Prediction()
    #: The node whose store agent announces the KV; "", as in older logs: any is believed.
    prefill_node_id: str = ""
    #: Parts with the first segments of the prompt, in order; the worker itself has the rest.
    loans: list[KvPart] = []
    #: The attention workers that hold its KV, each its heads or its segments; []: the worker itself does.
    cache: list[KvPart] = []
    #: An earlier order of the request, whose decode worker is gone: `cache` still has the KV of all tokens that were
    #: delivered, under that order's id. No prefill goes with this one. "": an order like any other.
    resumes: str = ""
    weight_version: Text = ""


class StartMixed(Message, frozen=True):
    """To a mixed worker: compute the prompt and decode it, both here. It is an order's both halves.

    PrefillFinished reports that the prompt is computed, and that it decodes. One of PrefillFailed and
    RequestFinished answers.
    """

    order_id: Id
    request_id: Id
    frontend_id: Id
    worker_id: Id
    prompt_tokens: Tokens
    max_tokens: Tokens
    #: How many whole blocks the conductor believes to be on the worker's node.
    local_blocks: Blocks = 0
    fetches: list[Fetch] = []
    #: 1 for the first placement of the request.
    placement: Count = 1
    predicted: Prediction = Prediction()
    weight_version: Text = ""


class MoveKv(Message, frozen=True):
    """To a decode worker: have `lender_id` hold the next segments of a running request, and go on without them here.

    They follow those that others hold already. Their room at the lender is booked. One of KvMoved, KvMoveRefused
    answers, unless the order ends before.
    """

    plan_id: Id
    order_id: Id
    request_id: Id
    worker_id: Id
    lender_id: Id
    segments: Blocks
    #: Tokens that are sent while one decode step is made, at most.
    tokens_per_step: Tokens


class EndMove(Message, frozen=True):
    """To a lender: a move to it came to nothing; drop the tokens of it. No answer."""

    plan_id: Id
    order_id: Id
    worker_id: Id


class CancelOrder(Message, frozen=True):
    """To a prefill or decode worker: stop the order, release its slots and blocks. No answer.

    `request_id` is "" when the worker listed an order that the conductor does not know any more.
    """

    order_id: Id
    worker_id: Id
    request_id: str = ""


class ReleaseOrder(Message, frozen=True):
    """To a store agent: drop every lease and reservation of the order (it ended abnormally, its worker may be dead)."""

    order_id: Id
    node_id: Id


class RejectRequest(Message, frozen=True):
    """To a frontend: refused, 429 (503 for no_worker, 413 for too_long)."""

    request_id: Id
    frontend_id: Id
    reason: RejectReason
    message: Text
    predicted: Prediction = Prediction()
    ttft_slo_ns: Ns = 0
    tbt_slo_ns: Ns = 0
    retry_after_ns: Ns = 0


class EngineRefusal(Part, frozen=True):
    """An engine's refusal of a request, on its way from the worker to the client.

    `status`: HTTP's, as the client gets it. `param`: the field of the request that is refused; "": none is named.
    """

    status: Annotated[int, Meta(ge=400, le=599)]
    param: Text = ""
    #: When to try again; 0: unknown.
    retry_after_ns: Ns = 0


class FailRequest(Message, frozen=True):
    """To a frontend: the request was accepted and cannot be finished; the client gets the reason. `refusal`: as what,
    where an engine refused it.
    """

    request_id: Id
    frontend_id: Id
    message: Text
    refusal: EngineRefusal | None = None


class AnnounceYourself(Message, frozen=True):
    """To a process whose heartbeat the conductor does not know: join again (and drop orders that you still run)."""

    role: MemberRole
    target_id: Id


class ChangeRole(Message, frozen=True):
    """To a worker: finish your orders, leave, and join as a worker of `role`; the weights stay loaded.

    Nothing is placed there from now on. `WorkerLeft` and `WorkerJoined` answer.
    """

    worker_id: Id
    role: WorkerRole
    #: The load that it changes for; "": an operator wanted it.
    reason: Text = ""


class ReplicateBlocks(Message, frozen=True):
    """To a store agent: many read these blocks from `source_node_id`; hold them too. `BlocksStored` is the answer."""

    node_id: Id
    source_node_id: Id
    block_keys: BlockKeys
    tenant: Text = ""


class SetTimer(Message, frozen=True):
    """To the conductors' own shells; never published: `TimerFired(key)` is due at `at_ns`."""

    key: str
    at_ns: Ns


Decision = (
    StartPrefill
    | StartDecode
    | StartStage
    | StartMixed
    | MoveKv
    | EndMove
    | CancelOrder
    | ReleaseOrder
    | RejectRequest
    | FailRequest
    | AnnounceYourself
    | ReplicateBlocks
    | ChangeRole
    | SetTimer
)
DECISION_TYPES: tuple[type[Message], ...] = get_args(Decision)


class Ordered(Message, frozen=True):
    """A decision on the wire, with its identity."""

    cause_seq: Seq
    position: Count
    decision: Decision

    @property
    def message_id(self) -> str:
        return f"{self.cause_seq}-{self.position}"
