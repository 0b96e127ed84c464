"""JetStream's own API: the one place that asks it about streams, stored messages and consumers.

Source: NATS' JetStream wire API; its answers are JSON, with `error` where it refuses.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from nats.aio.client import Client
from nats.errors import Error as NatsError

from halfmoon.bus.errors import PeerUnreachable, StreamRefused

API = "$JS.API"
ANSWER_S = 5.0
#: JetStream's codes of errors (`StreamRefused.code`).
NO_PEERS = 10005
NO_MESSAGE = 10037
STREAM_NAME_IN_USE = 10058
NO_STREAM = 10059


class StreamInfo(NamedTuple):
    """The place of a stream; `created` names this stream among those of its name."""

    created: str
    first_seq: int
    last_seq: int
    messages: int


class StoredMessage(NamedTuple):
    """One message of a stream; `time` as the server writes it (RFC 3339)."""

    seq: int
    time: str
    payload: bytes
    subject: str


class JetStream:
    """Questions to JetStream over one connection.

    Each method raises `StreamRefused` when JetStream answers with an error, `PeerUnreachable` when it does not answer.
    """

    def __init__(self, nc: Client) -> None:
        self._nc = nc

    async def ask(
        self, verb: str, question: Mapping[str, object] | None = None, *, timeout_s: float = ANSWER_S
    ) -> dict[str, Any]:
        """The answer to `verb`, as in `STREAM.INFO.EVENTS`."""
        payload = orjson.dumps(question) if question else b""
        try:
            reply = await self._nc.request(f"{API}.{verb}", payload, timeout=timeout_s)
        except (NatsError, TimeoutError) as problem:
            reason = str(problem) or type(problem).__name__
            raise PeerUnreachable(f"JetStream does not answer: {reason}") from problem
        answer: dict[str, Any] = orjson.loads(reply.data)
        if error := answer.get("error"):
            stream = verb.split(".")[2] if verb.startswith("CONSUMER.") else verb.rpartition(".")[2]
            raise StreamRefused(
                f"{stream}: {error.get('description', 'refused')}",
                code=int(error.get("err_code", 0)),
                status=int(error.get("code", 0)),
            )
        return answer

    async def info(self, stream: str) -> StreamInfo:
        """The place of the stream now."""
        answer = await self.ask(f"STREAM.INFO.{stream}")
        state = answer["state"]
        return StreamInfo(
            created=str(answer["created"]),
            first_seq=int(state["first_seq"]),
            last_seq=int(state["last_seq"]),
            messages=int(state["messages"]),
        )

    async def message(self, stream: str, **which: object) -> StoredMessage | None:
        """One stored message; None where there is none.

        `which`: `seq=`, `last_by_subj=`, or `seq=` with `next_by_subj=` for the first of a subject from there on.
        """
        try:
            answer = await self.ask(f"STREAM.MSG.GET.{stream}", which)
        except StreamRefused as problem:
            if problem.code == NO_MESSAGE:
                return None
            raise
        message = answer["message"]
        payload = base64.b64decode(message.get("data", ""))
        return StoredMessage(
            seq=int(message["seq"]),
            time=str(message["time"]),
            payload=payload,
            subject=str(message["subject"]),
        )
