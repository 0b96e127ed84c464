"""Answers to requests that a gateway takes to the engine: the adapter tells the gateway's frontend where the engine is,
and hears from it what the engine says.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping

import msgspec

from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.tokens import AnswerRelayed, EngineNamed
from halfmoon.workers.adapters.actions import AskEngine
from halfmoon.workers.adapters.engines.completion import (
    EngineRefused,
    Heard,
    read_answer,
    read_line,
    refusal_of,
)

_WHOLE_BYTES_MAX = 16 << 20
#: An answer that ends so is as good as one that stops: the client gets the engine's own word.
_STOPS = frozenset(("tool_calls", "function_call"))


class RelayedAnswers:
    """`endpoint`: host and port of the engine, as gateways reach it; `headers`: those that it wants."""

    def __init__(
        self, bus: Bus, worker_id: str, endpoint: str, headers: Mapping[str, str], vocabulary: int
    ) -> None:
        self._bus, self._worker_id = bus, worker_id
        self._endpoint, self._headers = endpoint, dict(headers)
        self._vocabulary = vocabulary
        #: By frontend and order.
        self._parts: dict[tuple[str, str], asyncio.Queue[AnswerRelayed]] = {}

    async def open(self) -> None:
        """Raises BusError."""
        heard = subjects.relay(self._worker_id, "*")
        await self._bus.subscribe(heard, AnswerRelayed, self._on_part, author="frontend_id")

    def _on_part(self, part: AnswerRelayed) -> None:
        parts = self._parts.get((part.frontend_id, part.order_id))
        if parts is not None:
            parts.put_nowait(part)

    async def answer(self, ask: AskEngine) -> AsyncIterator[Heard]:
        """Names the engine, and yields its answer as it comes. Raises EngineRefused."""
        mark = ask.gateway_of, ask.order_id
        parts = self._parts[mark] = asyncio.Queue()
        try:
            endpoint = await _address(self._endpoint)
            named = EngineNamed(
                worker_id=self._worker_id,
                request_id=ask.request_id,
                order_id=ask.order_id,
                endpoint=endpoint,
                fields=msgspec.json.encode(ask.body).decode(),
                headers=self._headers,
            )
            self._bus.publish_soon(subjects.forward(ask.gateway_of, self._worker_id), named)
            async for heard in _read(parts, self._vocabulary):
                yield heard
        finally:
            del self._parts[mark]


async def _address(endpoint: str) -> str:
    """The same with the name's address: gateways look up no names. Raises EngineRefused."""
    host, _, port = endpoint.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as problem:
        raise EngineRefused(f"{endpoint}: {problem}", retryable=True) from None
    address = str(found[0][4][0])
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


async def _read(parts: asyncio.Queue[AnswerRelayed], vocabulary: int) -> AsyncIterator[Heard]:
    """Raises EngineRefused."""
    unread, number = b"", 0
    while True:
        part = await parts.get()
        if part.number != number:
            raise EngineRefused("a part of the engine's answer was lost", retryable=False)
        number += 1
        unread += part.body
        if part.status == 200 and part.streamed:
            *lines, unread = unread.split(b"\n")
            for line in lines:
                if (heard := read_line(line, vocabulary)) is not None:
                    yield _stopped(heard)
                    if heard.finish_reason:
                        return
            if part.ended:
                raise EngineRefused("the engine's answer ended early", retryable=False)
        elif len(unread) > _WHOLE_BYTES_MAX:
            raise EngineRefused(
                f"the engine's answer is longer than {_WHOLE_BYTES_MAX} bytes", retryable=False
            )
        elif part.ended and part.status == 200:
            yield _stopped(read_answer(unread, vocabulary))._replace(whole=True)
            return
        elif part.ended:
            raise refusal_of(part.status, unread)


def _stopped(heard: Heard) -> Heard:
    return heard._replace(finish_reason="stop") if heard.finish_reason in _STOPS else heard
