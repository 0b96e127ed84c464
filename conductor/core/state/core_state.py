"""The state of the core: plain values, changed in place behind `Core.step` only.

Every dictionary is filled in an order that the log alone decides, and a snapshot keeps that order. Times are ns of the
log; the records behind ids are in `records`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import msgspec

from halfmoon.conductor.core.state.block_index import BlockIndex
from halfmoon.conductor.core.state.coming_blocks import ComingBlocks
from halfmoon.conductor.core.state.cost import Answers, Link
from halfmoon.conductor.core.state.demand import Demand
from halfmoon.conductor.core.state.displaced import Displaced
from halfmoon.conductor.core.state.load_index import LoadIndexes
from halfmoon.conductor.core.state.overload import Offered
from halfmoon.conductor.core.state.records import (
    Counters,
    FrontendRecord,
    Order,
    Request,
    StoreRecord,
    WorkerRecord,
)
from halfmoon.conductor.core.state.similar_index import SimilarIndex
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.roles import Membership

#: How many ended requests are remembered, so that a repeated `RequestArrived` starts nothing.
FINISHED_MAX = 16_384
#: Where a pool bounds no prompt.
UNBOUND_TOKENS = 2**62


class LogPosition(msgspec.Struct, kw_only=True):
    """The core's place in the log, and the time there."""

    seq: int = 0
    at_ns: int = 0
    #: `at_ns` less the server's clock: the sum of its steps back and forth.
    clock_lead_ns: int = 0
    #: Orders given in the present step.
    orders_now: int = 0
    #: Timers that fired since the last event of any other kind.
    timers_in_row: int = 0

    @property
    def server_ns(self) -> int:
        """The server's clock at the newest event, as people read it."""
        return self.at_ns - self.clock_lead_ns

    def log_ns(self, stamped_ns: int) -> int:
        """The log's time for a server's time since its clock was last set."""
        return stamped_ns + self.clock_lead_ns


class Members(LogPosition, kw_only=True):
    """The processes of the cluster, by what they announced, and the policy that they are held to."""

    code_version: str = ""
    policy: Policy = Policy()
    #: An operator wants nothing to be placed.
    paused: bool = False
    #: Of the weights that orders are computed with; "": they were never changed.
    weight_version: str = ""
    #: By id, always sorted.
    workers: dict[str, WorkerRecord] = {}
    stores: dict[str, StoreRecord] = {}
    frontends: dict[str, FrontendRecord] = {}

    @property
    def members(self) -> dict[Membership, Mapping[str, WorkerRecord | StoreRecord | FrontendRecord]]:
        """The processes that are known, by how they are members."""
        return {"worker": self.workers, "store": self.stores, "frontend": self.frontends}

    def host(self, worker: WorkerRecord) -> str:
        """The host of the worker's node; without a store agent there, the node."""
        store = self.stores.get(worker.node_id)
        return worker.node_id if store is None else store.host

    def takes_orders(self, worker: WorkerRecord) -> bool:
        """True unless it drains or its node's store agent, through which all its KVCache comes and goes, is away."""
        return not worker.draining and (worker.block_bytes == 0 or worker.node_id in self.stores)

    def pool_tokens(self, worker: WorkerRecord) -> int:
        """Tokens of a prompt that the pool of the worker's node could hold, were it empty."""
        store = self.stores.get(worker.node_id)
        if store is None or not self.policy.pools_bound or worker.block_bytes == 0:
            return UNBOUND_TOKENS
        return store.slots * worker.block_tokens


class State(Members, kw_only=True, dict=True):
    """All that the core knows: a snapshot holds it and a digest names it. `loads` and `coming` follow from it and are
    in neither.
    """

    index: BlockIndex
    requests: dict[str, Request] = {}
    #: Request ids in the order in which they lost their place.
    parked: dict[str, bool] = {}
    orders: dict[str, Order] = {}
    #: Ended requests, oldest first; at most FINISHED_MAX.
    finished: dict[str, bool] = {}
    #: Timers that were set and have not fired: key to time.
    timers: dict[str, int] = {}
    #: When which process ("role:id") was asked to announce itself.
    asked_ns: dict[str, int] = {}
    #: Transfers that leave a node: node, order, predicted end.
    leaving: dict[str, dict[str, int]] = {}
    #: Destination → source → measured bandwidth of the link; from DRAM, from SSD.
    links: dict[str, dict[str, Link]] = {}
    ssd_links: dict[str, dict[str, Link]] = {}
    #: By class of max_tokens.
    answers: dict[int, Answers] = {}
    #: Worker that each pool's round robin chose last.
    round_robin: dict[str, str] = {}
    similar: SimilarIndex = msgspec.field(default_factory=SimilarIndex)
    offered: Offered = msgspec.field(default_factory=Offered)
    demand: Demand = msgspec.field(default_factory=Demand)
    displaced: Displaced = msgspec.field(default_factory=Displaced)
    counters: Counters = msgspec.field(default_factory=Counters)

    @cached_property
    def loads(self) -> LoadIndexes:
        ready = [worker for worker in self.workers.values() if self.takes_orders(worker)]
        indexes = LoadIndexes(ready, self.stores.values(), self.links, self.pool_tokens)
        for worker in self.workers.values():
            indexes.on_host.setdefault(self.host(worker), []).append(worker)
        return indexes

    @cached_property
    def coming(self) -> ComingBlocks:
        """Kept under a policy with `coming_blocks`."""
        return ComingBlocks(self.orders.values(), self.requests, at_mixed=self.policy.coming_at_mixed)

    def members_changed(self) -> None:
        """Call after a worker or a store agent joined, drains, is suspected or left, and after the policy changed:
        `loads` and `coming` are built again.
        """
        vars(self).pop("loads", None)
        vars(self).pop("coming", None)
