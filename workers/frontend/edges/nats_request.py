"""One request of the NATS edge: pieces become messages to its reply subject."""

from __future__ import annotations

import time
from typing import Protocol

from nats.aio.msg import Msg

from halfmoon.bus.telemetry.tracing import checked_traceparent
from halfmoon.bus.wire import reply_subject
from halfmoon.schemas import subjects
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest
from halfmoon.workers.frontend.edges.nats_service import ServiceEndpoint
from halfmoon.workers.frontend.open_request import OpenRequest, Piece
from halfmoon.workers.frontend.openai.answers import generate_answer, generate_chunk
from halfmoon.workers.frontend.registry import RequestRegistry
from halfmoon.workers.frontend.tenants import inboxes_of

#: A request that is no stream may name a subject that its client listens to for as long as it wants the
#: answer.
ALIVE_HEADER = "Halfmoon-Alive"
#: What the server's protocol and our headers may add to a payload.
_ENVELOPE_BYTES = 1024


def client_traceparent(msg: Msg) -> str:
    """As the client sent it; "" when there is none, or it is malformed."""
    return checked_traceparent((msg.headers or {}).get("traceparent", ""))


def one_choice(ask: ApiRequest) -> ApiRequest:
    """Raises ApiError where several answers are asked for: a reply subject gets one."""
    for param, several in (("n", ask.n > 1), ("prompt", bool(ask.more_prompts)), ("echo", ask.answer.echo)):
        if several:
            message = f"{param}: over NATS a request has one prompt and one choice, which is not echoed; ask over HTTP"
            raise ApiError(400, message, param=param, code="unsupported")
    return ask


def answer_too_large(answer: bytes, ask: str) -> ApiError:
    """`ask`: how the client gets it all the same."""
    message = f"the answer is {len(answer)} bytes, more than the NATS server's max_payload: ask {ask}"
    return ApiError(413, message, code="answer_too_large")


class Edge(Protocol):
    """The part of the edge that a request needs."""

    payload_bytes_max: int
    registry: RequestRegistry
    inboxes: tuple[str, ...]

    def send(
        self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None
    ) -> None: ...

    def send_last(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> None: ...

    def probe(self, request: OpenRequest) -> str: ...

    def closed(self, request: OpenRequest) -> None: ...

    def answer_error(
        self, endpoint: ServiceEndpoint, started_ns: int, reply: str, error: ApiError
    ) -> None: ...


class NatsListener:
    """Called by the registry; sends through its edge."""

    __slots__ = (
        "_alive",
        "_edge",
        "_headers",
        "_stream",
        "endpoint",
        "reply",
        "request",
        "sent_ns",
        "started_ns",
        "traceparent",
    )

    def __init__(
        self, edge: Edge, endpoint: ServiceEndpoint, started_ns: int, msg: Msg, ask: ApiRequest
    ) -> None:
        headers = msg.headers or {}
        alive = headers.get(ALIVE_HEADER, "")
        inboxes = inboxes_of(subjects.tenant_of(msg.subject), edge.inboxes)
        self._edge = edge
        self._stream = ask.answer.stream
        self._alive = msg.reply if ask.answer.stream else reply_subject(alive, inboxes)
        self.traceparent = client_traceparent(msg)
        self._headers = {"traceparent": self.traceparent} if self.traceparent else None
        self.endpoint = endpoint
        self.started_ns = started_ns
        self.reply = msg.reply
        self.request: OpenRequest | None = None
        self.sent_ns = started_ns

    def on_piece(self, request: OpenRequest, piece: Piece) -> None:
        edge = self._edge
        if self._stream and (piece.text or piece.tokens):
            self.sent_ns = time.monotonic_ns()
            chunk = generate_chunk(request, piece, edge.registry.tokenizer)
            edge.send(self.reply, chunk, edge.probe(request), self._headers)
        if not piece.finish_reason:
            return
        edge.closed(request)
        try:
            answer = self._answer(request)
        except ApiError as error:
            edge.answer_error(self.endpoint, self.started_ns, self.reply, error)
            return
        self.endpoint.finished(self.started_ns)
        edge.send_last(self.reply, answer, self._headers)

    def on_error(self, request: OpenRequest, error: ApiError) -> None:
        self._edge.closed(request)
        self._edge.answer_error(self.endpoint, self.started_ns, self.reply, error)

    def keep_alive(self) -> None:
        """Nothing was sent for a while: make sure that somebody waits."""
        if self.request is not None and self._alive:
            payload = (
                generate_chunk(self.request, None, self._edge.registry.tokenizer) if self._stream else b""
            )
            self._edge.send(self._alive, payload, self._edge.probe(self.request), self._headers)

    def _answer(self, request: OpenRequest) -> bytes:
        """The last message. Raises ApiError 413 when the server would not carry it."""
        edge = self._edge
        limit = edge.payload_bytes_max - _ENVELOPE_BYTES
        tokenizer, model = edge.registry.tokenizer, edge.registry.config.model
        answer = generate_answer(request, tokenizer, model)
        if len(answer) > limit and self._stream:  # the chunks had them
            answer = generate_answer(request, tokenizer, model, with_logprobs=False)
        if len(answer) > limit:
            raise answer_too_large(answer, "over HTTP" if request.prompt_logprobs else "with stream")
        return answer
