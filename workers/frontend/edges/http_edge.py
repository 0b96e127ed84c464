"""The frontend's HTTP edge: OpenAI's endpoints, and what operators look at.

No framework between the socket and the handlers but aiohttp's server: a table of paths, one coroutine a
request. A stream's status line is held back until its first token, so that a refusal is a status and not an
event. A client that disconnects cancels its handler, and so its request, everywhere; one that does not read its
stream is disconnected. aiohttp sets TCP_NODELAY on every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from halfmoon.bus.edge.http_server import (
    JSON,
    Handler,
    HttpServer,
    client_request_id,
    read_body,
    refusal,
)
from halfmoon.bus.telemetry.metrics import CONTENT_TYPE, exposition
from halfmoon.bus.telemetry.tracing import checked_traceparent
from halfmoon.bus.telemetry.version import VERSION
from halfmoon.schemas.api.bodies import DetokenizeBody, TokenizeBody
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.messages import parse_count_tokens, parse_messages
from halfmoon.schemas.api.requests import ApiRequest, decode_body, parse_chat, parse_completion
from halfmoon.schemas.api.responses import parse_responses
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.workers.frontend.cluster_status import ClusterStatus
from halfmoon.workers.frontend.config import names
from halfmoon.workers.frontend.dialects import openapi
from halfmoon.workers.frontend.dialects.exchange import Dialect, Exchanges
from halfmoon.workers.frontend.dialects.messages import MessagesForm
from halfmoon.workers.frontend.dialects.responses import ResponsesForm
from halfmoon.workers.frontend.edges.http_access import Origins, check_json
from halfmoon.workers.frontend.edges.http_answer import EventStream, HttpAnswer, send_events
from halfmoon.workers.frontend.page.assets import Assets
from halfmoon.workers.frontend.page.feed import PageFeed
from halfmoon.workers.frontend.registry import RequestRegistry
from halfmoon.workers.frontend.tenants import ApiKeys, in_the_name_of

#: Paths for which there is always room: the process is looked at when it is full, above all.
URGENT = frozenset(("/health", "/ready", "/metrics", "/version"))
#: What follows is a model's name, which may have slashes.
_MODEL = "/v1/models/"
_MESSAGES = "/v1/messages"
#: The fields that a chat calls otherwise are those that are found wrong behind the body's own checks.
ANTHROPICS = Dialect(
    parse_messages,
    MessagesForm,
    {"response_format.json_schema": "output_config.format", "reasoning_effort": "output_config.effort"},
)
RESPONSES = Dialect(
    parse_responses,
    ResponsesForm,
    {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema": "text.format",
    },
)


class HttpEdge:
    """`start` listens, `stop` closes (after the registry, so that open streams end well)."""

    def __init__(self, registry: RequestRegistry, status: ClusterStatus) -> None:
        self._registry = registry
        self._config = registry.config
        self._status = status
        self._keys = ApiKeys(registry.config.api_keys)
        config = registry.config
        self._origins = Origins(
            config.http_host, names(config.http_allowed_hosts), names(config.allowed_origins)
        )
        self._limits = registry.config.http_limits
        self._server = HttpServer(
            self._answer,
            self._limits,
            urgent=URGENT,
            on_refusal=registry.metrics.failed,
            headers_for=self._origins.cors_headers,
            error_body=_error_body,
        )
        self._others = others = Exchanges(registry, self._keys)
        #: Where it listens, once started.
        self.url = ""
        self._handlers: dict[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/v1/messages": ("POST", others.handler(ANTHROPICS)),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/v1/responses": ("POST", others.handler(RESPONSES)),
            "/load": ("GET", self._load),
            "/server_info": ("GET", self._server_info),
            "/openapi.json": ("GET", self._openapi),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/version": ("GET", self._version),
            "/status": ("GET", self._show_status),
            "/page/stream": ("GET", self._page_stream),
            "/page/explain": ("GET", self._page_explain),
        }
        self._feed = PageFeed(registry.bus, registry.config, registry.log_health)
        assets = Assets()
        self._handlers.update(dict.fromkeys(assets.paths, ("GET", assets.answer)))

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        self.url = await self._server.start(
            self._config.http_host, self._config.http_port, self._config.http_tls
        )

    async def stop(self) -> None:
        await self._feed.close()
        await self._server.stop()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Raises ApiError."""
        self._origins.check(request)
        if (allowed := self._origins.preflight(request)) is not None:
            return allowed
        known = self._handlers.get(request.path)
        if known is None and request.path.startswith(_MODEL):
            known = "GET", self._model
        if known is None:
            raise ApiError(404, f"there is no {request.path[:200]}", code="unknown_url")
        method, handler = known
        if request.method != method and not (method == "GET" and request.method == "HEAD"):
            raise ApiError(405, f"{request.path} wants {method}", code="method_not_allowed")
        return await handler(request)

    # --- generating -----------------------------------------------------------------------------------------

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, parse_chat)

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, parse_completion)

    async def _generate(
        self, request: web.BaseRequest, read: Callable[[bytes], ApiRequest]
    ) -> web.StreamResponse:
        began_ns = time.monotonic_ns()
        traceparent = checked_traceparent(request.headers.get("traceparent", ""))
        named = client_request_id(request)
        answer = HttpAnswer(self._registry, request.transport)
        try:
            tenant = self._authorize(request)
            await self._registry.admit()
            ask = in_the_name_of(read(await self._body(request)), tenant)
            default = None if ask.chat else self._config.completion_max_tokens_default
            await answer.open(ask, traceparent=traceparent, max_tokens_default=default)
        except ApiError as error:
            self._registry.intake.refused(error, began_ns, chat=read is parse_chat, traceparent=traceparent)
            raise
        headers = {"x-request-id": named or answer.request_id}
        if traceparent:
            headers["traceparent"] = traceparent
        try:
            if ask.answer.stream:
                return await send_events(
                    request,
                    answer,
                    headers,
                    self._config.sse_comment_s,
                    refused=lambda error: refusal(error, headers),
                    error_event=lambda error: b"data: " + error.body() + b"\n\n",
                )
            await answer.wait()
            if answer.error is not None:
                return refusal(answer.error, headers)
            scored = ask.sampling.prompt_logprobs >= 0  # a long prompt's are written beside the loop
            body = await asyncio.to_thread(answer.body) if scored else answer.body()
            return web.Response(body=body, content_type=JSON, headers=headers)
        except (asyncio.CancelledError, ConnectionError):
            answer.cancel()
            raise

    def _authorize(self, request: web.BaseRequest) -> str:
        """The tenant of the key. Raises ApiError 401."""
        return self._keys.tenant_of(request.headers.get("authorization", ""))

    async def _body(self, request: web.BaseRequest) -> bytes:
        """Raises ApiError 400, 408, 413, 415, 417."""
        check_json(request)
        return await read_body(request, self._limits)

    # --- the rest -------------------------------------------------------------------------------------------

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        self._others.authorize(request)  # clients of all dialects ask
        await self._status.read()  # what the cluster can hold now
        return _json(self._registry.prompts.models(self._registry.started_at_s))

    async def _model(self, request: web.BaseRequest) -> web.StreamResponse:
        self._others.authorize(request)
        name = request.path.removeprefix(_MODEL)
        await self._status.read()
        return _json(self._registry.prompts.model(name, self._registry.started_at_s))

    async def _tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        self._authorize(request)
        return _json(
            await self._registry.prompts.tokenize(decode_body(await self._body(request), TokenizeBody))
        )

    async def _detokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        self._authorize(request)
        body = decode_body(await self._body(request), DetokenizeBody)
        return _json(self._registry.prompts.detokenize(body))

    async def _count_tokens(self, request: web.BaseRequest) -> web.StreamResponse:
        self._others.authorize(request)
        ask = parse_count_tokens(await self._body(request))
        self._registry.prompts.check_model(ask.model)
        ids = await self._registry.prompts.encode(ask.prompt)
        counted = {"input_tokens": len(ids), "context_management": {"original_input_tokens": len(ids)}}
        return _json(counted)

    async def _load(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json({"server_load": len(self._registry.requests)})

    async def _server_info(self, request: web.BaseRequest) -> web.StreamResponse:
        """How it is set up, without secrets."""
        self._authorize(request)
        return _json({"version": VERSION, **self._registry.about()})

    async def _openapi(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=openapi.document(), content_type=JSON)

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json({"status": "ok"})

    async def _ready(self, _: web.BaseRequest) -> web.StreamResponse:
        """200 when a request would be served: not stopping, the log takes facts, workers of both pools seen."""
        if self._registry.draining:
            raise ApiError(503, "this frontend is stopping", code="stopping")
        if (refusal := self._registry.log_health.refusal()) is not None:
            raise refusal
        status = await self._status.read()
        if not status["ready"]:
            why = status["problem"] or "no conductor answers"
            raise ApiError(503, why, code="not_ready", retry_after_ns=SECOND_NS)
        return _json({"status": "ready"})

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response(
            body=exposition(self._registry.metrics.registry), headers={"content-type": CONTENT_TYPE}
        )

    async def _version(self, _: web.BaseRequest) -> web.StreamResponse:
        await self._status.read()
        # Only what was found out: no conductor may answer, and the version is known all the same.
        inexact = self._status.inexact()
        return _json({"version": VERSION, **({"exact_numerics_not_held": inexact} if inexact else {})})

    async def _show_status(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json(await self._status.read())

    async def _page_stream(self, request: web.BaseRequest) -> web.StreamResponse:
        self._authorize_all(request)
        response = EventStream()
        async with contextlib.aclosing(self._feed.watch()) as views:
            first = await anext(views)  # a refusal is a status
            await response.prepare(request)
            await response.write(b"retry: 1000\n\n" + first)
            async for view in views:
                await response.write(view)
        return response

    async def _page_explain(self, request: web.BaseRequest) -> web.StreamResponse:
        self._authorize_all(request)
        body = await self._feed.explain(request.query.get("request", ""))
        return web.Response(body=body, content_type=JSON, headers={"cache-control": "no-store"})

    def _authorize_all(self, request: web.BaseRequest) -> None:
        """The page shows requests of every tenant. Raises ApiError 401, 403."""
        self._keys.check_sees_all(request.headers.get("authorization", ""))


def _error_body(request: web.BaseRequest, error: ApiError) -> bytes:
    """In the form of the dialect that the path is of."""
    anthropics = request.path == _MESSAGES or request.path.startswith(_MESSAGES + "/")
    return MessagesForm.error(error) if anthropics else error.body()


def _json(content: Any) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type=JSON)
