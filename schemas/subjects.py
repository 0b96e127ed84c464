"""Every NATS subject and stream of halfmoon, in one place.

Subjects name the sender (events) or the receiver (decisions, KV), so that NATS permissions can be given per role
(`halfmoon.bus.permissions`).
"""

from __future__ import annotations

ROOT = "halfmoon"
API = f"{ROOT}.v1"

#: A request on one of the API's subjects, and this after it, is its tenant's: `halfmoon.v1.generate.acme`.
TENANT = r"[A-Za-z0-9_-]{1,64}"

EVENTS_STREAM = "EVENTS"
DECISIONS_STREAM = "DECISIONS"
KV_STREAM = "KV"
SNAPSHOTS_STREAM = "SNAPSHOTS"
STREAMS = (EVENTS_STREAM, DECISIONS_STREAM, KV_STREAM, SNAPSHOTS_STREAM)

EVENTS_ALL = f"{ROOT}.events.>"
DECISIONS_ALL = f"{ROOT}.decisions.>"
KV_ALL = f"{ROOT}.kv.>"
SNAPSHOTS_ALL = f"{ROOT}.snapshots.>"


#: `halfmoon up` reports on processes that it watches, an operator a new policy: neither is a process of the cluster.
SUPERVISOR = "up"
OPERATOR = "operator"


#: Prefix of the inboxes of our processes.
INBOXES = f"{ROOT}.inbox"


def api(name: str, tenant: str = "") -> str:
    """An endpoint of clients; where `tenant` is given, for those whose credentials are that tenant's."""
    return f"{API}.{name}.{tenant}" if tenant else f"{API}.{name}"


def tenant_of(subject: str) -> str:
    """The tenant of a request on one of the API's subjects; "" on those for any."""
    return subject.removeprefix(f"{API}.").partition(".")[2]


def tenant_inbox(tenant: str) -> str:
    """Inboxes of a tenant's clients begin with this, so that no other tenant hears its answers."""
    return f"_INBOX.{tenant}"


def inbox(process_id: str) -> str:
    """Prefix of the inboxes of a process, so that nobody else need be allowed to listen there."""
    return f"{INBOXES}.{process_id}"


def event(source_id: str, kind: str) -> str:
    """`source_id`: the process that saw the fact, or SUPERVISOR or OPERATOR."""
    return f"{ROOT}.events.{source_id}.{kind}"


def events_of_kind(kind: str) -> str:
    """Events of one class, of any author."""
    return f"{ROOT}.events.*.{kind}"


def decision(target_id: str, kind: str, frontend_id: str = "") -> str:
    """`frontend_id`: of a placement (StartPrefill, StartMixed, or a StartDecode without one): the frontend hears of it
    too.
    """
    subject = f"{ROOT}.decisions.{target_id}.{kind}"
    return f"{subject}.{frontend_id}" if frontend_id else subject


def decisions_for(target_id: str) -> str:
    return f"{ROOT}.decisions.{target_id}.>"


def placements_for(frontend_id: str) -> str:
    """Where the requests of a frontend were placed, whichever worker it was."""
    return f"{ROOT}.decisions.*.*.{frontend_id}"


def kv(worker_id: str, kind: str, author_id: str) -> str:
    """`author_id`: the sender, a prefill worker (PrefillResult, KvPromised) or the node of a store agent (all else)."""
    return f"{ROOT}.kv.{worker_id}.{kind}.{author_id}"


def kv_for(worker_id: str) -> str:
    return f"{ROOT}.kv.{worker_id}.>"


def snapshot(seq: int | str, digest: str, part: int | str) -> str:
    """Part of a conductor's state after event `seq`: 0 upwards, and last of all "head"."""
    return f"{ROOT}.snapshots.{seq}.{digest}.{part}"


def snapshot_of(seq: int) -> str:
    """All parts of the snapshot after event `seq`."""
    return f"{ROOT}.snapshots.{seq}.>"


def take(frontend_id: str, worker_id: str) -> str:
    """`worker_id`: the asker."""
    return f"{ROOT}.take.{frontend_id}.{worker_id}"


def give(worker_id: str, frontend_id: str) -> str:
    """`frontend_id`: the giver."""
    return f"{ROOT}.give.{worker_id}.{frontend_id}"


def tokens(frontend_id: str, worker_id: str) -> str:
    """`worker_id`: the worker that sampled them."""
    return f"{ROOT}.tokens.{frontend_id}.{worker_id}"


def forward(frontend_id: str, worker_id: str) -> str:
    """`worker_id`: the adapter that names its engine, for a gateway to ask."""
    return f"{ROOT}.forward.{frontend_id}.{worker_id}"


def relay(worker_id: str, frontend_id: str) -> str:
    """`frontend_id`: the one that hears an engine's answer through a gateway."""
    return f"{ROOT}.relay.{worker_id}.{frontend_id}"


def resend(worker_id: str, frontend_id: str) -> str:
    """`frontend_id`: the asker."""
    return f"{ROOT}.resend.{worker_id}.{frontend_id}"


def hold(worker_id: str, owner_id: str) -> str:
    """`owner_id`: the decode worker that asks `worker_id` to hold segments of its sequence."""
    return f"{ROOT}.hold.{worker_id}.{owner_id}"


def want(worker_id: str, asker_id: str) -> str:
    """`asker_id`: the engine's connector that wants the KV of a prompt from that of `worker_id`."""
    return f"{ROOT}.want.{worker_id}.{asker_id}"


def reset(worker_id: str) -> str:
    """An operator has the engine behind an adapter drop its prefix cache."""
    return f"{ROOT}.reset.{worker_id}"


def store(node_id: str, verb: str) -> str:
    """A store agent's control requests; `store(node_id, "*")` for all verbs."""
    return f"{ROOT}.store.{node_id}.{verb}"


#: The name that every conductor answers to, beside its own: all of them answer a question to it.
CONDUCTORS = "conductors"


def status(process_id: str) -> str:
    """A process answers how it is; `status(CONDUCTORS)` is answered by every conductor."""
    return f"{ROOT}.status.{process_id}"


def view(process_id: str) -> str:
    """A conductor answers with the content of the cluster's page; asked of `view(CONDUCTORS)`."""
    return f"{ROOT}.view.{process_id}"


def locate() -> str:
    """One of the conductors answers which nodes have blocks."""
    return f"{ROOT}.locate"


def explain(process_id: str) -> str:
    """A conductor answers why a request went where it went."""
    return f"{ROOT}.explain.{process_id}"
