"""What a server hands on to any of our processes: lines of NATS' protocol, of messages that somebody published.

No server and no socket, so that there are thousands a second: the parser, the client, who serves and who subscribes,
the acknowledgements and the answers. Valid messages of every subject are made wrong, by their structure or by their
bytes; reply subjects and headers are those of hostile clients. Whatever comes, the reading goes on, what leaves goes to
an inbox, and a good request that comes last is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from nats.aio.subscription import Subscription

from halfmoon.bus.client import DirectClient
from halfmoon.bus.errors import PeerError
from halfmoon.bus.publisher import Publisher, _Outgoing
from halfmoon.bus.requests import Requests, _Question
from halfmoon.bus.serving import Responder
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.contract.channels import CHANNELS
from halfmoon.schemas.status import StatusRequest
from halfmoon.schemas.tokens import ResendReply
from tests.fuzz.frame import Found, Play
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_json
from tests.fuzz.targets.nats_clients import HEADERS, REPLIES

TEST_INPUTS = 600
INPUTS_MEANT = 1_500_000
#: Subscriptions of the client that is played to, by number.
SERVED, HEARD, LIBRARY, ACKS, ANSWERS = range(1, 6)
GOOD = 9
GOOD_REPLY = b"_INBOX.good"
INBOXES = (b"_INBOX.", b"halfmoon.inbox.")


schema_of = cache(msgspec.json.schema)


def sample(draw: random.Random, kind: Any) -> Any:
    """Builtins of a value that fits `kind`, mostly."""
    found = schema_of(kind)
    return _sample(draw, found, found.get("$defs", {}), 6)


def _sample(draw: random.Random, schema: dict[str, Any], named: dict[str, Any], deeper: int) -> Any:
    if reference := schema.get("$ref"):
        return _sample(draw, named[reference.rpartition("/")[2]], named, deeper)
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _sample(draw, draw.choice(choices), named, deeper)
    match schema.get("type"):
        case "object":
            wanted = schema.get("required", [])
            return {
                name: _sample(draw, inner, named, deeper - 1)
                for name, inner in schema.get("properties", {}).items()
                if name in wanted or (deeper > 0 and draw.random() < 0.5)
            }
        case "array" if places := schema.get("prefixItems"):  # a tuple
            return [_sample(draw, inner, named, deeper - 1) for inner in places]
        case "array":
            inner = schema.get("items") or {}
            return [
                _sample(draw, inner, named, deeper - 1)
                for _ in range(draw.randint(0, 2) if deeper > 0 else 0)
            ]
        case "string":
            return draw.choice(("", "AAAAAAAAAAAAAAAAAAAAAA==")) if "contentEncoding" in schema else "p0"
        case "integer":
            return min(draw.choice((0, 1, 5, 2**31 - 1, 2**63 - 1)), schema.get("maximum", 2**63 - 1))
        case "number":
            return draw.choice((0.0, 0.5, 1e300))
        case "boolean":
            return draw.random() < 0.5
        case _:
            return None


@cache
def kinds() -> list[type]:
    """Of every message and every reply of every subject."""
    every = [kind for channel in CHANNELS for kind in (*channel.messages, *channel.replies)]
    return sorted(dict.fromkeys(every), key=lambda kind: kind.__name__)


def make(draw: random.Random) -> bytes:
    """The place of the message's kind in `kinds` in two bytes, and the lines."""
    place = draw.randrange(len(kinds()))
    value = sample(draw, kinds()[place])
    payload = json_bytes(draw, mutated_json(draw, value) if draw.random() < 0.7 else value)
    if draw.random() < 0.05:
        payload = draw.randbytes(draw.randint(0, 40))
    if draw.random() < 0.1:
        ack = {"stream": "EVENTS", "seq": 5, "error": {"code": 503, "err_code": 10071, "description": "x"}}
        payload = json_bytes(draw, mutated_json(draw, ack))
    good = draw.random() < 0.5
    reply = b"%b%d" % (draw.choice(INBOXES), draw.randrange(1000)) if good else draw.choice(REPLIES)
    if draw.random() < 0.1:
        reply = mutated_bytes(draw, reply)
    # What the server would not take for a reply subject does not come from it.
    for blank in (b" ", b"\t", b"\r", b"\n"):
        reply = reply.replace(blank, b"")
    headers = draw.choice(HEADERS) if draw.random() < 0.5 else b""
    if headers and draw.random() < 0.5:
        headers = mutated_bytes(draw, headers)
    lines = bytearray()
    for sid in (SERVED, HEARD, LIBRARY, ACKS, ANSWERS):
        lines += _message(sid, reply, headers, payload)
    if draw.random() < 0.05:
        return place.to_bytes(2, "big") + mutated_bytes(draw, bytes(lines))
    return place.to_bytes(2, "big") + bytes(lines)


def _message(sid: int, reply: bytes, headers: bytes, payload: bytes) -> bytes:
    subject = b"inbox.%d" % (sid % 3) if sid in (ACKS, ANSWERS) else b"subject"
    where = b"%b %d %b" % (subject, sid, reply + b" " if reply else b"")
    size = len(headers) + len(payload)
    if headers:
        return b"HMSG %b%d %d\r\n%b%b\r\n" % (where, len(headers), size, headers, payload)
    return b"MSG %b%d\r\n%b\r\n" % (where, size, payload)


class _Client(DirectClient):
    """Connected, to nobody: what it sends stays in `_pending`."""

    async def _flush_pending(self, force_flush: bool = False) -> None:
        return


class _Process:
    """One process of ours as it is to NATS, without a connection."""

    def __init__(self) -> None:
        self.client = _Client()
        self.client._status = DirectClient.CONNECTED
        self.client._max_payload = 1 << 20
        self.client._transport = None
        self.invalid = self._number = 0
        self._publisher, self._requests = Publisher(self.client), Requests(self.client)
        self._good = self._responder(StatusRequest)
        #: As nats-py's own callbacks hear: it reads subjects and headers.
        self._library = Subscription(self.client, LIBRARY, "subject")
        self.client._subs[LIBRARY] = self._library

    def _responder(self, kind: Any) -> Responder:
        def answer(message: Any) -> ResendReply:
            if message == 5:
                raise PeerError("five", "is not answered")
            return ResendReply(known=True)

        return Responder(self.client, kind, answer, spawn=asyncio.ensure_future, invalid=self._count)  # type: ignore[arg-type]

    def _read(self, payload: bytes, kind: Any) -> None:
        with contextlib.suppress(MessageInvalid):
            encode(decode(payload, kind))

    def _count(self) -> None:
        self.invalid += 1

    async def hear(self, kind: Any, lines: bytes) -> str:
        """The outcome, by name. Raises Found."""
        client = self.client
        client._ps.reset()
        acknowledged = self._something_waits()
        client._raw_handlers = {
            SERVED: self._responder(kind).receive,
            HEARD: lambda _, __, payload, ___: self._read(payload, kind),
            ACKS: lambda _, reply, payload, headers: self._publisher._on_ack(
                acknowledged, reply, payload, headers
            ),
            ANSWERS: self._requests._receive,
            GOOD: self._good.receive,
        }
        before = self.invalid
        outcome = "read"
        try:
            await client._ps.parse(client._ps.take(lines))
        except Exception as problem:
            if type(problem).__name__ != "ProtocolError":
                raise
            outcome = "no protocol"
        self._check(self._sent())
        while not self._library._pending_queue.empty():
            self._library._pending_queue.get_nowait()
        self._library._pending_size = 0
        if outcome == "read" and client._ps._message_bytes < 0 and not client._ps.buf:
            question = encode(StatusRequest())
            await client._ps.parse(client._ps.take(_message(GOOD, GOOD_REPLY, b"", question)))
            if not any(command.startswith(b"PUB " + GOOD_REPLY) for command in self._sent()):
                raise Found("a good request is not answered")
        return outcome if self.invalid == before else f"{outcome}, refused"

    def _something_waits(self) -> bytes:
        """A message for its acknowledgement, and a question for its answer; where the acknowledgement comes."""
        self._number += 1
        item = _Outgoing("halfmoon.events.p0.Any", b"", "", b"", None)
        self._publisher._pending = {self._number: item}
        answer = asyncio.get_running_loop().create_future()
        self._requests._waiting = {b"inbox.2": _Question("subject", b"", answer, 0.0, False)}
        return f"{self._publisher._prefix}.{self._number}".encode()

    def _sent(self) -> list[bytes]:
        sent, self.client._pending, self.client._pending_data_size = self.client._pending, [], 0
        return sent

    def _check(self, sent: list[bytes]) -> None:
        for command in sent:
            if command == b"PONG\r\n":  # a line that was made wrong can be the server's PING
                continue
            words = command.split(b"\r\n", 1)[0].split(b" ")
            if words[0] not in (b"PUB", b"HPUB") or not words[1].startswith(INBOXES):
                raise Found(f"this leaves: {command[:200]!r}")


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    loop = asyncio.new_event_loop()
    try:
        process = _Process()

        def play(content: bytes) -> str:
            kind = kinds()[int.from_bytes(content[:2], "big") % len(kinds())]
            return loop.run_until_complete(process.hear(kind, content[2:]))

        yield play
    finally:
        loop.close()
