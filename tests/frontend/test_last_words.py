"""The nats-server dies, and the frontend is back on it before its client: the client hears the end all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import orjson
import pytest
from frontend_double import ANSWER, cluster

from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.frontend import last_words
from halfmoon.workers.frontend.last_words import GRACE_S, KEPT_BYTES_MAX, KEPT_S, LastWords
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.eventually import BOUND_S, SCENARIO_S, eventually


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """One that a test may kill."""
    made = EmbeddedServer.start(tmp_path / "nats")
    yield made
    made.stop()


@pytest.mark.realtime
@pytest.mark.parametrize("stream", [True, False])
def test_an_end_that_comes_while_the_client_is_away_is_told_when_it_is_back(
    stream: bool, server: EmbeddedServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client is back when this test lets it.
    monkeypatch.setattr(last_words, "GRACE_S", BOUND_S)
    monkeypatch.setattr(last_words, "KEPT_S", BOUND_S)
    started, go_on, used = asyncio.Event(), asyncio.Event(), asyncio.Event()
    unheard: list[str] = []
    missed = LastWords.unheard

    def noted(words: LastWords, name: str) -> None:
        unheard.append(name)
        missed(words, name)

    monkeypatch.setattr(LastWords, "unheard", noted)
    after_reconnect = Bus._after_reconnect

    def later(bus: Bus) -> None:
        # The library calls it a round trip after the connection has begun to carry messages, of which one may say that
        # the client is away.
        tasks.append(asyncio.create_task(once_used(bus)))

    async def once_used(bus: Bus) -> None:
        await used.wait()
        after_reconnect(bus)

    tasks: list[asyncio.Task[None]] = []
    monkeypatch.setattr(Bus, "_after_reconnect", later)

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        ids, reason = double.output(arrived)
        await double.place(arrived, f"{seq}-0")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, ids[:4]))
        started.set()
        await go_on.wait()
        await double.deliver(double.delivery(arrived, f"{seq}-0", 4, ids[4:], reason))

    async def scenario() -> None:
        async with cluster(server.url, tokenizer) as made:
            made.double.script = script
            client = await nats.connect(server.url, allow_reconnect=False)
            inbox = client.new_inbox()
            await client.subscribe(inbox)
            body = {"prompt": "Once", "max_tokens": 200, "stream": stream}
            await client.publish("halfmoon.v1.generate", orjson.dumps(body), reply=inbox)
            await eventually(started.is_set, "the first tokens are delivered")
            server.process.kill()
            server.launch_again()
            await asyncio.to_thread(server.wait)
            buses = made.frontend.registry.bus, made.double.bus
            await eventually(lambda: all(bus.nc.is_connected for bus in buses), "both are connected again")
            if stream:  # the client is missed, and known to be on its way
                await eventually(lambda: unheard, "the server says that nobody listens")
                assert len(made.frontend.registry.requests) == 1
            used.set()
            await asyncio.gather(*tasks)
            go_on.set()
            ended = "the end was told, and nobody heard it"
            await eventually(lambda: any(name.startswith("end-") for name in unheard), ended)
            again = await nats.connect(server.url)
            answers = await again.subscribe(inbox)
            while True:
                message = orjson.loads((await answers.next_msg(timeout=BOUND_S)).data)
                if message.get("done"):
                    break
                assert "error" not in message, message
            assert message["text"] == ANSWER
            await again.close()
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), SCENARIO_S))


def test_ends_are_kept_for_a_while_and_not_without_bound() -> None:
    now_s = 1_000.0
    sent: list[tuple[str, str]] = []

    def send(subject: str, _: bytes, reply: str, __: Any) -> None:
        sent.append((subject, reply))

    words = LastWords(send, probe="p", clock=lambda: now_s)
    words.say("early", b"x")
    now_s += KEPT_S + 1
    words.say("late", b"x")
    assert sent == [("early", ""), ("late", "")], "who is there is not asked for without need"
    sent.clear()
    words.lost()
    now_s += GRACE_S + KEPT_S
    assert words.in_grace, "nobody can be back yet"
    words.reconnected()
    assert sent == [("late", "p.end-1")]
    assert words.in_grace
    now_s += GRACE_S + 1
    words.unheard("end-1")
    assert not words.in_grace
    for number in range(20):
        words.say(f"large-{number}", bytes(KEPT_BYTES_MAX // 10))
    sent.clear()
    words.reconnected()
    assert [subject for subject, _ in sent] == [f"large-{number}" for number in range(10, 20)]
