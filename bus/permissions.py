"""Permissions of each role on NATS, to publish and to hear: the text of `authorization` in a server's configuration.

Every process has a name and an nkey of its own. It speaks under its own name only, hears only what
is for it (orders, KV progress, tokens, answers), and calls only whom its role has to do with: a worker its
own node's store agent, a frontend workers. Orders come from conductors alone. Streams are made by conductors;
consumers, which can have the server send stored messages to any subject, by conductors and the operator. `halfmoon
up` gives its processes the same: it is the supervisor beside them, who makes the streams and tells of deaths.

What NATS cannot see is whether a payload fits its subject: events are checked where they are read
(`said_by`). What it does not keep anybody from: naming another's subject as the reply to a request. Processes
answer at inboxes only, and frontends at those of clients (`halfmoon.bus.wire`); what the server itself answers
comes where it was not asked for, and is dropped there because it does not decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from halfmoon.schemas import subjects
from halfmoon.schemas.roles import ELASTIC_ROLES, ProcessRole, WorkerRole
from halfmoon.schemas.subjects import ROOT

#: "supervisor": `halfmoon up`, which tells of the deaths of the processes that it started.
#: "tenant": a client that is one tenant's, as its subjects say; "client" may speak for any.
Role = ProcessRole | Literal["operator", "client", "tenant", "supervisor"]

_JS = "$JS.API"
_EVENTS, _DECISIONS, _KV, _SNAPSHOTS = subjects.STREAMS
#: Answers to any process, and to any client.
_ANSWERS = [f"{ROOT}.inbox.>"]
_CLIENT_INBOXES = ["_INBOX.>"]
_PLACES = [f"{_JS}.STREAM.INFO.{stream}" for stream in subjects.STREAMS]
_DECODE = ("DecodeStarted", "DecodeRefused", "DecodeFailed", "RequestFinished", "KvMoved", "KvMoveRefused")
_MISSED = [f"{_JS}.STREAM.MSG.GET.{stream}" for stream in (_DECISIONS, _KV)]
_WORKER = ("WorkerJoined", "WorkerHeartbeat", "WorkerDraining", "WorkerLeft")
_MIXED = ("PrefillFinished", "PrefillFailed", "DecodeStarted", "RequestFinished")
_STORE = ("StoreJoined", "StoreHeartbeat", "StoreLeft", "StoreInventory", "BlocksStored", "BlocksEvicted")
_SAID: dict[str, tuple[str, ...]] = {
    "conductor": ("ClusterConfigured", "TimerFired", "StateDigested"),
    "frontend": ("FrontendJoined", "FrontendHeartbeat", "FrontendLeft", "RequestArrived", "RequestCancelled"),
    "store": (*_STORE, "TierLost", "StoreSuspected"),
    "prefill": (*_WORKER, "PrefillFinished", "PrefillFailed", "StageFinished"),
    "decode": (*_WORKER, *_DECODE),
    "attention": _WORKER,
    "mixed": (*_WORKER, *_MIXED),
    #: Both that it is: a mixed worker, which may also fail an answer that is begun, and the store of its node.
    "adapt": (*_WORKER, *_MIXED, "DecodeFailed", *_STORE),
    "operator": ("PolicyChanged", "RoleWanted"),
    "supervisor": ("ClusterConfigured", "WorkerLeft", "StoreLeft", "FrontendLeft"),
}
#: Nothing of its orders goes to another node.
_ASKED_BY_MIXED = ("attach", "open_put", "fetch", "commit", "release", "status", "keep")
_ASKED_BY_WORKERS = ("attach", "open_put", "fetch", "commit", "open_push", "close_push", "release", "status")
#: Through the pool of its node it brings blocks into its cache, and nothing out of it.
_ASKED_BY_ATTENTION = ("attach", "open_put", "fetch", "release", "status", "keep")
#: By programs that use a store as their own cache: none of them is in a cluster of containers, so nobody may.
_ASKED_BY_PROGRAMS = ("probe", "take", "remove", "pin")
_ASKED_BY_STORES = (
    "hello",
    "lease",
    "end_lease",
    "reserve",
    "renew",
    "settle",
    "drop",
    "pair",
    "probe",
    "replicate",
    "remove",  # copies of blocks on other nodes
    "status",  # its free slots, for the blocks of a node that is drained
)
#: The last four to read blocks, for `halfmoon audit`.
_ASKED_BY_OPERATORS = ("status", "drain", "attach", "take", "keep", "release")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A process as NATS knows it. `node_id`: of a store agent and of a worker. `public_key`: of its nkey
    (`U…`).
    """

    role: Role
    name: str
    node_id: str = ""
    #: Of a client that is one tenant's.
    tenant: str = ""
    public_key: str = ""
    #: Of a worker that may take these roles too: all that any of them may say and hear.
    also: tuple[WorkerRole, ...] = ()

    @property
    def publish(self) -> list[str]:
        """Subjects, with NATS' wildcards."""
        return list(dict.fromkeys(subject for each in self._each() for subject in each._publishes()))

    @property
    def subscribe(self) -> list[str]:
        """As `publish`."""
        return list(dict.fromkeys(subject for each in self._each() for subject in each._hears()))

    def _each(self) -> list[Identity]:
        return [self, *(replace(self, role=role, also=()) for role in self.also)]

    def _publishes(self) -> list[str]:
        """In its own role."""
        me = self.name
        said = [
            subjects.event(self.node_id if self.role == "store" else me, kind)
            for kind in _SAID.get(self.role, ())
        ]
        match self.role:
            case "conductor":
                return [
                    *said,
                    subjects.DECISIONS_ALL,
                    subjects.SNAPSHOTS_ALL,
                    subjects.status(subjects.CONDUCTORS),
                    *_PLACES,
                    *(f"{_JS}.STREAM.CREATE.{stream}" for stream in subjects.STREAMS),
                    *(f"{_JS}.STREAM.MSG.GET.{stream}" for stream in (_EVENTS, _DECISIONS, _SNAPSHOTS)),
                    f"{_JS}.STREAM.PURGE.{_SNAPSHOTS}",
                    *_reading([_EVENTS]),
                    *_ANSWERS,
                ]
            case "frontend":
                asks = [
                    subjects.status(subjects.CONDUCTORS),
                    subjects.view(subjects.CONDUCTORS),
                    subjects.explain("*"),
                ]
                peers = [subjects.give("*", me), subjects.resend("*", me), *asks]
                return [*said, *peers, f"{ROOT}.cancel", *_PLACES, *_MISSED, *_ANSWERS, *_CLIENT_INBOXES]
            case "store":
                kinds = ("TransferOpened", "TransferFailed", "KvReady", "KvLoaded")
                progress = [subjects.kv("*", kind, self.node_id) for kind in kinds]
                peers = [subjects.store("*", verb) for verb in _ASKED_BY_STORES]
                return [*said, *progress, *peers, *_PLACES, *_MISSED, *_ANSWERS]
            case "prefill":
                return [*said, subjects.kv("*", "PrefillResult", me), *self._worker()]
            case "decode":
                return [*said, subjects.tokens("*", me), subjects.hold("*", me), *self._worker(), *_ANSWERS]
            case "mixed":
                verbs = [subjects.store(self.node_id, verb) for verb in _ASKED_BY_MIXED]
                own = [subjects.tokens("*", me), subjects.take("*", me)]
                return [*said, *own, *verbs, *_PLACES, f"{_JS}.STREAM.MSG.GET.{_DECISIONS}", *_ANSWERS]
            case "adapt":
                own = [subjects.tokens("*", me), subjects.take("*", me)]
                return [*said, *own, *_PLACES, f"{_JS}.STREAM.MSG.GET.{_DECISIONS}", *_ANSWERS]
            case "attention":
                verbs = [subjects.store(self.node_id, verb) for verb in _ASKED_BY_ATTENTION]
                missed = f"{_JS}.STREAM.MSG.GET.{_DECISIONS}"
                return [*said, *verbs, *_PLACES, missed, *_ANSWERS]
            case "operator":
                gets = [f"{_JS}.STREAM.MSG.GET.{stream}" for stream in subjects.STREAMS]
                stores = [subjects.store("*", verb) for verb in _ASKED_BY_OPERATORS]
                asks = [subjects.status("*"), *stores, f"{subjects.API}.*", "$SRV.>"]
                return [*said, *asks, *_PLACES, *gets, *_reading(subjects.STREAMS)]
            case "client":
                return [f"{subjects.API}.*", "$SRV.>"]
            case "tenant":
                return [subjects.api("*", self.tenant)]
            case "supervisor":
                gets = [f"{_JS}.STREAM.MSG.GET.{stream}" for stream in (_EVENTS, _DECISIONS, _SNAPSHOTS)]
                makes = [f"{_JS}.STREAM.CREATE.{stream}" for stream in subjects.STREAMS]
                asks = [subjects.status(subjects.CONDUCTORS)]
                return [*said, *asks, *_PLACES, *gets, *makes, *_reading([_EVENTS])]
            case _:
                assert_never(self.role)

    def _hears(self) -> list[str]:
        """In its own role."""
        me, inbox = self.name, f"{subjects.inbox(self.name)}.>"
        match self.role:
            case "conductor":
                asked = [subjects.status(me), subjects.status(subjects.CONDUCTORS)]
                return [inbox, *asked, subjects.view(subjects.CONDUCTORS), subjects.explain(me)]
            case "frontend":
                served = [subjects.api("*"), subjects.api("*", "*"), "$SRV.>", f"{ROOT}.cancel"]
                own = [
                    subjects.take(me, "*"),
                    subjects.tokens(me, "*"),
                    subjects.decisions_for(me),
                    subjects.placements_for(me),
                ]
                return [inbox, *served, *own]
            case "store":
                node = self.node_id
                others = subjects.events_of_kind("StoreJoined")
                return [inbox, subjects.decisions_for(node), subjects.store(node, "*"), others]
            case "prefill":
                return [inbox, *self._worker_hears()]
            case "decode":
                return [inbox, *self._worker_hears(), subjects.resend(me, "*"), subjects.hold(me, "*")]
            case "mixed":
                fetched = subjects.kv(me, "KvLoaded", self.node_id)
                own = [subjects.decisions_for(me), subjects.give(me, "*"), fetched]
                return [inbox, *own, subjects.resend(me, "*")]
            case "adapt":
                own = [subjects.decisions_for(me), subjects.give(me, "*"), subjects.resend(me, "*")]
                return [inbox, *own]
            case "attention":
                return [inbox, subjects.decisions_for(me), subjects.hold(me, "*")]
            case "operator":
                return [f"{subjects.inbox('*')}.>", *_CLIENT_INBOXES]
            case "client":
                return _CLIENT_INBOXES
            case "tenant":
                return [f"{subjects.tenant_inbox(self.tenant)}.>"]
            case "supervisor":
                return [inbox]
            case _:
                assert_never(self.role)

    def _worker_hears(self) -> list[str]:
        me = self.name
        return [subjects.decisions_for(me), subjects.give(me, "*"), subjects.kv_for(me)]

    def _worker(self) -> list[str]:
        verbs = (*_ASKED_BY_WORKERS, "push", "keep")
        return [
            subjects.take("*", self.name),
            *(subjects.store(self.node_id, verb) for verb in verbs),
            *_PLACES,
            *_MISSED,
        ]


def cluster_identities(
    *,
    conductors: int,
    frontends: int,
    workers: Mapping[WorkerRole, int],
    tenants: Sequence[str] = (),
    elastic: bool = False,
    engines: int = 0,
) -> list[Identity]:
    """Every process of a cluster with so many of each, an operator, a client, and a client of each tenant.

    `elastic`: a prefill worker may become a decode worker, and the reverse. `engines`: of others, each adapted.
    """
    found = [Identity(role="operator", name=subjects.OPERATOR), Identity(role="client", name="client")]
    found += [Identity(role="tenant", name=f"tenant-{tenant}", tenant=tenant) for tenant in tenants]
    found += [Identity(role="conductor", name=f"conductor-{n}") for n in range(conductors)]
    found += [Identity(role="frontend", name=f"frontend-{n}") for n in range(frontends)]
    found += [Identity(role="adapt", name=f"vllm-{n}", node_id=f"vllm-{n}") for n in range(engines)]
    for role, count in workers.items():
        for n in range(count):
            node = f"{role}-{n}"
            found.append(Identity(role="store", name=f"store-{node}", node_id=node))
            also = tuple(
                other for other in ELASTIC_ROLES if elastic and role in ELASTIC_ROLES and other != role
            )
            found.append(Identity(role=role, name=node, node_id=node, also=also))
    return found


def _reading(streams: Sequence[str]) -> list[str]:
    """By an ordered consumer."""
    consumers = [f"{_JS}.CONSUMER.{verb}" for verb in ("CREATE.{}", "DELETE.{}.*")]
    return [*(line.format(stream) for line in consumers for stream in streams), "$JS.FC.>"]


def authorization(identities: Sequence[Identity]) -> str:
    """The block of nats-server's configuration: who is not in it gets no connection."""
    users = "\n".join(
        f"    # {each.name}\n"
        f"    {{ nkey: {each.public_key}, permissions: "
        f"{{ publish: {_listed(each.publish)}, subscribe: {_listed(each.subscribe)} }} }}"
        for each in identities
    )
    return f"authorization {{\n  users: [\n{users}\n  ]\n}}\n"


def _listed(patterns: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{pattern}"' for pattern in patterns) + "]"
