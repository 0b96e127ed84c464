"""What a client of NATS may send to a frontend, and what its peers may: real nats-server, real frontend, a raw socket.

Each input is a few commands of NATS' protocol. Bodies and messages are valid ones made wrong; subjects, reply subjects
and headers are what no client library would send. Afterwards the frontend must still hold its connection, and answer a
good request. The server may close the connection of whoever sent the input.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.eventually import eventually, within
from tests.frontend.frontend_double import MODEL, Cluster, Double, cluster
from tests.fuzz.frame import Found, Play, found_where_late
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_json
from tests.fuzz.targets.api_bodies import valid_body

TEST_INPUTS = 60
INPUTS_MEANT = 150_000
DEADLINE_S = 15.0
FRONTEND = "@frontend@"
#: The server waits for the rest of a command that says that it is longer than it is: then the socket is closed.
CLOSED_S = 0.2

REPLIES = [
    b"", b"", b"_INBOX.fuzz.1", b"_INBOX.fuzz.2", b"_INBOX.>", b"_INBOX", b"_INBOX.", b"_INBOX.a..b",
    b"_INBOX.\xff\xfe", b"_INBOX.a\x0cb", b"_INBOX.a\x0bb", b"_INBOX.\x00", b"_INBOX." + b"r" * 3000, b">",
    b"*", b".", b"5", b"\xff", b"halfmoon.events.up.WorkerLeft", b"halfmoon.decisions.d1.StartDecode",
    b"halfmoon.v1.generate", b"$JS.API.INFO", b"$SRV.PING", b"halfmoon.inbox.frontend.x.0", b"halfmoon.cancel",
    b"\xc3\xa9", b"a" * 900,
]  # fmt: skip
HEADERS = [
    b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0", b"AB", b"NATS/1.0 503\r\n\r\n", b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    b"NATS/1.0 100 \xff\r\n\r\n", b"NATS/1.0\r\n\xff\x00\r\n\r\n", b"NATS/1.0\r\n: x\r\n\r\n",
    b"NATS/9.9\r\na: b\r\n\r\n",
    b"NATS/1.0\r\nHalfmoon-Alive: _INBOX.alive\r\n\r\n", b"NATS/1.0\r\nHalfmoon-Alive: halfmoon.events.up.X\r\n\r\n",
    b"NATS/1.0\r\nHalfmoon-Alive: a b\r\n\r\n", b"NATS/1.0\r\nHalfmoon-Alive: \xff\r\n\r\n",
    b"NATS/1.0\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\r\n",
    b"NATS/1.0\r\ntraceparent: " + b"0" * 5000 + b"\r\n\r\n", b"NATS/1.0\r\n" + b"a: b\r\n" * 500 + b"\r\n",
]  # fmt: skip
_API = ("generate", "generate", "chat", "models", "cancel", "status", "tokenize")
_PEERS: list[tuple[str, Any]] = [
    ("halfmoon.cancel", "fuzz"),
    (f"halfmoon.tokens.{FRONTEND}.d1", {
        "type": "TokensSampled", "worker_id": "d1",
        "deliveries": [{"request_id": "r", "order_id": "1-0", "index": 0, "tokens": [{"token_id": 5}],
                        "finish_reason": "stop", "timing": {"queue_ns": 1}}],
    }),
    (f"halfmoon.take.{FRONTEND}.d1", {
        "type": "TakeRequest", "request_id": "r", "order_id": "1-0", "worker_id": "d1", "role": "decode"
    }),
    (f"halfmoon.decisions.p1.StartPrefill.{FRONTEND}", {
        "type": "Ordered", "cause_seq": 1, "position": 0,
        "decision": {"type": "StartPrefill", "order_id": "1-0", "request_id": "r", "frontend_id": FRONTEND,
                     "worker_id": "p1", "decode_worker_id": "d1", "decode_node_id": "n", "prompt_tokens": 3,
                     "local_blocks": 0, "fetches": [], "predicted": {}},
    }),
    (f"halfmoon.decisions.{FRONTEND}.RejectRequest", {
        "type": "Ordered", "cause_seq": 1, "position": 0,
        "decision": {"type": "RejectRequest", "request_id": "r", "frontend_id": FRONTEND, "reason": "ttft_slo"},
    }),
]  # fmt: skip


def make(draw: random.Random) -> bytes:
    return b"".join(_command(draw) for _ in range(draw.randint(1, 6)))


def _command(draw: random.Random) -> bytes:
    match draw.randrange(8):
        case 0:
            subject, value = draw.choice(_PEERS)
            payload = json_bytes(draw, mutated_json(draw, value) if draw.random() < 0.8 else value)
        case 1:
            subject = draw.choice(
                ["$SRV.PING", "$SRV.INFO.halfmoon", "$SRV.STATS", f"$SRV.PING.halfmoon.{FRONTEND}"]
            )
            payload = draw.randbytes(draw.choice((0, 0, 3)))
        case _:
            subject = f"halfmoon.v1.{draw.choice(_API)}" + draw.choice(("", "", ".acme"))
            body = {"max_tokens": 2, **valid_body(draw)}
            payload = json_bytes(draw, mutated_json(draw, body) if draw.random() < 0.7 else body)
    reply = draw.choice(REPLIES)
    if draw.random() < 0.1:
        reply = mutated_bytes(draw, reply)
    headers = draw.choice(HEADERS) if draw.random() < 0.5 else b""
    if headers and draw.random() < 0.2:
        headers = mutated_bytes(draw, headers)
    name = subject.encode()
    if headers:
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
            name, reply, len(headers), len(headers) + len(payload), headers, payload
        )  # fmt: skip
    return b"PUB %b %b %d\r\n%b\r\n" % (name, reply, len(payload), payload)


async def _answer(double: Double, seq: int, arrived: Any) -> None:
    """All at once; a request may have been cancelled meanwhile."""
    order_id = f"{seq}-0"
    taken = await double.place(arrived, order_id)
    if not taken.gone:
        await double.deliver(double.delivery(arrived, order_id, 0, [5], "length"))


class _Raw:
    """A connection of a client that checks nothing; made anew when the server has closed it."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("nats://").rpartition(":")
        self._address = host, int(port)
        self._socket: socket.socket | None = None

    def send(self, content: bytes) -> str:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=CLOSED_S)
            self._socket.sendall(
                b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'
            )
            self._until(b"INFO ")
        try:
            self._socket.sendall(content + b"PING\r\n")
            outcome = self._until(b"PONG\r\n")
        except OSError:
            outcome = "closed"
        if outcome == "closed":
            self.close()
        return outcome

    def _until(self, word: bytes) -> str:
        assert self._socket is not None
        heard = b""
        while word not in heard:
            if b"PING\r\n" in heard:
                heard = heard.replace(b"PING\r\n", b"")
                self._socket.sendall(b"PONG\r\n")
            part = self._socket.recv(1 << 16)
            if not part or b"-ERR" in part:
                return "closed"
            heard = heard[-10:] + part
        return "taken"

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def _check(made: Cluster) -> None:
    """A good request is answered, on the connection that there was."""
    with found_where_late():
        _, body = await within(made.ask("tokenize", {"prompt": "Once"}), "a good request is answered")
    if body.get("count") != 1:
        raise Found(f"a good request is answered with {body}")
    nc = made.frontend.bus.nc
    if nc.stats["reconnects"] or not nc.is_connected:
        raise Found("the frontend lost its connection")
    if made.double.failures:
        raise made.double.failures[0]


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer.start(Path(folder) / "nats", max_payload_bytes=1 << 20)
        context = cluster(server.url, Tokenizer.load(MODEL), alive_ns=50_000_000, nats_api=True)
        raw = _Raw(server.url)
        try:
            made = loop.run_until_complete(context.__aenter__())
            made.double.script = _answer
            name = made.frontend.config.frontend_id.encode()

            def play(content: bytes) -> str:
                outcome = raw.send(content.replace(FRONTEND.encode(), name))
                loop.run_until_complete(_check(made))
                return outcome

            yield play
            loop.run_until_complete(_ended(made))
            # The server's word that a decision is stored goes to the reply subject: an event that no reader takes.
            made.double.bus.invalid = 0
            loop.run_until_complete(context.__aexit__(None, None, None))
        finally:
            raw.close()
            loop.close()
            server.stop()


async def _ended(made: Cluster) -> None:
    """Whatever was asked has ended."""
    with found_where_late():
        await eventually(lambda: not made.frontend.registry.requests, "all requests have ended")
    body = {"prompt": "Once", "max_tokens": 2}
    _, answer = await made.ask("generate", body)
    if answer.get("finish_reason") != "length":
        raise Found(f"a good request is answered with {orjson.dumps(answer).decode()}")
