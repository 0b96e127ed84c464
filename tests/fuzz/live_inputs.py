"""What each process of a live cluster may publish, by its credentials: valid messages with the cluster's own names,
made wrong by their structure or by their bytes.

A message that is *broken* fits no reader: it must change nothing. A *lie* may be read, and believed within what its
author may do; docs/security.md lists under "Not promised" what a stolen credential can do all the same. What it could
do for good (`POWERS`) is left out, since nobody could tell it from a fault.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halfmoon.schemas import decisions, events, store, subjects
from halfmoon.schemas.channels import CHANNELS, Channel
from halfmoon.schemas.codec import MessageInvalid, decode
from halfmoon.schemas.kv import KvMessage
from tests.bus.permission_table import SAYS, Process
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_json
from tests.fuzz.targets.api_bodies import valid_body
from tests.fuzz.targets.nats_clients import HEADERS, REPLIES
from tests.fuzz.targets.nats_wire import sample

#: Messages whose author may end, stop or mislead its cluster for good: a policy that takes no request, a store that is
#: drained, a worker that says that it leaves, or is another one (to its store agent too), a conductor that disputes the
#: state or begins a log.
POWERS = (
    events.ClusterConfigured,
    events.PolicyChanged,
    events.StateDigested,
    events.StoreJoined,
    events.WorkerDraining,
    events.WorkerJoined,
    store.DrainStore,
    store.Attach,
)
#: Of JetStream: what a stream must not be told by who writes to it.
STREAM_HEADERS = [
    b"NATS/1.0\r\nNats-Rollup: all\r\n\r\n", b"NATS/1.0\r\nNats-Rollup: sub\r\n\r\n",
    b"NATS/1.0\r\nNats-TTL: 1s\r\n\r\n", b"NATS/1.0\r\nNats-Expected-Last-Sequence: 0\r\n\r\n",
    b"NATS/1.0\r\nNats-Expected-Stream: KV\r\n\r\n", b"NATS/1.0\r\nNats-Msg-Id: \xff\r\n\r\n",
    b"NATS/1.0\r\nNats-Msg-Id: " + b"i" * 5000 + b"\r\n\r\n", b"NATS/1.0\r\nNats-Expected-Last-Sequence: -1\r\n\r\n",
]  # fmt: skip
HUGE_BYTES = 3 << 20
BREAK_TRIES = 20


@dataclass(frozen=True)
class Place:
    """A subject that `process` may publish to. `kind`: what its readers decode; None: they take no body.
    `message`: the class that is sent there, inside `kind` where that is a union or an envelope.
    """

    process: Process
    channel: str
    subject: str
    kind: Any = None
    message: Any = None


@dataclass
class Known:
    """What an insider would know: names by the end of a field's name, and messages that were really sent, by class."""

    names: dict[str, list[str]]
    said: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    #: Orders may be forged as of any event up to here: beyond it none that follows would be obeyed.
    last_seq: int = 1

    def learn(self, messages: Iterable[Any]) -> None:
        """Messages of the cluster's streams."""
        for message in messages:
            plain = msgspec.to_builtins(message)
            inner = plain.get("decision", plain)
            self.said[inner["type"]].append(plain)
            for ending in ("request_id", "order_id", "incarnation"):
                if isinstance(inner.get(ending), str) and inner[ending] not in self.names[ending]:
                    self.names[ending].append(inner[ending])


def places_of(processes: Iterable[Process], ids: list[str]) -> dict[str, dict[str, list[Place]]]:
    """By process and channel: every subject of asyncapi.json that its credentials allow; `ids` stand for names."""
    found: dict[str, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for process, channel in itertools.product(processes, CHANNELS):
        for message in channel.messages or (None,):
            for subject in _subjects(channel, message, ids):
                if process.may(SAYS, subject):
                    place = Place(process, channel.name, subject, _kind(channel.name, message), message)
                    found[process.name][channel.name].append(place)
    return found


def _subjects(channel: Channel, message: Any, ids: list[str]) -> Iterable[str]:
    names = re.findall(r"\{(\w+)\}", channel.address)
    values = [
        [message.__name__] if name == "type" else ["7"] if name in ("seq", "part", "digest") else ids
        for name in names
    ]
    for chosen in itertools.product(*values):
        yield channel.address.format(**dict(zip(names, chosen, strict=True)))


def _kind(channel: str, message: Any) -> Any:
    match channel:
        case "events":
            return events.Event
        case "decisions" | "placements":
            return decisions.Ordered
        case "kv":
            return KvMessage
        case _:
            return message


def broken(draw: random.Random, known: Known, place: Place) -> bytes:
    """Commands that publish what no reader takes, or to clients' subjects whatever a client may send."""
    if place.subject.startswith(f"{subjects.API}."):
        return _publish(draw, place.subject, _client_body(draw))
    value = _value(draw, known, place)
    for _ in range(BREAK_TRIES):
        content = json_bytes(draw, mutated_json(draw, value, 0 if draw.random() < 0.7 else 8))
        if draw.random() < 0.15:
            content = mutated_bytes(draw, content)
        if not _decodes(content, place.kind):
            return _publish(draw, place.subject, _padded(draw, content))
    content = draw.choice(
        [msgspec.msgpack.encode(value), draw.randbytes(draw.randint(0, 60)), b"", b"null", b"[]"]
    )
    return _publish(draw, place.subject, content if not _decodes(content, place.kind) else b"{")


def lie(draw: random.Random, known: Known, place: Place) -> bytes:
    """Commands that publish what readers may take, with names of this cluster; b"" where that is one of POWERS."""
    value = _value(draw, known, place)
    changed = mutated_json(draw, value, 1) if draw.random() < 0.5 else value
    content = json.dumps(changed, default=str).encode(errors="surrogatepass")
    if place.message in POWERS and _decodes(content, place.kind):
        return b""
    if place.kind is decisions.Ordered and not _is_of_now(content, known):
        return b""
    return _publish(draw, place.subject, content)


def _is_of_now(content: bytes, known: Known) -> bool:
    """The order, if it is one, is as of an event that there was."""
    try:
        order: decisions.Ordered = decode(content, decisions.Ordered)
    except MessageInvalid:
        return True
    return order.cause_seq <= known.last_seq


def _value(draw: random.Random, known: Known, place: Place) -> Any:
    """Builtins of a message that readers of `place` would take, mostly: a real one again, or one that is drawn."""
    if place.message is None:
        return {}
    real = known.said.get(place.message.__name__, [])
    if real and draw.random() < 0.6:
        value = draw.choice(real[-200:])
    else:
        value = sample(draw, place.message)
        if place.kind is decisions.Ordered:
            value = {"type": "Ordered", "cause_seq": 1, "position": draw.randrange(3), "decision": value}
    if place.kind is decisions.Ordered:
        value = {**value, "cause_seq": draw.randint(1, max(1, known.last_seq))}
    return _named(draw, value, known, place.process)


def _named(draw: random.Random, value: Any, known: Known, process: Process) -> Any:
    """A copy with names of the cluster; its own first, so that what it says of itself is believed."""
    if isinstance(value, list):
        return [_named(draw, each, known, process) for each in value]
    if not isinstance(value, dict):
        return value
    mine = {"node_id": process.node, f"{process.role}_id": process.name, "worker_id": process.name}
    copy = {}
    for key, inner in value.items():
        ending = next((each for each in known.names if key.endswith(each)), "")
        if isinstance(inner, str) and ending and known.names[ending] and draw.random() < 0.9:
            own = mine.get(key, "")
            copy[key] = own if own and draw.random() < 0.7 else draw.choice(known.names[ending])
        else:
            copy[key] = _named(draw, inner, known, process)
    return copy


def _client_body(draw: random.Random) -> bytes:
    body = mutated_json(draw, valid_body(draw)) if draw.random() < 0.8 else valid_body(draw)
    if isinstance(body, dict):  # long answers are not what this is about
        body |= {"max_tokens": draw.choice([1, 1, 2, 0, -1, "2", 2.5, []]), "max_completion_tokens": 1}
    return _padded(draw, json_bytes(draw, body))


def _padded(draw: random.Random, content: bytes) -> bytes:
    return content + b" " * HUGE_BYTES if draw.random() < 0.002 else content


def _decodes(content: bytes, kind: Any) -> bool:
    if kind is None:
        return False
    try:
        decode(content, kind)
    except MessageInvalid:
        return False
    return True


def _publish(draw: random.Random, subject: str, payload: bytes) -> bytes:
    good = draw.random() < 0.3
    reply = b"_INBOX.fuzz.%d" % draw.randrange(1000) if good else draw.choice(REPLIES)
    headers = draw.choice([*HEADERS, *STREAM_HEADERS]) if draw.random() < 0.4 else b""
    if headers and draw.random() < 0.2:
        headers = mutated_bytes(draw, headers)
    name = subject.encode()
    if headers:
        sizes = len(headers), len(headers) + len(payload)
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (name, reply, *sizes, headers, payload)
    return b"PUB %b %b %d\r\n%b\r\n" % (name, reply, len(payload), payload)
