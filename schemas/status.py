"""How a process is: what a conductor answers on `subjects.status(its id)`. Core NATS, never stored."""

from __future__ import annotations

from typing import Literal

import msgspec

from halfmoon.schemas.policy import Policy
from halfmoon.schemas.roles import MemberRole
from halfmoon.schemas.types import Blocks, Count, ExactNumerics, Id, Message, Ns, Part, Seq, Tokens


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
    #: The model that workers serve; "" while there are none.
    model: str = ""
    block_tokens: Tokens = 0
    nodes: list[NodeStatus] = msgspec.field(default_factory=list)
    #: Distinct blocks that some node holds.
    index_blocks: Blocks = 0
    requests_in_flight: Count = 0
    requests_parked: Count = 0
    #: A request of so many tokens fits, prompt and answer together, however they are divided; 0: a pool has no worker.
    request_tokens_max: Tokens = 0
    counts: RequestCounts = RequestCounts()
    #: How long the oldest of its orders and events waits to be stored.
    unstored_ns: Ns = 0

    @property
    def ready(self) -> bool:
        """Requests can be placed: a prefill and a decode worker and a frontend are there."""
        roles = [node.role for node in self.nodes if node.state == "ready"]
        return self.caught_up and all(role in roles for role in ("prefill", "decode", "frontend"))
