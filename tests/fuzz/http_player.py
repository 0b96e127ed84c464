"""Bytes on the socket of a real frontend, with a real nats-server and scripted workers behind it: for the HTTP targets.

Many connections are under way at once, so that one that runs into a deadline holds nobody up: what `play` returns is
what came of an earlier input. After each input comes a request that ends its connection, so that a whole input is
answered at once, and one that is cut short when its deadline has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "frontend"))

from frontend_double import MODEL, Cluster, cluster

from halfmoon.bus.edge.http_server import HttpLimits
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.workers.frontend.page import feed
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.eventually import Late, eventually
from tests.fuzz.frame import Found, Play

UNDER_WAY = 32
ANSWER_S = 60.0
LAST = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
#: Endless streams are left after their first bytes.
PAGE_STREAM = b"event: view"
READ_BYTES_MAX = 8 << 20
LIMITS = HttpLimits(head_s=0.5, body_s=0.5, idle_s=2.0, write_s=2.0)


class Player:
    """`play` and `finish` raise Found."""

    def __init__(self, made: Cluster) -> None:
        self._made = made
        host, _, port = made.url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._running: set[asyncio.Task[str]] = set()
        self._outcomes: deque[str] = deque()

    async def play(self, content: bytes) -> str:
        self._running.add(asyncio.create_task(self._converse(content)))
        await asyncio.sleep(0)
        while len(self._running) >= UNDER_WAY:
            await self._collect()
        return self._outcomes.popleft() if self._outcomes else "under way"

    async def _collect(self) -> None:
        done, self._running = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        self._outcomes.extend(task.result() for task in done)

    async def finish(self) -> None:
        """All that was begun has ended, nothing is left, and the frontend serves as before."""
        while self._running:
            await self._collect()
        registry, room = self._made.frontend.registry, self._made.frontend._http._server.room  # type: ignore[union-attr]
        try:
            await eventually(lambda: not registry.requests and not room.connections, "nothing is left")
        except Late:
            left = f"left behind: {list(registry.requests)}, {len(room.connections)} connections"
            raise Found(left) from None
        body = b'{"prompt": "Once", "max_tokens": 1}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        outcome = await self._converse(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        if outcome != "200":
            raise Found(f"afterwards a request is answered with {outcome}")

    async def _converse(self, content: bytes) -> str:
        received = bytearray()
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            async with asyncio.timeout(ANSWER_S):
                half = len(content) // 2 if len(content) % 2 else len(content)
                for part in (content[:half], content[half:] + LAST):
                    writer.write(part)
                    await asyncio.sleep(0)
                while len(received) < READ_BYTES_MAX and PAGE_STREAM not in received:
                    chunk = await reader.read(1 << 16)
                    if not chunk:
                        break
                    received += chunk
        except TimeoutError:
            raise Found(f"neither answered nor closed: {bytes(received[-300:])!r}", content) from None
        except ConnectionError:
            received += b""  # what had come before is judged
        finally:
            writer.transport.abort()
        try:
            return " ".join(sorted(set(judged(bytes(received))))) or "closed"
        except (ValueError, KeyError) as problem:
            raise Found(f"{problem!r} in {bytes(received[:600])!r}", content) from None


def judged(received: bytes) -> Iterator[str]:
    """The statuses of all answers. Raises ValueError for one that must not be."""
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        line, *fields = head.split(b"\r\n")
        if (matched := re.fullmatch(rb"HTTP/\d\.\d+ (\d{3}) [^\r\n]*", line)) is None:
            raise ValueError("no status line")
        status = int(matched[1])
        if status == 100:
            continue
        headers = {
            name.lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)
        }
        body, received = _body(headers, received)
        if status >= 500 and status != 503:
            raise ValueError(f"status {status}")
        if status >= 400 and body:
            error: dict[str, Any] = json.loads(body)["error"]
            if not {"message", "type", "param", "code"} <= set(error):
                raise ValueError("not the API's form")
        if b'"code":"internal"' in body:
            raise ValueError("an internal error in a stream")
        yield str(status)


def _body(headers: dict[bytes, bytes], received: bytes) -> tuple[bytes, bytes]:
    """The body of an answer, and what comes after it."""
    if received.startswith(b"HTTP/"):  # after HEAD, or a status without a body
        return b"", received
    if headers.get(b"transfer-encoding") == b"chunked":
        body = b""
        while True:
            size, _, rest = received.partition(b"\r\n")
            length = int(size or b"0", 16)
            body, received = body + rest[:length], rest[length + 2 :]
            if not length:
                return body, received
    if (length_field := headers.get(b"content-length")) is None:
        return received, b""  # HTTP/1.0: up to the end
    length = int(length_field)
    return received[:length], received[length:]


@contextlib.contextmanager
def playing_http() -> Iterator[Play]:
    """For a target's `playing`."""
    feed.EVERY_S, feed.SILENT_S = 0.05, 0.2  # no conductor answers here: the page soon says so
    with tempfile.TemporaryDirectory() as place, asyncio.Runner() as runner:
        server = EmbeddedServer.start(Path(place) / "nats")
        stack = contextlib.AsyncExitStack()
        try:
            tokenizer = Tokenizer.load(MODEL)
            made = runner.run(stack.enter_async_context(cluster(server.url, tokenizer, http_limits=LIMITS)))
            made.double.events = deque(maxlen=100)  # type: ignore[assignment]
            player = Player(made)
            yield lambda content: runner.run(player.play(content))
            runner.run(player.finish())
            runner.run(stack.aclose())
        finally:
            server.stop()
