"""`halfmoon bench` over HTTP, as OpenAI's clients speak it. See `bench_clients`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import orjson

from halfmoon.bus.errors import BusUnreachable
from halfmoon.cli.bench.clients import CONNECT_S, Model, Record


class HttpTarget:
    """`/v1/completions`, streamed. `key`: sent as `Authorization: Bearer`."""

    def __init__(self, url: str, key: str = "") -> None:
        self.where = url.rstrip("/")
        self._key = key
        self._session: aiohttp.ClientSession | None = None
        self._model = ""

    async def open(self) -> Model:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=timeout, read_bufsize=1 << 20
        )
        try:
            async with asyncio.timeout(CONNECT_S), self._session.get(f"{self.where}/v1/models") as response:
                model = Model.read(orjson.loads(await response.read()))
        except (aiohttp.ClientError, orjson.JSONDecodeError, TimeoutError, ValueError) as problem:
            reason = str(problem) or type(problem).__name__
            raise BusUnreachable(f"no frontend answers over HTTP at {self.where}: {reason}") from None
        self._model = model.name
        return model

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, record: Record, body: dict[str, Any]) -> None:
        assert self._session is not None
        # Other servers want a request to name its model.
        more = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        payload = orjson.dumps({**body, **more})
        headers = {"content-type": "application/json"}
        record.sent_ns = time.monotonic_ns()
        try:
            async with self._session.post(
                f"{self.where}/v1/completions", data=payload, headers=headers
            ) as response:
                if response.status != 200:
                    record.refused(response.status, _error_in(await response.read()))
                    return
                async for line in response.content:
                    if line.startswith(b"data: "):
                        self._read(record, line[6:].strip())
                    if record.outcome:
                        return
            record.end("failed", "the stream ended early")
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            record.end("failed", type(problem).__name__)

    def _read(self, record: Record, event: bytes) -> None:
        if event == b"[DONE]":
            record.end("finished")
            return
        content = orjson.loads(event)
        if "error" in content:
            record.refused(500, content["error"])
            return
        if content.get("usage"):
            record.used(content["usage"])
        for choice in content["choices"]:
            if choice["text"]:
                record.heard_ns.append(time.monotonic_ns())
            if choice["finish_reason"]:
                record.answer = content


def _error_in(body: bytes) -> dict[str, Any]:
    """The `error` object of a refusal; {} where the answer is not ours."""
    try:
        error = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
