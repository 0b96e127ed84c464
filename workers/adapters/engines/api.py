"""An engine's HTTP API, as much of it as an adapter asks for: what the OpenAI-compatible servers of vLLM and SGLang
have in common. Each has a class of its own (`vllm`, `sglang`).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from halfmoon.schemas.roles import WorkerRole
from halfmoon.workers.adapters.engines.completion import (
    EngineRefused,
    Heard,
    read_answer,
    read_line,
    refusal_of,
)
from halfmoon.workers.adapters.engines.words import EngineWords

#: Connecting, and answers that need no computing.
CONNECT_S, LOOK_S = 5.0, 5.0
#: For what follows the last token of an answer.
_END_S = 1.0
_BODY_BYTES_MAX = 16 << 20


class EngineAway(Exception):
    """It does not answer."""


class EngineUnfit(ValueError):
    """It answers, and cannot be adapted; the text names the option that it is about."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """An engine's word on itself."""

    model: str
    context_tokens: int
    #: Its cache, in its own blocks.
    cache_blocks: int
    block_tokens: int
    #: Address at which it publishes its KV events and gives past ones, by its own report; "": it names none.
    events: str = ""
    replay: str = ""
    topic: str = ""
    #: Blocks that it keeps, with those that are in host memory alone; 0: those of its cache.
    blocks_kept: int = 0
    #: Most requests of a batch, and most tokens of an iteration; 0: it does not say.
    batch_max: int = 0
    token_budget: int = 0
    #: What it was started for; None: it does not say, or any.
    role: WorkerRole | None = None
    #: It does one half of each request.
    halved: bool = False
    #: Where decode engines meet it for the KV of a prompt; 0: nowhere.
    bootstrap_port: int = 0
    #: It keeps blocks of prompts, and tells of them.
    caches: bool = True

    @property
    def cache_tokens(self) -> int:
        return self.cache_blocks * self.block_tokens


class EngineApi(ABC):
    """`open` first. `key`: sent as `Authorization: Bearer`. `reached_at`: host and port for gateways, and for engines
    that get KV from it; "": those of `url`.
    """

    #: Options that have it publish KV events.
    events_options: ClassVar[str]
    #: For a refusal, what lets it drop its cache by request.
    reset_needs: ClassVar[str]
    #: Where it says that it is there, without computing anything.
    _alive_path: ClassVar[str]

    def __init__(self, url: str, *, key: str = "", reached_at: str = "") -> None:
        self.url = url.rstrip("/")
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.reached_at = reached_at
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Raises ValueError: it is no URL."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is no URL like http://127.0.0.1:8000")
        if not self.reached_at:
            self.reached_at = f"{self.host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self.headers,
            timeout=timeout,
            read_bufsize=1 << 20,
        )

    @property
    def host(self) -> str:
        """The host of `url` as it stands in an address: one of IPv6 in brackets."""
        host = urlsplit(self.url).hostname or ""
        return f"[{host}]" if ":" in host else host

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @abstractmethod
    async def facts(self, model: str) -> EngineFacts:
        """`model`: the name that it must serve; "": the first that it does. Raises EngineAway, EngineUnfit."""

    @abstractmethod
    def words_of(self, facts: EngineFacts) -> EngineWords:
        """The kind of request that it takes."""

    @abstractmethod
    async def cache_percent(self) -> float:
        """How full its cache is by requests, in percent. Raises EngineAway, EngineUnfit: it does not say."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """It drops the blocks that no request has. Raises EngineAway, EngineUnfit: it lets nobody do that."""

    async def _served(self, model: str) -> tuple[str, int]:
        """The model's name there, and the longest context. Raises EngineAway, EngineUnfit."""
        said = await self._json("/v1/models")
        try:
            served = {str(one["id"]): int(one.get("max_model_len") or 0) for one in said["data"]}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EngineUnfit(f"--url {self.url}: /v1/models is no list of models") from None
        name = model or next(iter(served), "")
        if name not in served:
            raise EngineUnfit(f"--engine-model {model}: {self.url} serves {', '.join(served) or 'no model'}")
        if served[name] < 2:
            raise EngineUnfit(f"--url {self.url}: /v1/models does not tell max_model_len")
        return name, served[name]

    async def tokens_of(self, model: str, text: str) -> list[int] | None:
        """The engine's tokens of a text; None: it gives none. Raises EngineAway."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            said = await self._json("/tokenize", body)
        except EngineUnfit:
            return None
        tokens = said.get("tokens") if isinstance(said, dict) else None
        return tokens if isinstance(tokens, list) else None

    async def healthy(self) -> None:
        """Raises EngineAway."""
        try:
            await self._read(self._alive_path, None)
        except EngineUnfit as problem:
            raise EngineAway(str(problem)) from None

    async def complete(self, body: dict[str, Any], vocabulary: int) -> AsyncIterator[Heard]:
        """The answer as it comes; where `body` wants no stream, as a whole. Raises EngineRefused, EngineAway."""
        assert self._session is not None
        try:
            raw, headers = msgspec.json.encode(body), {"content-type": "application/json"}
            async with self._session.post(
                f"{self.url}/v1/completions", data=raw, headers=headers
            ) as response:
                if response.status != 200:
                    said = await response.content.read(_BODY_BYTES_MAX)
                    raise refusal_of(response.status, said, response.headers.get("retry-after", ""))
                if not body["stream"]:
                    yield read_answer(await _whole(response), vocabulary)
                    return
                async for line in response.content:
                    heard = read_line(line, vocabulary)
                    if heard is not None:
                        yield heard
                        if heard.finish_reason:
                            await _ended(response)
                            return
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            raise EngineAway(f"{self.url}: {str(problem) or type(problem).__name__}") from None
        raise EngineRefused(f"{self.url}: the stream ended early", retryable=True)

    async def _json(self, path: str, body: Any = None) -> Any:
        raw = await self._read(path, body)
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            raise EngineUnfit(f"--url {self.url}: {path} is no JSON") from None

    async def _read(self, path: str, body: Any) -> bytes:
        """Raises EngineAway, EngineUnfit: it answers, but not with 200."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=LOOK_S)
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(
                method, f"{self.url}{path}", json=body, timeout=timeout
            ) as response:
                raw = await _whole(response)
                if response.status != 200:
                    raise EngineUnfit(f"--url {self.url}: {path} answers {response.status}")
                return raw
        except (aiohttp.ClientError, OSError, TimeoutError) as problem:
            raise EngineAway(f"{self.url}: {str(problem) or type(problem).__name__}") from None


async def _ended(response: aiohttp.ClientResponse) -> None:
    """Returns at the end of a stream whose tokens are all there. A connection that was read to its end takes the next
    request; others are closed.
    """
    with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, TimeoutError):
        async with asyncio.timeout(_END_S):
            while await response.content.readany():
                pass


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """The body, or its first `_BODY_BYTES_MAX` bytes."""
    raw = await response.content.read(_BODY_BYTES_MAX)
    while chunk := await response.content.read(_BODY_BYTES_MAX - len(raw)):
        raw += chunk
    return raw
