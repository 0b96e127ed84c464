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

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.frontend.last_words import GRACE_S, KEPT_BYTES_MAX, KEPT_S, LastWords
from halfmoon.workers.model.text.tokenizer import Tokenizer

#: The client is away for so long after the server is back.
AWAY_S = 2.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """One that a test may kill."""
    made = EmbeddedServer.start(tmp_path / "nats")
    yield made
    made.stop()


@pytest.mark.parametrize("stream", [True, False])
def test_an_end_that_comes_while_the_client_is_away_is_told_when_it_is_back(
    stream: bool, server: EmbeddedServer, tokenizer: Tokenizer
) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

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
            client = await nats.connect(server.url, reconnect_time_wait=AWAY_S)
            inbox = client.new_inbox()
            answers = await client.subscribe(inbox)
            body = {"prompt": "Once", "max_tokens": 200, "stream": stream}
            await client.publish("halfmoon.v1.generate", orjson.dumps(body), reply=inbox)
            await asyncio.wait_for(started.wait(), 10)
            server.process.kill()
            server.launch_again()
            await asyncio.to_thread(server.wait)
            while not (made.frontend.registry.bus.nc.is_connected and made.double.bus.nc.is_connected):
                await asyncio.sleep(0.02)
            # Long enough for its client to be missed, were it not known to be on its way.
            await asyncio.sleep(0.6)
            assert not client.is_connected, "it is away still"
            go_on.set()
            while True:
                message = orjson.loads((await answers.next_msg(timeout=10)).data)
                if message.get("done"):
                    break
                assert "error" not in message, message
            assert message["text"] == ANSWER
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 40))


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
