"""Rights of a process on NATS, to publish and to hear: one record for each role, and the parts that several share.

A subject names the process by `ME`, its node by `NODE`, and its tenant by `TENANT`; `halfmoon.bus.permissions` fills
them in. NATS' own wildcards stand in them too. The records of a cluster's processes are in `halfmoon.schemas.roles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.schemas import subjects

ME, NODE, TENANT = "{me}", "{node}", "{tenant}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """All subjects that a process of one role may publish and hear."""

    #: Kinds of events that it publishes, in the name of `author`.
    events: tuple[str, ...] = ()
    author: str = ME
    #: Subjects that it may publish to beside its events, and those that it may subscribe to.
    publish: tuple[str, ...] = ()
    hear: tuple[str, ...] = ()

    @property
    def said(self) -> list[str]:
        """Every subject that it may publish to."""
        return [*(subjects.event(self.author, kind) for kind in self.events), *self.publish]


def asks(node_id: str, verbs: Sequence[str]) -> tuple[str, ...]:
    """The store agent of `node_id` is asked these; "*": that of any node."""
    return tuple(subjects.store(node_id, verb) for verb in verbs)


_JS = "$JS.API"
_EVENTS, _DECISIONS, _KV, _SNAPSHOTS = subjects.STREAMS


def creates(streams: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{_JS}.STREAM.CREATE.{stream}" for stream in streams)


def gets(streams: Sequence[str]) -> tuple[str, ...]:
    """Single messages."""
    return tuple(f"{_JS}.STREAM.MSG.GET.{stream}" for stream in streams)


def reads(streams: Sequence[str]) -> tuple[str, ...]:
    """By an ordered consumer."""
    consumers = [f"{_JS}.CONSUMER.{verb}" for verb in ("CREATE.{}", "DELETE.{}.*")]
    return (*(line.format(stream) for line in consumers for stream in streams), "$JS.FC.>")


#: Where a stream ends.
PLACES = tuple(f"{_JS}.STREAM.INFO.{stream}" for stream in subjects.STREAMS)
PURGES_SNAPSHOTS = f"{_JS}.STREAM.PURGE.{_SNAPSHOTS}"
MISSED_DECISIONS = gets([_DECISIONS])
MISSED = gets([_DECISIONS, _KV])
LOG = gets([_EVENTS, _DECISIONS, _SNAPSHOTS])
READS_EVENTS = reads([_EVENTS])

INBOX = f"{subjects.inbox(ME)}.>"
#: Answers to any process, and to any client.
ANSWERS = f"{subjects.INBOXES}.>"
CLIENT_INBOXES = "_INBOX.>"
#: Clients' requests, and their search for a responder.
CLIENT_ASKS = (f"{subjects.API}.*", "$SRV.>")

WORKER_EVENTS = ("WorkerJoined", "WorkerHeartbeat", "WorkerDraining", "WorkerLeft")
MIXED_EVENTS = ("PrefillFinished", "PrefillFailed", "RequestFinished")
STORE_EVENTS = (
    "StoreJoined",
    "StoreHeartbeat",
    "StoreLeft",
    "StoreInventory",
    "BlocksStored",
    "BlocksEvicted",
)

#: Nothing of a mixed worker's orders goes to another node.
ASKED_BY_MIXED = ("attach", "open_put", "fetch", "commit", "release", "status", "keep")
ASKED_BY_PAIR = (
    "attach",
    "open_put",
    "fetch",
    "commit",
    "open_push",
    "close_push",
    "release",
    "status",
    "push",
    "keep",
)
#: Through the pool of its node an attention worker brings blocks into its cache, and nothing out of it.
ASKED_BY_HOLDERS = ("attach", "open_put", "fetch", "release", "status", "keep")
#: By programs that use a store as their own cache. Engines need the first two; no other program has credentials.
ASKED_BY_PROGRAMS = ("probe", "take", "remove", "pin")
ASKED_BY_ENGINES = (*ASKED_BY_PAIR, "probe", "take")
ASKED_BY_STORES = (
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
ASKED_BY_OPERATORS = ("status", "drain", "attach", "take", "keep", "release")
