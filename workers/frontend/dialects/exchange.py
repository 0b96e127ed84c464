"""One request of another dialect over HTTP, from its body to the last byte of its answer.

A stream's status line waits for the first token, as everywhere: a refusal is a status, not an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from aiohttp import web

from halfmoon.bus.edge.http_server import JSON, Handler, client_request_id, read_body, refusal
from halfmoon.bus.telemetry.tracing import checked_traceparent
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest
from halfmoon.workers.frontend.edges.http_access import check_json
from halfmoon.workers.frontend.edges.http_answer import UnreadEvents, send_events
from halfmoon.workers.frontend.open_request import OpenRequest, Piece
from halfmoon.workers.frontend.registry import RequestRegistry
from halfmoon.workers.frontend.tenants import ApiKeys, in_the_name_of
from halfmoon.workers.model.text.tokenizer import Tokenizer


class Form(Protocol):
    """How one request is answered: by `body`, or by `first_event`, `event` a piece, and `error_event` if it fails."""

    def __init__(self, request: OpenRequest, tokenizer: Tokenizer, model: str, payload: bytes) -> None: ...

    @staticmethod
    def error(error: ApiError) -> bytes: ...

    def error_event(self, error: ApiError) -> bytes: ...

    def body(self) -> bytes: ...

    def first_event(self) -> bytes: ...

    def event(self, piece: Piece) -> bytes: ...


class Dialect(NamedTuple):
    """`parse` raises ApiError. `fields`: by a chat's name of a field, its name here."""

    parse: Callable[[bytes], ApiRequest]
    form: type[Form]
    fields: dict[str, str]

    def named(self, error: ApiError) -> ApiError:
        """The same, with its field as it is called here."""
        name = error.param or ""
        if name in self.fields:
            error.param = self.fields[name]
            if error.message.startswith(f"{name}:") or error.message.startswith(f"{name} "):
                error.message = error.param + error.message.removeprefix(name)
        return error


class Exchanges:
    """`generate` answers one request. It raises ApiError for what is refused before the request is open."""

    def __init__(self, registry: RequestRegistry, keys: ApiKeys) -> None:
        self._registry = registry
        self._keys = keys

    def handler(self, dialect: Dialect) -> Handler:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self.generate(request, dialect)

        return handle

    def authorize(self, request: web.BaseRequest) -> str:
        """The tenant of the key, which Anthropic's clients send in a header of their own. Raises ApiError 401."""
        key = request.headers.get("x-api-key")
        header = request.headers.get("authorization", "")
        return self._keys.tenant_of(header or (f"Bearer {key}" if key else ""))

    async def generate(self, request: web.BaseRequest, dialect: Dialect) -> web.StreamResponse:
        began_ns = time.monotonic_ns()
        traceparent = checked_traceparent(request.headers.get("traceparent", ""))
        named = client_request_id(request)
        listener = _Listener(request.transport)
        try:
            tenant = self.authorize(request)
            await self._registry.admit()
            check_json(request)
            payload = await read_body(request, self._registry.config.http_limits)
            ask = in_the_name_of(dialect.parse(payload), tenant)
            opened = await self._registry.open(ask, listener, traceparent=traceparent)
        except ApiError as error:
            self._registry.intake.refused(error, began_ns, chat=True, traceparent=traceparent)
            raise dialect.named(error) from None
        listener.request = opened
        tokenizer, model = self._registry.tokenizer, self._registry.config.model
        listener.form = form = dialect.form(opened, tokenizer, model, payload)
        headers = {"x-request-id": named or opened.request_id}
        if traceparent:
            headers["traceparent"] = traceparent

        def refused(error: ApiError) -> web.Response:
            return refusal(error, headers, form.error(error))

        try:
            if ask.answer.stream:
                pause_s = self._registry.config.sse_comment_s
                return await send_events(
                    request, listener, headers, pause_s, refused=refused, error_event=form.error_event
                )
            await listener.wait()
            if listener.error is not None:
                return refused(listener.error)
            return web.Response(body=form.body(), content_type=JSON, headers=headers)
        except (asyncio.CancelledError, ConnectionError):
            self._registry.cancel(opened)
            raise


class _Listener(UnreadEvents):
    """The listener of one request, in its form."""

    form: Form | None = None
    request: OpenRequest | None = None
    _begun = False

    @property
    def placed(self) -> bool:
        return self.request is not None and bool(self.request.order_id)

    def on_piece(self, request: OpenRequest, piece: Piece) -> None:
        assert self.form is not None
        if request.ask.answer.stream:
            # A form numbers its events: they are made in the order in which they are sent.
            if not self._begun:
                self._begun = True
                self._send(self.form.first_event())
            self._send(self.form.event(piece))
        self.ended = bool(piece.finish_reason)
        self._wake()

    def on_error(self, request: OpenRequest, error: ApiError) -> None:
        self.error = error
        self.ended = True
        self._wake()
