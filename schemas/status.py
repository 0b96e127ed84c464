"""The status of processes: a conductor's answer on `subjects.status(its id)`. Core NATS, never stored."""

from __future__ import annotations

from typing import Literal

import msgspec

from halfmoon.schemas.decisions import CacheSplit
from halfmoon.schemas.policy import ElasticMode, Policy
from halfmoon.schemas.roles import ROLES, MemberRole, WorkerRole
from halfmoon.schemas.types import Blocks, Count, ExactNumerics, Id, Message, Ns, Part, Seq, Text, Tokens


class StatusRequest(Message, frozen=True):
    """To any process: how are you? `digest`: with that of a conductor's state, for which it looks at all of it."""

    digest: bool = False


class NodeStatus(Part, frozen=True):
    """A worker, a store agent or a frontend, as the conductor knows it."""

    id: Id
    role: MemberRole
    state: Literal["ready", "draining", "suspected"]
    #: The node that a worker is on.
    node_id: str = ""
    #: By its own word (last heartbeat): orders that wait, and that run. A frontend's open requests run.
    queued: Count = 0
    running: Count = 0
    #: Workers: blocks of the paged cache. Store agents: slots of the pool.
    kv_used: Blocks = 0
    kv_total: Blocks = 0
    #: Decode workers: blocks of the cache that are promised to other workers' sequences.
    kv_lent: Blocks = 0
    #: Reserved by the conductor: orders, and (prefill) the predicted time until the queue is empty.
    orders: Count = 0
    queue_ns: Ns = 0
    #: Workers: whether exact numerics hold on its CPU; "": not known, or not claimed.
    exact_numerics: ExactNumerics = ""
    #: Workers: roles that they can take on a ChangeRole, their own among them; and the one that they are taking.
    may_become: list[WorkerRole] = []
    becomes: WorkerRole | Literal[""] = ""
    #: Workers that hold KV for others and are avoided for new: how long a step waits for them, and was measured to. 0:
    #: they are not.
    slow_wait_ns: Ns = 0
    slow_expected_ns: Ns = 0
    #: Decode workers whose KV lies at attention workers: groups in which the rows of the newest step took turns, and
    #: number of orders by the split of their KV.
    groups: Count = 0
    splits: dict[CacheSplit, Count] = {}
    #: Decode workers whose KV lies at attention workers: why these can hold none now, so that it decodes nothing new;
    #: "": they can.
    no_attention: Text = ""


class PoolWanted(Part, frozen=True):
    """Prefill or decode workers that the load of the last while asks for, and those that are there or on their way."""

    role: WorkerRole
    wanted: Count
    workers: Count
    #: Thousandths of a worker.
    needed: Count


class ElasticStatus(Part, frozen=True):
    """Roles by load: the needs of the pools, changes made, and changes that an operator is advised to make."""

    mode: ElasticMode = "off"
    pools: list[PoolWanted] = []
    changes: Count = 0
    #: A worker, the role that it should take, since when and why; "": none.
    advised_worker: str = ""
    advised_role: WorkerRole | Literal[""] = ""
    advised_ns: Ns = 0
    reason: Text = ""


class RequestCounts(Part, frozen=True):
    """Since the log began; `wasted_prefills`: refused by a decode worker after prefill."""

    arrived: Count = 0
    placed: Count = 0
    finished: Count = 0
    failed: Count = 0
    cancelled: Count = 0
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    wasted_prefills: Count = 0
    prompt_tokens: Count = 0
    cached_local_tokens: Count = 0
    cached_fetched_tokens: Count = 0
    #: Moves of KV between decode workers that lend: done, refused, and their tokens and bytes.
    moves: Count = 0
    moves_refused: Count = 0
    moved_tokens: Count = 0
    moved_bytes: Count = 0
    #: Prompts for part of which KV of a similar one stood in, the tokens of those parts, and tokens computed of these
    #: prompts, on the mean over layers.
    similar_requests: Count = 0
    similar_tokens: Count = 0
    similar_computed_tokens: Count = 0


class ConductorStatus(Message, frozen=True):
    """A conductor's view of the cluster at `seq`. Two conductors at the same `seq` have the same `digest`.

    `digest` is "" where it was not asked for.
    """

    conductor_id: Id
    seq: Seq
    digest: str
    #: It has read all of the log that there was when it started.
    caught_up: bool
    policy: Policy
    #: Policies of other packages that are installed there, as the log names them: NAME@VERSION.
    plugins: list[Text] = []
    #: The model that workers serve; "" while there are none.
    model: str = ""
    block_tokens: Tokens = 0
    nodes: list[NodeStatus] = msgspec.field(default_factory=list)
    #: Distinct blocks that some node holds.
    index_blocks: Blocks = 0
    requests_in_flight: Count = 0
    requests_parked: Count = 0
    #: The longest request that fits, prompt and answer together, however they are divided; 0: a pool has no worker.
    request_tokens_max: Tokens = 0
    counts: RequestCounts = RequestCounts()
    #: An operator wants nothing to be placed.
    paused: bool = False
    #: Of the weights that orders are computed with; "": they were never changed.
    weight_version: Text = ""
    #: How long the oldest of its orders and events waits to be stored.
    unstored_ns: Ns = 0
    elastic: ElasticStatus = ElasticStatus()

    @property
    def ready(self) -> bool:
        """Requests can be placed: a frontend is there, and a prefill and a decode worker or a mixed one."""
        return not self.lacks

    @property
    def lacks(self) -> str:
        """Why no request can be placed; "": one can."""
        if not self.caught_up:
            return "the conductor is still reading the log"
        roles = {node.role for node in self.nodes if node.state == "ready" and not node.no_attention}
        if "frontend" not in roles:
            return "no frontend is ready"
        duties = [ROLES[role].duties for role in roles]
        if {"prompts", "batch"} in duties:
            return ""
        if {"prompts"} not in duties:
            return "no prefill worker is ready"
        if {"batch"} not in duties:
            return next(filter(None, (node.no_attention for node in self.nodes)), "no decode worker is ready")
        return ""
