"""Subscriptions that are heard within the reading of the socket, on a real server."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.errors import MaxPayloadError, ProtocolError

from halfmoon.bus.client import DirectClient, envelope_bytes, header, header_lines, status
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.bus.errors import SubjectInvalid
from halfmoon.bus.publisher import Publisher
from halfmoon.bus.wire import CLIENT_INBOXES, LINE_BYTES_MAX, WireParser, reply_subject
from halfmoon.workers.frontend.edges.nats_service import settled
from tests.eventually import BOUND_S, eventually
from tests.nats_in_process import in_process

BLOCK = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1016\r\nNats-Last-Stream:1024\r\n\r\n"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[DirectClient]:
    server = EmbeddedServer.start(tmp_path)
    made = DirectClient()
    await made.connect(server.url)
    yield made
    await made.close()
    server.stop()


Test = Callable[..., Coroutine[Any, Any, None]]


def without_a_server(test: Test) -> Callable[..., None]:
    """A test of a `client`, whose server is in the process."""

    async def of_url(url: str, **given: Any) -> None:
        made = DirectClient()
        await made.connect(url)
        try:
            await test(client=made, **given)
        finally:
            await made.close()

    return in_process(of_url, like=test, without="client")


async def until(condition: Callable[[], bool]) -> None:
    await eventually(condition, "what the test waits for", every_s=0.002)


@pytest.mark.pure
def test_headers_as_they_come() -> None:
    assert (header(BLOCK, "Nats-Last-Consumer"), header(BLOCK, "Nats-Last-Stream")) == ("1016", "1024")
    assert header(BLOCK, "Nats-Last") == header(None, "X") == ""
    assert (status(BLOCK), status(b"NATS/1.0 503\r\n\r\n")) == ("100", "503")
    assert status(b"NATS/1.0\r\nA: b\r\n\r\n") == status(None) == ""


@pytest.mark.pure
@without_a_server
async def test_what_is_heard_comes_in_order_with_all_its_parts(client: DirectClient) -> None:
    heard: list[tuple[bytes, bytes, bytes, bytes | None]] = []
    await client.subscribe_raw("a.*", lambda *parts: heard.append(parts))
    for number in range(100):
        await client.publish(f"a.{number}", b"%d" % number, reply="r")
    await client.publish("a.h", b"", headers={"K": "v"})
    await until(lambda: len(heard) > 100)
    assert [(subject, payload) for subject, _, payload, _ in heard[:100]] == [
        (b"a.%d" % number, b"%d" % number) for number in range(100)
    ]
    assert {reply for _, reply, _, _ in heard[:100]} == {b"r"}
    assert header(heard[100][3], "K") == "v"


@pytest.mark.pure
@without_a_server
async def test_a_handler_that_fails_is_said_and_the_connection_goes_on(
    client: DirectClient, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []

    def hear(_: bytes, __: bytes, payload: bytes, ___: bytes | None) -> None:
        if payload == b"bad":
            raise KeyError(payload)
        heard.append(payload)

    await client.subscribe_raw("a", hear)
    with caplog.at_level(logging.ERROR):
        for payload in (b"1", b"bad", b"2"):
            await client.publish("a", payload)
        await until(lambda: b"2" in heard)
    assert heard == [b"1", b"2"]
    assert "a message on a was not taken" in caplog.text
    assert client.is_connected


@pytest.mark.pure
@without_a_server
async def test_after_unsubscribing_nothing_is_heard_and_nothing_is_kept(client: DirectClient) -> None:
    heard: list[bytes] = []
    subscription = await client.subscribe_raw("a", lambda _, __, payload, ___: heard.append(payload))
    others: list[bytes] = []
    await client.subscribe_raw("a", lambda _, __, payload, ___: others.append(payload))
    await client.publish("a", b"1")
    await until(lambda: others == [b"1"])
    await subscription.unsubscribe()
    await client.publish("a", b"2")
    await until(lambda: others == [b"1", b"2"])
    assert heard == [b"1"]
    assert len(client._raw_handlers) == 1


@pytest.mark.pure
@without_a_server
async def test_other_subscriptions_go_the_librarys_way(client: DirectClient) -> None:
    done = asyncio.Event()

    async def hear(msg: object) -> None:
        await asyncio.sleep(0)
        done.set()

    await client.subscribe("b", cb=hear)
    await client.publish("b", b"")
    async with asyncio.timeout(BOUND_S):
        await done.wait()


@pytest.mark.pure
@without_a_server
async def test_whoever_publishes_while_the_connection_is_being_lost_is_not_told(
    client: DirectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drain() -> None:
        raise ConnectionResetError

    assert client._flusher_task is not None
    client._flusher_task.cancel()  # as its end at the error of the socket, before anybody else has seen that
    await asyncio.wait({client._flusher_task})
    monkeypatch.setattr(client._transport, "drain", drain)
    await client.publish("a", b"1")
    await client.subscribe_raw("b", lambda *_: None)
    assert client.is_connected


#: By hand: nats-py would not send them. Each is taken by the server from any client.
HOSTILE = {
    "a reply that is no text": b"PUB a \xff\xfe 1\r\nx\r\n",
    "a form feed in the reply": b"PUB a r\x0cq 1\r\nx\r\n",
    "a vertical tab in the reply": b"PUB a r\x0bq 1\r\nx\r\n",
    "a line of its greatest length": b"PUB a " + b"r" * 4070 + b" 1\r\nx\r\n",
    "headers too short for their first line": b"HPUB a r 2 3\r\nABx\r\n",
    "headers that end with their first line": b"HPUB a r 8 9\r\nNATS/1.0x\r\n",
    "a status that is no text": b"HPUB a r 18 19\r\nNATS/1.0 \xff\xfe\xfd\r\n\r\n\r\nx\r\n",
    "a description that is no text": b"HPUB a r 22 23\r\nNATS/1.0 503 \xff\xfe\xfd\r\n\r\n\r\nx\r\n",
    "headers that are none": b"HPUB a r 20 21\r\nNATS/1.0\r\n\xff\xfe\xfd\xfa\x00\x01\r\n\r\nx\r\n",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_message_ends_the_reading_of_whoever_hears_it(
    client: DirectClient, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []
    raw: list[bytes] = []

    async def hear(msg: Msg) -> None:
        heard.append(msg.data)

    await client.subscribe("a", cb=hear)
    await client.subscribe_raw("a", lambda _, __, payload, ___: raw.append(payload))
    await settled(client)
    assert client.connected_url is not None
    _, writer = await asyncio.open_connection(client.connected_url.hostname, client.connected_url.port)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + HOSTILE[name] + b"PUB a 4\r\ngood\r\n")
    await until(lambda: b"good" in heard)
    assert raw[-1] == b"good"
    assert client.stats["reconnects"] == 0
    assert "Traceback" not in caplog.text
    writer.close()


@pytest.mark.pure
@pytest.mark.parametrize(
    "subject", ["", " ", "a b", "a\r\nPUB b 0\r\n", "a.*", ">", "a..b", ".a", "a.", "a\x00", "a" * 2000]
)
@without_a_server
async def test_nothing_malformed_leaves(client: DirectClient, subject: str) -> None:
    with pytest.raises(SubjectInvalid):
        client.send(subject, b"x")
    with pytest.raises(SubjectInvalid):
        await client.publish(subject, b"x")
    if subject:
        with pytest.raises(SubjectInvalid):
            client.send("a", b"x", subject)
    with pytest.raises(SubjectInvalid):
        Publisher(client).submit(subject, b"x", message_id="m")
    await client.flush()
    assert client.stats["reconnects"] == 0


async def test_headers_count_in_what_the_server_takes(client: DirectClient) -> None:
    headers = header_lines({"K": "v" * 1000})
    room = client.max_payload - envelope_bytes(headers)
    heard: list[int] = []
    await client.subscribe_raw("a", lambda _, __, payload, ___: heard.append(len(payload)))
    assert client.send("a", bytes(room), headers=headers)
    await until(lambda: bool(heard))
    with pytest.raises(MaxPayloadError):
        client.send("a", bytes(room + 1), headers=headers)
    assert heard == [room]


async def test_what_the_server_complains_of_ends_no_process(client: DirectClient) -> None:
    """It closes the connection at some of its errors: we come back."""
    assert client._transport is not None
    client._transport.write(b"NONSENSE\r\n")
    await until(lambda: client.stats["reconnects"] == 1)
    await until(lambda: client.is_connected)
    await client.flush()


@pytest.mark.pure
def test_who_may_be_answered() -> None:
    inboxes = ("_INBOX.abc.1", "halfmoon.inbox.decode-0.x.1")
    assert [reply_subject(inbox) for inbox in inboxes] == list(inboxes)
    assert [reply_subject(inbox, CLIENT_INBOXES) for inbox in inboxes] == [inboxes[0], ""]
    others = [
        "",
        "halfmoon.events.up.WorkerLeft",
        "$JS.API.STREAM.PURGE.EVENTS",
        "_INBOX",
        "_INBOX.",
        "_INBOX.>",
    ]
    assert [reply_subject(other) for other in [*others, b"_INBOX.\xff", "_INBOX.a b"]] == [""] * 8


@pytest.mark.pure
async def test_no_message_overtakes_what_came_before_it_by_the_library_s_way() -> None:
    heard: list[bytes] = []
    client, reader = DirectClient(), asyncio.StreamReader()
    client._status, client._reader = DirectClient.CONNECTED, reader
    client._raw_handlers[1] = lambda _, __, payload, ___: heard.append(payload)

    def come(word: bytes, before: bytes = b"") -> None:
        client._feed(reader, reader.feed_data, before + b"MSG a 1 1\r\n" + word + b"\r\n")

    come(b"a")
    assert heard == [b"a"], "at once"
    come(b"b", before=b"+OK\r\n")
    come(b"c")
    assert heard == [b"a"]
    await client._ps.parse(await reader.read(1000))
    come(b"d")
    assert heard == [b"a", b"b", b"c", b"d"]
    client._ps.parsing = True
    come(b"e")
    client._ps.parsing = False
    assert heard[-1] == b"d"
    await client._ps.parse(await reader.read(1000))
    assert heard[-1] == b"e"
    for name, other in (("_status", DirectClient.RECONNECTING), ("_reader", asyncio.StreamReader())):
        setattr(client, name, other)
        come(b"f")
        assert heard[-1] == b"e", "of a connection that is gone"
        client._status = DirectClient.CONNECTED
        await reader.read(1000)


@pytest.mark.pure
async def test_the_parser_takes_what_comes_however_it_is_cut() -> None:
    """And refuses what no server sends, by a ProtocolError: then the connection is made anew."""
    taken: list[object] = []
    at_once: list[int] = []

    class Taker:
        def __init__(self, *heard: int) -> None:
            self.hears = heard.__contains__

        async def _process_msg(self, *parts: object) -> None:
            taken.append(parts)

        async def _process_ping(self) -> None:
            taken.append("PING")

        def deliver(self, sid: int, *parts: object) -> None:
            assert self.hears(sid)
            at_once.append(sid)
            taken.append((sid, *parts))

    stream = (
        b"MSG a.b 7 2\r\nhi\r\nPING\r\nHMSG a 8 r\x0c 12 13\r\nNATS/1.0\r\n\r\nx\r\n+OK\r\nMSG a 7 0\r\n\r\n"
    )
    whole = [
        (7, b"a.b", b"", b"hi", None),
        "PING",
        (8, b"a", b"r\x0c", b"x", b"NATS/1.0\r\n\r\n"),
        (7, b"a", b"", b"", None),
    ]
    for step in (1, 2, 3, 7, 1000):
        parser = WireParser(Taker())
        for start in range(0, len(stream), step):
            await parser.parse(stream[start : start + step])
        assert taken == whole
        taken.clear()
    for step, heard in itertools.product((1, 2, 3, 7, 1000), ((), (7,), (8,), (7, 8))):
        parser = WireParser(Taker(*heard))
        for start in range(0, len(stream), step):
            if rest := parser.take(stream[start : start + step]):
                await parser.parse(rest)
        assert taken == whole
        # In larger pieces, what is behind a line that is no message is not.
        assert at_once == [sid for sid in (7, 8, 7) if sid in heard] or step > 1
        taken.clear()
        at_once.clear()
    for line in (
        b"MSG a 1\r\n",
        b"MSG a b c d 1\r\n",
        b"MSG a x 1\r\n",
        b"HMSG a 1 9 8\r\n",
        b"HMSG a 1 -1 8\r\n",
        b"PUB a 1\r\n",
        b"\r\n",
        b"MSG " + bytes(LINE_BYTES_MAX),
    ):
        parser = WireParser(Taker(1))
        assert parser.take(line) == line
        with pytest.raises(ProtocolError):
            await parser.parse(line)
