"""A NATS server within the process, as far as frontends and conductors use one: subjects, queue groups, requests that
nobody answers, and streams that are appended to, read on, asked for messages, and purged of subjects.

It speaks the protocol's own bytes, so all of `halfmoon.bus` is the real one. `tests/bus/test_in_process.py` holds the
same conversation with it and with the real server. Nothing is kept on a disk, no right is checked, nothing expires.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import inspect
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import orjson

from halfmoon.bus.client import header
from halfmoon.bus.jetstream import API, NO_MESSAGE, NO_STREAM
from halfmoon.bus.publisher import WRONG_LAST_SEQUENCE
from tests.eventually import SCENARIO_S
from tests.in_process import HOST, InProcessLoop

#: Where no server of the machine is.
PORT = 1
URL = f"nats://{HOST}:{PORT}"
_END = b"\r\n"


async def listen(payload_bytes_max: int = 1 << 20) -> None:
    """At URL, on the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, InProcessLoop)
    server = _Server(payload_bytes_max)
    await loop.create_server(lambda: _Connection(server), HOST, PORT)


Test = Callable[..., Coroutine[Any, Any, None]]


def in_process(test: Test, *, like: Test | None = None, without: str = "url") -> Callable[..., None]:
    """A test that asks for `url`, on a loop of its own: its server and its connections are in the process.

    `like`: the test whose name, marks and fixtures it has, but for the one that it does `without`.
    """
    like = like or test

    @functools.wraps(like)
    def run(**given: Any) -> None:
        run_at(URL, test(url=URL, **given))

    signature = inspect.signature(like)
    others = [each for name, each in signature.parameters.items() if name != without]
    run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return run


def run_at(url: str, story: Coroutine[Any, Any, None]) -> None:
    """Runs `story`, whose server is at `url`: of URL, on a loop and with a server of its own, within the process."""

    async def main() -> None:
        if url == URL:
            await listen()
        await asyncio.wait_for(story, SCENARIO_S)

    with asyncio.Runner(loop_factory=InProcessLoop if url == URL else None) as runner:
        runner.run(main())


def matches(pattern: str, subject: str) -> bool:
    """Whether who subscribed to `pattern` hears `subject`."""
    wanted, names = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(names) <= len(wanted):
            return False
        names = names[: len(wanted)]
    return len(wanted) == len(names) and all(
        each in ("*", name) for each, name in zip(wanted, names, strict=True)
    )


class _Subscription:
    def __init__(self, connection: _Connection, sid: bytes, subject: str, queue: str) -> None:
        self.connection = connection
        self.sid = sid
        self.subject = subject
        self.queue = queue
        #: Messages that it still gets; None: no bound.
        self.left: int | None = None


class _Stream:
    def __init__(self, subjects: list[str]) -> None:
        self.subjects = subjects
        self.created = f"{time.time_ns()}"
        self.last = 0
        #: Subject, payload, time, by sequence.
        self.messages: dict[int, tuple[str, bytes, int]] = {}
        #: Sequence of each message id.
        self.seq_of: dict[str, int] = {}
        self.consumers: dict[str, _Consumer] = {}

    def info(self, asked: dict[str, Any]) -> dict[str, Any]:
        wanted = asked.get("subjects_filter", "")
        names = Counter(subject for subject, _, _ in self.messages.values() if matches(wanted, subject))
        first = next(iter(self.messages), self.last + 1)
        state = {"first_seq": first, "last_seq": self.last, "messages": len(self.messages), "subjects": names}
        return {"created": self.created, "state": state}

    def message(self, asked: dict[str, Any]) -> dict[str, Any]:
        """By its sequence; the last of a subject, or the first of one from a sequence on."""
        pattern = asked.get("last_by_subj") or asked.get("next_by_subj") or ">"
        found = [seq for seq, (subject, _, _) in self.messages.items() if matches(pattern, subject)]
        if "last_by_subj" in asked:
            found = found[-1:]
        elif "next_by_subj" in asked:
            found = [seq for seq in found if seq >= asked["seq"]]
        else:
            found = [seq for seq in found if seq == asked["seq"]]
        if not found:
            return {"error": {"code": 404, "err_code": NO_MESSAGE, "description": "no message found"}}
        subject, payload, at_ns = self.messages[found[0]]
        at = datetime.fromtimestamp(at_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        time_ns = f"{at}.{at_ns % 10**9:09}Z"
        data = base64.b64encode(payload).decode()
        return {"message": {"subject": subject, "seq": found[0], "data": data, "time": time_ns}}


class _Consumer:
    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.inbox: str = config["deliver_subject"]
        self.filters: list[str] = config["filter_subjects"]
        self.count = 0


class _Server:
    def __init__(self, payload_bytes_max: int) -> None:
        self.payload_bytes_max = payload_bytes_max
        self.subscriptions: dict[tuple[_Connection, bytes], _Subscription] = {}
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count(1)
        self._draw = random.Random(1)

    def take(self, subject: str, reply: str, headers: bytes, payload: bytes) -> bool:
        """A message that somebody published; whether anybody heard it."""
        if subject.startswith(f"{API}."):
            verb, _, name = subject.removeprefix(f"{API}.").rpartition(".")
            self._answer(verb, name, reply, orjson.loads(payload) if payload else {})
            return True
        heard = self.deliver(subject, reply, headers, payload)
        for name, stream in self._streams.items():
            if any(matches(pattern, subject) for pattern in stream.subjects):
                ack = {"stream": name, **self._store(name, stream, subject, headers, payload)}
                self.deliver(reply, "", b"", orjson.dumps(ack))
                return True
        return heard

    def deliver(self, subject: str, reply: str, headers: bytes, payload: bytes) -> bool:
        """Whether anybody is subscribed."""
        heard = [each for each in self.subscriptions.values() if matches(each.subject, subject)]
        groups: dict[tuple[str, str], list[_Subscription]] = {}
        for each in heard:
            key = (each.subject, each.queue) if each.queue else ("", f"{id(each)}")
            groups.setdefault(key, []).append(each)
        for members in groups.values():
            chosen = self._draw.choice(members)
            chosen.connection.message(chosen, subject, reply, headers, payload)
        return bool(heard)

    # --- streams ----------------------------------------------------------------------------------------------

    def _store(
        self, name: str, stream: _Stream, subject: str, headers: bytes, payload: bytes
    ) -> dict[str, Any]:
        last = stream.last
        if int(header(headers, "Nats-Expected-Last-Sequence") or last) != last:
            told = f"wrong last sequence: {last}"
            return {"error": {"code": 400, "err_code": WRONG_LAST_SEQUENCE, "description": told}}
        message_id = header(headers, "Nats-Msg-Id")
        if message_id in stream.seq_of:
            return {"seq": stream.seq_of[message_id], "duplicate": True}
        seq = stream.last = last + 1
        stream.messages[seq] = subject, payload, time.time_ns()
        if message_id:
            stream.seq_of[message_id] = seq
        for consumer in stream.consumers.values():
            self._push(name, stream, consumer, seq)
        return {"seq": seq}

    def _push(self, name: str, stream: _Stream, consumer: _Consumer, seq: int) -> None:
        subject, payload, at_ns = stream.messages[seq]
        if any(matches(pattern, subject) for pattern in consumer.filters):
            consumer.count += 1
            place = f"$JS.ACK.{name}.{consumer.name}.1.{seq}.{consumer.count}.{at_ns}.0"
            for each in self.subscriptions.values():
                if each.subject == consumer.inbox:
                    each.connection.message(each, subject, place, b"", payload)

    def _answer(self, verb: str, name: str, reply: str, asked: dict[str, Any]) -> None:
        """One question to JetStream's own API."""
        if verb == "STREAM.CREATE":
            self._streams.setdefault(name, _Stream(asked["subjects"]))
        if verb.startswith("CONSUMER.DELETE."):
            if stream := self._streams.get(verb.rpartition(".")[2]):
                stream.consumers.pop(name, None)
            return
        found = self._streams.get(name)
        if found is None:
            told = {"code": 404, "err_code": NO_STREAM, "description": "stream not found"}
            self.deliver(reply, "", b"", orjson.dumps({"error": told}))
            return
        if verb == "CONSUMER.CREATE":
            consumer = _Consumer(f"c{next(self._numbers)}", asked["config"])
            found.consumers[consumer.name] = consumer
            wanted = [seq for seq in found.messages if seq >= asked["config"]["opt_start_seq"]]
            self.deliver(reply, "", b"", orjson.dumps({"name": consumer.name, "num_pending": len(wanted)}))
            for seq in wanted:
                self._push(name, found, consumer, seq)
            return
        if verb == "STREAM.DELETE":
            del self._streams[name]
        if verb == "STREAM.PURGE":
            for seq in [seq for seq in found.messages if matches(asked["filter"], found.messages[seq][0])]:
                del found.messages[seq]
        answer = found.message(asked) if verb == "STREAM.MSG.GET" else found.info(asked)
        self.deliver(reply, "", b"", orjson.dumps(answer))


class _Connection(asyncio.Protocol):
    def __init__(self, server: _Server) -> None:
        self._server = server
        self._received = bytearray()
        self._transport: Any = None
        #: Takes the payload that the last line announced, of so many bytes.
        self._payload: tuple[int, Callable[[bytes], None]] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        told = {
            "server_id": "S",
            "version": "2.11.0",
            "proto": 1,
            "host": HOST,
            "port": PORT,
            "headers": True,
            "jetstream": True,
            "max_payload": self._server.payload_bytes_max,
            "client_id": next(self._server._numbers),
        }
        self._send(b"INFO " + orjson.dumps(told))

    def connection_lost(self, exc: BaseException | None) -> None:
        for key in [key for key in self._server.subscriptions if key[0] is self]:
            del self._server.subscriptions[key]

    def data_received(self, data: bytes) -> None:
        self._received += data
        while True:
            if self._payload is not None:
                size, take = self._payload
                if len(self._received) < size + len(_END):
                    return
                content = bytes(self._received[:size])
                del self._received[: size + len(_END)]
                self._payload = None
                take(content)
            elif (end := self._received.find(_END)) < 0:
                return
            else:
                line = bytes(self._received[:end])
                del self._received[: end + len(_END)]
                self._line(line)

    def _line(self, line: bytes) -> None:
        operation, *words = re.split(rb"[ \t]+", line)
        subscriptions = self._server.subscriptions
        if operation == b"PING":
            self._send(b"PONG")
        elif operation == b"SUB":
            queue = words[1].decode() if len(words) == 3 and words[1] else ""
            subscriptions[self, words[-1]] = _Subscription(self, words[-1], words[0].decode(), queue)
        elif operation == b"UNSUB":
            left = int(words[1]) if len(words) == 2 and words[1] else 0
            if not left:
                subscriptions.pop((self, words[0]), None)
            elif (self, words[0]) in subscriptions:
                subscriptions[self, words[0]].left = left
        elif operation in (b"PUB", b"HPUB"):
            sizes = 1 if operation == b"PUB" else 2
            reply = words[1].decode() if len(words) == sizes + 2 else ""
            head = int(words[-2]) if operation == b"HPUB" else 0
            subject = words[0].decode()
            self._payload = int(words[-1]), lambda content: self._publish(subject, reply, head, content)
        else:
            assert operation in (b"CONNECT", b"PONG"), line

    def _publish(self, subject: str, reply: str, head: int, content: bytes) -> None:
        assert len(content) <= self._server.payload_bytes_max, "the client lets none of these out"
        if not self._server.take(subject, reply, content[:head], content[head:]) and reply:
            self._server.deliver(reply, "", b"NATS/1.0 503\r\n\r\n", b"")

    def message(self, to: _Subscription, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        words = [subject.encode(), to.sid, *([reply.encode()] if reply else [])]
        if headers:
            words.append(b"%d" % len(headers))
        words.append(b"%d" % (len(headers) + len(payload)))
        operation = b"HMSG " if headers else b"MSG "
        self._send(operation + b" ".join(words) + _END + headers + payload)
        if to.left is not None:
            to.left -= 1
            if not to.left:
                self._server.subscriptions.pop((self, to.sid), None)

    def _send(self, line: bytes) -> None:
        self._transport.write(line + _END)
