"""How often a stream writes to its connection: its head goes with the first event, its end with the last."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from frontend_double import MODEL, Cluster, Double

from halfmoon.bus.edge.http_server import Connection
from halfmoon.schemas.events import RequestArrived
from tests.in_process import End

pytestmark = pytest.mark.pure

TEXT = " one two three four five six seven eight"
CHAT = [{"role": "user", "content": "Hello"}]
ASKS = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/messages", {"model": MODEL, "messages": CHAT}),
    ("/v1/responses", {"model": MODEL, "input": "Hello"}),
]
#: The field that bounds an answer, where it is not OpenAI's first.
LIMITS = {"/v1/responses": "max_output_tokens"}


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is written to connections of the HTTP edge, a send each."""
    sent: list[bytes] = []
    write = End.write

    def record(end: End, data: Any) -> None:
        if isinstance(end.get_protocol(), Connection):
            sent.append(bytes(data))
        write(end, data)

    monkeypatch.setattr(End, "write", record)
    return sent


class Stepwise:
    """Workers that give one token, and each further one when the client has seen the one before it."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.seen = [asyncio.Event() for _ in range(count - 1)]
        self._count = count
        cluster.double.script = self._answer

    async def _answer(self, double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        ids = double.tokenizer.encode(TEXT)
        assert len(ids) == 8, ids
        for index in range(self._count):
            if index:
                await self.seen[index - 1].wait()
            reason = "length" if index == self._count - 1 else ""
            await double.deliver(double.delivery(arrived, f"{seq}-0", index, [ids[index]], reason))


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(("path", "body"), ASKS, ids=[path for path, _ in ASKS])
def test_a_stream_is_a_send_a_token(run: Any, sends: list[bytes], path: str, body: Any, count: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        workers = Stepwise(cluster, count)
        ask = {**body, LIMITS.get(path, "max_tokens"): count, "stream": True}
        async with cluster.http.post(cluster.url + path, json=ask) as response:
            assert response.status == 200
            told = b""
            for word, seen in zip(TEXT.split(), workers.seen, strict=False):
                while word.encode() not in told:  # the head and each event come at once
                    told += await response.content.readline()
                seen.set()
            told += await response.read()
        assert TEXT.split()[count - 1].encode() in told
        assert len(sends) == count, sends
        assert sends[0].startswith(b"HTTP/1.1 200 OK\r\n")
        assert sends[-1].endswith(b"\r\n0\r\n\r\n")

    run(scenario)
