"""Permissions of each role on NATS, to publish and to hear: the text of `authorization` in a server's configuration.

Every process has a name and an nkey of its own. It publishes under its own name only, hears only its own messages
(orders, KV progress, tokens, answers), and calls only its role's partners: a worker its own node's store agent, a
frontend workers. Orders come from conductors alone. Streams are made by conductors; consumers, which can have the
server send stored messages to any subject, by conductors and the operator. `halfmoon up` gives its processes the same:
it is the supervisor beside them, which makes the streams and reports deaths.

NATS cannot see whether a payload fits its subject: events are checked where they are read (`said_by`). Nor does it
keep anybody from naming another's subject as the reply to a request. So processes answer at inboxes only, and frontends
at those of clients (`halfmoon.bus.wire`); the server's own answers may come to a process that did not ask, and are
dropped there because they do not decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from halfmoon.schemas import subjects
from halfmoon.schemas.contract import rights
from halfmoon.schemas.contract.rights import ME, NODE, TENANT, Rights
from halfmoon.schemas.roles import ELASTIC_ROLES, ROLES, ProcessRole, WorkerRole

#: "supervisor": `halfmoon up`, which reports the deaths of the processes that it started.
#: "tenant": a client of one tenant, which its subjects name; "client" may ask for any tenant.
#: "engine": another's engine, with the store under it, and with prompts' KV from other engines.
Role = ProcessRole | Literal["operator", "client", "tenant", "supervisor", "engine"]

#: Those of a cluster's processes stand in their roles' records; here are those that are no process of it.
RIGHTS: dict[Role, Rights] = {
    **{role: traits.rights for role, traits in ROLES.items()},
    "operator": Rights(
        events=("PolicyChanged", "RoleWanted", "PlacementsPaused", "WeightsChanged"),
        publish=(
            subjects.status("*"),
            subjects.reset("*"),
            *rights.asks("*", rights.ASKED_BY_OPERATORS),
            *rights.CLIENT_ASKS,
            *rights.PLACES,
            *rights.gets(subjects.STREAMS),
            *rights.reads(subjects.STREAMS),
        ),
        hear=(f"{subjects.inbox('*')}.>", rights.CLIENT_INBOXES),
    ),
    "client": Rights(publish=rights.CLIENT_ASKS, hear=(rights.CLIENT_INBOXES,)),
    "tenant": Rights(publish=(subjects.api("*", TENANT),), hear=(f"{subjects.tenant_inbox(TENANT)}.>",)),
    "supervisor": Rights(
        events=("ClusterConfigured", "WorkerLeft", "StoreLeft", "FrontendLeft"),
        publish=(
            subjects.status(subjects.CONDUCTORS),
            *rights.PLACES,
            *rights.LOG,
            *rights.creates(subjects.STREAMS),
            *rights.READS_EVENTS,
        ),
        hear=(rights.INBOX,),
    ),
    "engine": Rights(
        publish=(
            *rights.asks(NODE, rights.ASKED_BY_ENGINES),
            *rights.asks("*", ("probe",)),
            subjects.locate(),
            subjects.want("*", ME),
            subjects.kv("*", "TransferFailed", ME),
            *rights.PLACES,
            rights.ANSWERS,
        ),
        hear=(rights.INBOX, subjects.kv_for(ME), subjects.want(ME, "*")),
    ),
}


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
    #: Roles that a worker may take too: it has the rights of all of them.
    also: tuple[WorkerRole, ...] = ()
    #: Of a store agent in its worker's container: the worker's role.
    beside: WorkerRole | None = None

    @property
    def publish(self) -> list[str]:
        """Subjects, with NATS' wildcards."""
        return self._filled(subject for each in self._rights() for subject in each.said)

    @property
    def subscribe(self) -> list[str]:
        """As `publish`."""
        return self._filled(subject for each in self._rights() for subject in each.hear)

    def _rights(self) -> list[Rights]:
        return [RIGHTS[role] for role in (self.role, *self.also)]

    def _filled(self, patterns: Iterable[str]) -> list[str]:
        """With the names that this process has, each once."""
        own = ((ME, self.name), (NODE, self.node_id), (TENANT, self.tenant))
        found = []
        for pattern in patterns:
            for placeholder, name in own:
                pattern = pattern.replace(placeholder, name)
            found.append(pattern)
        return list(dict.fromkeys(found))


def cluster_identities(
    *,
    conductors: int,
    frontends: int,
    workers: Mapping[WorkerRole, int],
    tenants: Sequence[str] = (),
    elastic: bool = False,
    adapters: Sequence[str] = (),
    engines: int = 0,
) -> list[Identity]:
    """Every process of a cluster with these counts, an operator, a client, and a client of each tenant.

    `elastic`: a prefill worker may become a decode worker, and the reverse. `adapters`: their names. `engines`: those
    that use a store, each with a store agent.
    """
    found = [Identity(role="operator", name=subjects.OPERATOR), Identity(role="client", name="client")]
    found += [Identity(role="tenant", name=f"tenant-{tenant}", tenant=tenant) for tenant in tenants]
    found += [Identity(role="conductor", name=f"conductor-{n}") for n in range(conductors)]
    found += [Identity(role="frontend", name=f"frontend-{n}") for n in range(frontends)]
    found += [Identity(role="adapt", name=name, node_id=name) for name in adapters]
    for n in range(engines):
        node = f"engine-{n}"
        found += [
            Identity(role="engine", name=node, node_id=node),
            Identity(role="store", name=f"store-{node}", node_id=node),
        ]
    for role, count in workers.items():
        for n in range(count):
            node = f"{role}-{n}"
            found.append(Identity(role="store", name=f"store-{node}", node_id=node, beside=role))
            also = tuple(
                other for other in ELASTIC_ROLES if elastic and role in ELASTIC_ROLES and other != role
            )
            found.append(Identity(role=role, name=node, node_id=node, also=also))
    return found


def authorization(identities: Sequence[Identity]) -> str:
    """The block of nats-server's configuration: an identity that is not in it gets no connection."""
    users = "\n".join(
        f"    # {each.name}\n"
        f"    {{ nkey: {each.public_key}, permissions: "
        f"{{ publish: {_listed(each.publish)}, subscribe: {_listed(each.subscribe)} }} }}"
        for each in identities
    )
    return f"authorization {{\n  users: [\n{users}\n  ]\n}}\n"


def _listed(patterns: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{pattern}"' for pattern in patterns) + "]"
