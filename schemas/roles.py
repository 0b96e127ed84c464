"""The roles of a cluster's processes: one record for each, from which everything that varies by role is read.

It has the duties of the role's workers, their class, their rights on NATS, and facts for starting, stopping, containers
and secrets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from halfmoon.schemas import subjects
from halfmoon.schemas.contract import rights
from halfmoon.schemas.contract.rights import ME, NODE, Rights

WorkerRole = Literal["prefill", "decode", "attention", "mixed"]
#: A worker's work: to compute prompts, to decode sequences in a batch, to hold KV of others' and attend to it.
Duty = Literal["prompts", "batch", "holds"]
#: Roles of the cluster's members: processes that join, send heartbeats and leave by events.
MemberRole = Literal[WorkerRole, "store", "frontend"]
#: How a process is a member: by `WorkerJoined`, `StoreJoined`, `FrontendJoined`, or not at all.
Membership = Literal["worker", "store", "frontend", "none"]
#: "adapt": the adapter of an engine of another's, a worker and the store of its node in one process.
ProcessRole = Literal["conductor", "adapt", MemberRole]


#: Roles that one process may change between.
ELASTIC_ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTraits:
    """The traits of a role."""

    member: Membership
    #: The cluster's secret names blocks and opens the data plane: a role that touches neither does not get it.
    has_secret: bool
    #: A cluster drains in this order, which is the way of a request: nothing waits for a process that is gone already.
    drain_rank: int
    #: Subjects that it may publish and hear on NATS.
    rights: Rights
    #: Module and name of its worker's class. It is imported where it runs: a process loads what its own role needs.
    worker: tuple[str, str] = ("", "")
    #: Duties of its workers. A rule asks for the duty, so it is right for a role that is added.
    duties: frozenset[Duty] = frozenset()
    #: The longest requests that a worker's own cache holds at once, by default.
    contexts: int = 0
    #: Workers of it that `halfmoon up` starts by default, and the least number.
    nodes: int = 2
    nodes_min: int = 1
    #: It has a port of its own in any case, and serves its metrics there.
    metrics_at_own_port: bool = False


_OWN_STORE = rights.asks(NODE, rights.ASKED_BY_PAIR)
_DRAWS = (subjects.tokens("*", ME), subjects.take("*", ME))
#: Orders, their tokens and KV progress, and frontends that missed tokens.
_HEARS = (
    rights.INBOX,
    subjects.decisions_for(ME),
    subjects.give(ME, "*"),
    subjects.kv_for(ME),
    subjects.resend(ME, "*"),
)

ROLES: dict[ProcessRole, RoleTraits] = {
    "frontend": RoleTraits(
        member="frontend",
        has_secret=True,
        drain_rank=0,
        metrics_at_own_port=True,
        rights=Rights(
            events=(
                "FrontendJoined",
                "FrontendHeartbeat",
                "FrontendLeft",
                "RequestArrived",
                "RequestCancelled",
            ),
            publish=(
                subjects.give("*", ME),
                subjects.relay("*", ME),
                subjects.resend("*", ME),
                subjects.status(subjects.CONDUCTORS),
                subjects.view(subjects.CONDUCTORS),
                subjects.explain("*"),
                f"{subjects.ROOT}.cancel",
                *rights.PLACES,
                *rights.MISSED,
                rights.ANSWERS,
                rights.CLIENT_INBOXES,
            ),
            hear=(
                rights.INBOX,
                subjects.api("*"),
                subjects.api("*", "*"),
                "$SRV.>",
                f"{subjects.ROOT}.cancel",
                subjects.take(ME, "*"),
                subjects.tokens(ME, "*"),
                subjects.forward(ME, "*"),
                subjects.decisions_for(ME),
                subjects.placements_for(ME),
            ),
        ),
    ),
    "prefill": RoleTraits(
        member="worker",
        has_secret=True,
        drain_rank=1,
        duties=frozenset({"prompts"}),
        contexts=1,
        worker=("halfmoon.workers.prefill.worker", "PrefillWorker"),
        rights=Rights(
            events=(
                *rights.WORKER_EVENTS,
                "PrefillFinished",
                "PrefillFailed",
                "StageFinished",
                "RequestFinished",
            ),
            publish=(
                subjects.kv("*", "PrefillResult", ME),
                *_DRAWS,
                *_OWN_STORE,
                *rights.PLACES,
                *rights.MISSED,
                rights.ANSWERS,
            ),
            hear=_HEARS,
        ),
    ),
    "decode": RoleTraits(
        member="worker",
        has_secret=True,
        drain_rank=1,
        duties=frozenset({"batch"}),
        contexts=2,
        worker=("halfmoon.workers.decode.worker", "DecodeWorker"),
        rights=Rights(
            events=(
                *rights.WORKER_EVENTS,
                "DecodeStarted",
                "DecodeRefused",
                "DecodeFailed",
                "RequestFinished",
                "KvMoved",
                "KvMoveRefused",
            ),
            publish=(
                *_DRAWS,
                subjects.hold("*", ME),
                *_OWN_STORE,
                *rights.PLACES,
                *rights.MISSED,
                rights.ANSWERS,
            ),
            hear=(
                *_HEARS,
                subjects.hold(ME, "*"),
            ),
        ),
    ),
    # All that it may be: a mixed worker, which may also fail an answer that is begun, a prefill or a decode worker, and
    # the store of its node.
    "adapt": RoleTraits(
        member="worker",
        has_secret=False,
        drain_rank=1,
        nodes=0,
        nodes_min=0,
        rights=Rights(
            events=(
                *rights.WORKER_EVENTS,
                *rights.MIXED_EVENTS,
                "DecodeStarted",
                "DecodeFailed",
                *rights.STORE_EVENTS,
            ),
            publish=(
                subjects.kv("*", "PrefillResult", ME),
                subjects.kv("*", "KvPromised", ME),
                subjects.forward("*", ME),
                *_DRAWS,
                *rights.PLACES,
                *rights.MISSED,
                rights.ANSWERS,
            ),
            hear=(
                *_HEARS,
                subjects.relay(ME, "*"),
                subjects.reset(ME),
            ),
        ),
    ),
    # Decode workers need the KV that it holds as long as they decode.
    "attention": RoleTraits(
        member="worker",
        has_secret=True,
        drain_rank=2,
        duties=frozenset({"holds"}),
        contexts=4,
        nodes=0,
        nodes_min=0,
        worker=("halfmoon.workers.attention.worker", "AttentionWorker"),
        rights=Rights(
            events=rights.WORKER_EVENTS,
            publish=(
                *rights.asks(NODE, rights.ASKED_BY_HOLDERS),
                *rights.PLACES,
                *rights.MISSED_DECISIONS,
                rights.ANSWERS,
            ),
            hear=(rights.INBOX, subjects.decisions_for(ME), subjects.hold(ME, "*")),
        ),
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
        worker=("halfmoon.workers.mixed.worker", "MixedWorker"),
        rights=Rights(
            events=(*rights.WORKER_EVENTS, *rights.MIXED_EVENTS),
            publish=(
                *_DRAWS,
                *rights.asks(NODE, rights.ASKED_BY_MIXED),
                *rights.PLACES,
                *rights.MISSED_DECISIONS,
                rights.ANSWERS,
            ),
            hear=(
                rights.INBOX,
                subjects.decisions_for(ME),
                subjects.give(ME, "*"),
                subjects.kv(ME, "KvLoaded", NODE),
                subjects.resend(ME, "*"),
            ),
        ),
    ),
    "store": RoleTraits(
        member="store",
        has_secret=True,
        drain_rank=3,
        rights=Rights(
            events=(*rights.STORE_EVENTS, "TierLost", "StoreSuspected"),
            author=NODE,
            publish=(
                *(
                    subjects.kv("*", kind, NODE)
                    for kind in ("TransferOpened", "TransferFailed", "KvReady", "KvLoaded")
                ),
                *rights.asks("*", rights.ASKED_BY_STORES),
                *rights.PLACES,
                *rights.MISSED,
                rights.ANSWERS,
            ),
            hear=(
                rights.INBOX,
                subjects.decisions_for(NODE),
                subjects.store(NODE, "*"),
                subjects.events_of_kind("StoreJoined"),
            ),
        ),
    ),
    "conductor": RoleTraits(
        member="none",
        has_secret=False,
        drain_rank=4,
        rights=Rights(
            events=("ClusterConfigured", "TimerFired", "StateDigested"),
            publish=(
                subjects.DECISIONS_ALL,
                subjects.SNAPSHOTS_ALL,
                subjects.status(subjects.CONDUCTORS),
                *rights.PLACES,
                *rights.creates(subjects.STREAMS),
                *rights.LOG,
                rights.PURGES_SNAPSHOTS,
                *rights.READS_EVENTS,
                rights.ANSWERS,
            ),
            hear=(
                rights.INBOX,
                subjects.status(ME),
                subjects.status(subjects.CONDUCTORS),
                subjects.view(subjects.CONDUCTORS),
                subjects.explain(ME),
                subjects.locate(),
            ),
        ),
    ),
}
WORKER_ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)
