"""Subscriptions that are heard within the reading of the socket, on a real server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from halfmoon.bus.client import DirectClient, header, status
from halfmoon.bus.embedded import EmbeddedServer

BLOCK = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1016\r\nNats-Last-Stream:1024\r\n\r\n"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[DirectClient]:
    server = EmbeddedServer.start(tmp_path)
    made = DirectClient()
    await made.connect(server.url)
    yield made
    await made.close()
    server.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(3):
        while not condition():
            await asyncio.sleep(0.002)


def test_headers_as_they_come() -> None:
    assert (header(BLOCK, "Nats-Last-Consumer"), header(BLOCK, "Nats-Last-Stream")) == ("1016", "1024")
    assert header(BLOCK, "Nats-Last") == header(None, "X") == ""
    assert (status(BLOCK), status(b"NATS/1.0 503\r\n\r\n")) == ("100", "503")
    assert status(b"NATS/1.0\r\nA: b\r\n\r\n") == status(None) == ""


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


async def test_other_subscriptions_go_the_librarys_way(client: DirectClient) -> None:
    done = asyncio.Event()

    async def hear(msg: object) -> None:
        await asyncio.sleep(0)
        done.set()

    await client.subscribe("b", cb=hear)
    await client.publish("b", b"")
    async with asyncio.timeout(2):
        await done.wait()


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
