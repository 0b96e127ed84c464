"""The roles of a cluster's processes: the one table that starting, stopping, containers and secrets read.

What a role may say on NATS stands in `halfmoon.bus.permissions`, what its worker does in `halfmoon.workers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

WorkerRole = Literal["prefill", "decode", "attention", "mixed"]
#: A worker's work: to compute prompts, to decode sequences in a batch, to hold KV of others' and attend to it.
Duty = Literal["prompts", "batch", "holds"]
#: Who is a member of the cluster: joins, beats and leaves by events.
MemberRole = Literal[WorkerRole, "store", "frontend"]
#: "adapt": the adapter of an engine of another's, a mixed worker and the store of its node in one process.
ProcessRole = Literal["conductor", "adapt", MemberRole]


#: Roles that one process may change between.
ELASTIC_ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTraits:
    """What starting and stopping need to know of a role."""

    #: How it is a member: by `WorkerJoined`, `StoreJoined`, `FrontendJoined`, or not at all.
    member: Literal["worker", "store", "frontend", "none"]
    #: The cluster's secret names blocks and opens the data plane: who touches neither does not get it.
    has_secret: bool
    #: A cluster drains in this order, which is the way of a request: nothing waits for what is gone already.
    drain_rank: int
    #: What its workers do. A rule asks for the duty, so it is right for a role that is added.
    duties: frozenset[Duty] = frozenset()
    #: The longest requests that a worker's own cache holds at once, where no option says otherwise.
    contexts: int = 0
    #: Workers of it that `halfmoon up` starts where no option says otherwise, and how many there must be.
    nodes: int = 2
    nodes_min: int = 1


ROLES: dict[ProcessRole, RoleTraits] = {
    "frontend": RoleTraits(member="frontend", has_secret=True, drain_rank=0),
    "prefill": RoleTraits(
        member="worker", has_secret=True, drain_rank=1, duties=frozenset({"prompts"}), contexts=1
    ),
    "decode": RoleTraits(
        member="worker", has_secret=True, drain_rank=1, duties=frozenset({"batch"}), contexts=2
    ),
    "adapt": RoleTraits(member="worker", has_secret=False, drain_rank=1, nodes=0, nodes_min=0),
    # Decode workers need the KV that it holds as long as they decode.
    "attention": RoleTraits(
        member="worker",
        has_secret=True,
        drain_rank=2,
        duties=frozenset({"holds"}),
        contexts=4,
        nodes=0,
        nodes_min=0,
    ),
    # It prefills and decodes in one loop: either pair of pools, or it, serves a cluster.
    "mixed": RoleTraits(
        member="worker",
        has_secret=True,
        drain_rank=1,
        duties=frozenset({"prompts", "batch"}),
        contexts=2,
        nodes=0,
        nodes_min=0,
    ),
    "store": RoleTraits(member="store", has_secret=True, drain_rank=3),
    "conductor": RoleTraits(member="none", has_secret=False, drain_rank=4),
}
WORKER_ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)
