"""The clients of `halfmoon bench`, and their record of each request; here over NATS, in `bench_http` over HTTP.

Every answer is streamed. Times are of the monotonic clock, taken where a message is parsed. No client tries again:
failures are counted.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import orjson
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from halfmoon.bus.client import DirectClient, header, status
from halfmoon.bus.config import BusConfig
from halfmoon.bus.errors import BusUnreachable
from halfmoon.bus.tasks import within
from halfmoon.cli.bench.workload import Planned
from halfmoon.cli.client.api_client import SILENCE_S_MAX
from halfmoon.cli.options import OptionInvalid
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import RejectReason

REJECTIONS = frozenset(get_args(RejectReason))
CONNECT_S = 10.0


@dataclass(slots=True, kw_only=True)
class Record:
    """The course of one request. Times in ns of the monotonic clock, 0: it did not come to that."""

    planned: Planned
    #: When it should have been sent, and when it was.
    due_ns: int
    sent_ns: int = 0
    #: When each message with tokens came.
    heard_ns: list[int] = field(default_factory=list)
    ended_ns: int = 0
    #: "finished", "rejected", "failed"; "": still open.
    outcome: str = ""
    #: Reason of a rejection; status and code of a failure, or the error of the connection.
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    #: The whole answer (NATS), or the last chunk with its measures (HTTP).
    answer: dict[str, Any] = field(default_factory=dict)

    def refused(self, code: int, error: dict[str, Any]) -> None:
        """The cluster's own error."""
        kind = error.get("code") or error.get("type") or "error"
        rejected = kind in REJECTIONS
        self.end("rejected" if rejected else "failed", kind if rejected else f"{code} {kind}")

    def end(self, outcome: str, reason: str = "") -> None:
        self.ended_ns = time.monotonic_ns()
        self.outcome, self.reason = outcome, reason

    def used(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage["prompt_tokens"]
        self.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or usage
        self.cached_tokens = details.get("cached_tokens", 0)


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is served; `context` in tokens, prompt and answer together. `vocab_size` is 0 where a server does
    not tell it, as vLLM and SGLang do not.
    """

    name: str
    context: int
    vocab_size: int

    @classmethod
    def read(cls, listed: dict[str, Any]) -> Model:
        """Raises OptionInvalid when the answer is no list of models with their context."""
        try:
            model = listed["data"][0]
            return cls(model["id"], model["max_model_len"], model.get("vocab_size", 0))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise OptionInvalid(
                f"no list of models with max_model_len comes from there: {str(listed)[:200]}"
            ) from None


class Target(Protocol):
    """`open` raises BusUnreachable or OSError when nobody answers. `ask` fills the record and raises nothing."""

    where: str

    async def open(self) -> Model: ...

    async def ask(self, record: Record, body: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...


class NatsTarget:
    """The NATS API. One subscription for all answers: a request's inbox is a name under it."""

    def __init__(self, config: BusConfig) -> None:
        self.where = config.url
        self._config = config
        self._nc = DirectClient()
        self._numbers = itertools.count()
        self._open: dict[str, _NatsAnswer] = {}
        self._inbox = ""
        self._run = f"bench-{uuid.uuid4().hex[:12]}"

    async def open(self) -> Model:
        async def quiet(_: Exception) -> None:
            # An error comes back as an exception.
            return

        options = {
            **self._config.options(),
            "max_reconnect_attempts": 3,
            "name": "halfmoon-bench",
            "error_cb": quiet,
        }
        try:
            await within(self._config.connect_timeout_s, self._nc.connect(**options))
            self._inbox = self._nc.new_inbox()
            await self._nc.subscribe_raw(f"{self._inbox}.*", self._hear)
            reply = await self._nc.request(f"{subjects.API}.models", b"", timeout=CONNECT_S)
        except (NatsError, OSError, TimeoutError) as problem:
            reason = str(problem) or type(problem).__name__
            raise BusUnreachable(f"no frontend answers over NATS at {self.where}: {reason}") from None
        return Model.read(orjson.loads(reply.data))

    async def close(self) -> None:
        if not self._nc.is_closed:
            await self._nc.close()

    async def ask(self, record: Record, body: dict[str, Any]) -> None:
        name = str(next(self._numbers))
        request_id = f"{self._run}-{name}"
        answer = self._open[name] = _NatsAnswer(record)
        payload = orjson.dumps({**body, "stream": True, "request_id": request_id})
        record.sent_ns = time.monotonic_ns()
        try:
            if not self._nc.send(f"{subjects.API}.generate", payload, f"{self._inbox}.{name}"):
                record.end("failed", "no connection to NATS")
                return
            await answer.until_ended()
        except MaxPayloadError:
            record.end("failed", "larger than the NATS server's max_payload")
        finally:
            del self._open[name]
            if not record.outcome:  # we are cancelled: nobody waits for the rest of it
                self._nc.send(f"{subjects.API}.cancel", orjson.dumps({"id": request_id}))

    def _hear(self, subject: bytes, _: bytes, payload: bytes, headers: bytes | None) -> None:
        answer = self._open.get(subject.rpartition(b".")[2].decode())
        if answer is not None and not answer.record.outcome:
            answer.hear(payload, headers)


class _NatsAnswer:
    """The messages of one answer."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._heard_ns = time.monotonic_ns()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def until_ended(self) -> None:
        """A frontend sends something on every open stream, if only that it is alive: a silence is an end."""
        while not self._ended.done():
            left_s = SILENCE_S_MAX - (time.monotonic_ns() - self._heard_ns) / 1e9
            if left_s <= 0:
                self.record.end("failed", f"nothing was heard for {SILENCE_S_MAX:.0f} s")
                return
            await asyncio.wait([self._ended], timeout=left_s)

    def hear(self, payload: bytes, headers: bytes | None) -> None:
        self._heard_ns = time.monotonic_ns()
        record = self.record
        if status(headers) == "503":
            record.end("failed", "503 no frontend")
            self._ended.set_result(None)
            return
        content = orjson.loads(payload)
        if "error" in content:
            code = header(headers, "Nats-Service-Error-Code")
            record.refused(int(code or 500), content["error"])
        elif content.get("done"):
            record.used(content["usage"])
            record.answer = content
            record.end("finished")
        else:
            if content["token_ids"]:
                record.heard_ns.append(self._heard_ns)
            return
        self._ended.set_result(None)
