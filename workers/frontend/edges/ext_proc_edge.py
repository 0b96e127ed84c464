"""The edge for gateways: an endpoint picker of the Gateway API inference extension, spoken to by Envoy's external
processing (gRPC).

A stream of messages is one HTTP request. Its head and body are answered with the engine's address, once a conductor has
placed it; what its answer is made of passes unchanged. Source: the extension's "Endpoint Picker Protocol"
(gateway-api-inference-extension, proposal 004), and Envoy's `envoy/service/ext_proc/v3/external_processor.proto`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import Any, NamedTuple

import grpc
import orjson

from halfmoon.bus.telemetry.tracing import checked_traceparent
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import parse_chat, parse_completion
from halfmoon.schemas.tokens import EngineNamed
from halfmoon.workers.frontend.edges.ext_proc_messages import (
    FULL_DUPLEX_STREAMED,
    METHOD,
    OVERWRITE_IF_EXISTS_OR_ADD,
    SERVICE,
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpStatus,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    Struct,
    TrailersResponse,
    kind_of,
)
from halfmoon.workers.frontend.edges.forwarded import ForwardedRequest, ForwardedRequests
from halfmoon.workers.frontend.registry import RequestRegistry
from halfmoon.workers.frontend.tenants import ApiKeys, in_the_name_of

#: The protocol's own names: the header and the metadata with the chosen endpoint, and with those that it may be.
DESTINATION = "x-gateway-destination-endpoint"
_LB, _SUBSET, _SUBSET_KEY = "envoy.lb", "envoy.lb.subset_hint", f"{DESTINATION}-subset"
_PARSERS = {"/v1/chat/completions": parse_chat, "/v1/completions": parse_completion}
_STREAMS, _LAST_LINE, _TAIL_BYTES = "text/event-stream", b"data: [DONE]", 64
#: Fields of a body that are between engines: vLLM's, and SGLang's, which come as headers too (`x-override-…`).
_OF_KV = frozenset(
    (
        "kv_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
    )
)
_OVERRIDES = "x-override-"


class ExtProcEdge:
    """`start` listens, `stop` closes (after the registry)."""

    def __init__(self, registry: RequestRegistry) -> None:
        self._registry = registry
        self._keys = ApiKeys(registry.config.api_keys)
        self.forwarded = ForwardedRequests(registry)
        self._server: grpc.aio.Server | None = None
        #: Where it listens, once started.
        self.port = -1

    async def start(self) -> None:
        """Raises BusError, and OSError when the port is taken."""
        await self.forwarded.start()
        config = self._registry.config
        # A port that another frontend has is taken: shared, each would get some of the requests.
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        method = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})]
        )
        host = f"[{config.http_host}]" if ":" in config.http_host else config.http_host
        address = f"{host}:{config.ext_proc_port}"
        try:
            if config.ext_proc_tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials([config.ext_proc_tls])
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as problem:
            said = str(problem).partition(";")[0]  # then come hints for gRPC's developers
            raise OSError(f"--ext-proc-port {config.ext_proc_port}: {said}") from None
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def _process(self, messages: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self.process(messages)) as responses:
            async for response in responses:
                yield response

    async def process(self, messages: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """One HTTP request, from its head to the end of its answer."""
        coming = _Coming(messages)
        began_ns = time.monotonic_ns()
        one: ForwardedRequest | None = None
        head = _Head.of(await coming.next())
        if head is None:
            return
        try:
            try:
                if (answer := self._answer_of(head)) is not None:
                    yield answer
                    return
                body = await self._body(coming)
                if body is None:
                    return
                asked = _fields_of(body)
                one = await self._open(head, body)
                engine = await coming.unless_over(one.engine)
                if engine is None:
                    return
                head.check(engine)
            except ApiError as error:
                if one is None:
                    self._refused(head, error, began_ns)
                yield _refusal(error)
                return
            for response in _sent_to(engine, head, asked):
                yield response
            async for response in _heard_of(one, coming):
                yield response
        finally:
            if one is not None:
                one.leave()
            coming.close()

    # --- the request ----------------------------------------------------------------------------------------

    def _answer_of(self, head: _Head) -> Any:
        """To a request that needs no engine; None: it needs one. Raises ApiError."""
        self._keys.tenant_of(head.header("authorization"))
        if head.path == "/v1/models" and head.method == "GET":
            registry = self._registry
            return _immediate(200, orjson.dumps(registry.prompts.models(registry.started_at_s)), {})
        if head.path not in _PARSERS:
            paths = ", ".join(("/v1/models", *_PARSERS))
            raise ApiError(
                404, f"there is no {head.path[:200]} behind a gateway: {paths}", code="unknown_url"
            )
        if head.method != "POST":
            raise ApiError(405, f"{head.path} wants POST", code="method_not_allowed")
        if head.header("content-encoding") not in ("", "identity"):
            raise ApiError(415, "content-encoding: none", code="unsupported_media_type")
        if not head.duplex:
            message = (
                "ext_proc's processing_mode: request_body_mode and response_body_mode FULL_DUPLEX_STREAMED"
            )
            raise ApiError(500, message, code="gateway_mode")
        if head.ended:
            raise ApiError(400, "the body is missing", code="invalid_json")
        return None

    async def _body(self, coming: _Coming) -> bytes | None:
        """None: its client has gone. Raises ApiError 413."""
        most, size = self._registry.config.http_limits.body_bytes_max, 0
        parts: list[bytes] = []
        while (message := await coming.next()) is not None:
            if message.HasField("request_trailers"):
                return b"".join(parts)
            parts.append(message.request_body.body)
            size += len(parts[-1])
            if size > most:
                raise ApiError(413, f"the body has more than {most} bytes", code="too_large")
            if message.request_body.end_of_stream:
                return b"".join(parts)
        return None

    async def _open(self, head: _Head, body: bytes) -> ForwardedRequest:
        """Raises ApiError."""
        await self._registry.admit()
        tenant = self._keys.tenant_of(head.header("authorization"))
        ask = in_the_name_of(_PARSERS[head.path](body), tenant)
        return await self.forwarded.open(
            ask,
            traceparent=head.traceparent,
            max_tokens_default=None if ask.chat else self._registry.config.completion_max_tokens_default,
        )

    def _refused(self, head: _Head, error: ApiError, began_ns: int) -> None:
        self._registry.metrics.failed(error.status)
        chat = head.path != "/v1/completions"
        self._registry.intake.refused(error, began_ns, chat=chat, traceparent=head.traceparent)


class _Head(NamedTuple):
    """The first message."""

    headers: Mapping[str, str]
    #: Endpoints that the gateway allows; empty: any.
    subset: frozenset[str]
    duplex: bool
    #: There is no body.
    ended: bool

    @classmethod
    def of(cls, message: Any) -> _Head | None:
        """None: it is no head."""
        if message is None or not message.HasField("request_headers"):
            return None
        modes = message.protocol_config
        allowed = {each.key: each.value for each in message.metadata_context.filter_metadata}
        hint = allowed[_SUBSET][_SUBSET_KEY] if _SUBSET_KEY in allowed.get(_SUBSET, ()) else ""
        listed = hint.split(",") if isinstance(hint, str) else [str(each) for each in hint]
        return cls(
            _headers(message.request_headers.headers.headers),
            frozenset(each.strip() for each in listed if each.strip()),
            modes.request_body_mode == modes.response_body_mode == FULL_DUPLEX_STREAMED,
            message.request_headers.end_of_stream,
        )

    def header(self, name: str) -> str:
        return self.headers.get(name, "")

    @property
    def path(self) -> str:
        return self.header(":path").partition("?")[0]

    @property
    def method(self) -> str:
        return self.header(":method")

    @property
    def traceparent(self) -> str:
        return checked_traceparent(self.header("traceparent"))

    def check(self, engine: EngineNamed) -> None:
        """Raises ApiError 503 where the gateway does not allow it."""
        if self.subset and engine.endpoint not in self.subset:
            message = f"{engine.worker_id} is at {engine.endpoint}, which is none of the gateway's endpoints"
            raise ApiError(503, message, code="no_endpoint")


class _Coming:
    """Messages of one stream, also while something else is waited for."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        self._ahead: asyncio.Task[Any] | None = None

    async def next(self) -> Any:
        """None: the stream has ended."""
        reading, self._ahead = self._read_ahead(), None
        return await reading

    async def unless_over(self, awaited: asyncio.Future[EngineNamed]) -> EngineNamed | None:
        """None: the stream has ended before."""
        reading = self._read_ahead()
        await asyncio.wait({reading, awaited}, return_when=asyncio.FIRST_COMPLETED)
        if not awaited.done() and reading.result() is not None:
            await asyncio.wait({awaited})  # a message that comes later in its turn
        return await awaited if awaited.done() else None

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    def _read_ahead(self) -> asyncio.Task[Any]:
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(self._read())
        return self._ahead

    async def _read(self) -> Any:
        return await anext(aiter(self._messages), None)


def _fields_of(body: bytes) -> dict[str, Any]:
    """The client's own, for the engine. Raises ApiError 400."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as problem:
        raise ApiError(400, f"the body is not JSON: {problem}", code="invalid_json") from None
    if not isinstance(asked, dict):
        raise ApiError(400, "the body is no JSON object", code="invalid")
    # They name KV in an engine, which may be of another tenant, or the engine that has it.
    return {field: value for field, value in asked.items() if field not in _OF_KV}


def _sent_to(engine: EngineNamed, head: _Head, asked: Mapping[str, Any]) -> Iterable[Any]:
    """The answers to a request's head and body."""
    # The client's key is ours to check, and what is compressed cannot be read here.
    unwanted = [
        "authorization",
        "accept-encoding",
        *(name for name in head.headers if name.startswith(_OVERRIDES)),
    ]
    changed = orjson.dumps({**asked, **orjson.loads(engine.fields)})
    metadata = Struct()
    metadata.update({_LB: {DESTINATION: engine.endpoint}})
    headers = {DESTINATION: engine.endpoint, "content-length": str(len(changed)), **engine.headers}
    mutation = HeaderMutation(
        set_headers=_options(headers),
        remove_headers=[each for each in unwanted if each not in engine.headers],
    )
    yield ProcessingResponse(
        request_headers=HeadersResponse(response=CommonResponse(header_mutation=mutation)),
        dynamic_metadata=metadata,
    )
    yield ProcessingResponse(request_body=_passed(changed, ended=True))


class _Answer:
    """An engine's answer to `one`, part by part.

    A client that has all of it may leave at once, and the gateway then tells of no end. So the end is seen here by the
    answer itself: its length, or a stream's last line.
    """

    def __init__(self, one: ForwardedRequest) -> None:
        self._one = one
        self._status, self._streamed = 200, False
        #: Bytes that its head announced and that are not here yet; None: it did not.
        self._left: int | None = None
        self._tail = b""

    def begins(self, headers: Mapping[str, str], *, ended: bool) -> None:
        self._status = int(headers.get(":status", "0"))
        self._streamed = headers.get("content-type", "").startswith(_STREAMS)
        if (length := headers.get("content-length", "")).isdecimal():
            self._left = int(length)
        if ended:
            self.goes_on(b"", ended=True)

    def goes_on(self, body: bytes, *, ended: bool) -> None:
        if self._left is not None:
            self._left -= len(body)
        self._tail = (self._tail + body[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        last_line = self._streamed and self._tail.rstrip().endswith(_LAST_LINE)
        all_here = ended or last_line or (self._left is not None and self._left <= 0)
        self._one.hear(body, status=self._status, streamed=self._streamed, ended=all_here)


async def _heard_of(one: ForwardedRequest, coming: _Coming) -> AsyncGenerator[Any, None]:
    """The answers to all that follows: it passes as it is, and its adapter hears of it. Returns at the answer's end, or
    where the stream ends.
    """
    answer = _Answer(one)
    while (message := await coming.next()) is not None:
        match kind_of(message):
            case "response_headers":
                head = message.response_headers
                yield ProcessingResponse(response_headers=HeadersResponse())
                answer.begins(_headers(head.headers.headers), ended=head.end_of_stream)
                if head.end_of_stream:
                    return
            case "response_body":
                part = message.response_body
                # Heard first: the client may have all of it with this part, and leave.
                answer.goes_on(part.body, ended=part.end_of_stream)
                yield ProcessingResponse(response_body=_passed(part.body, ended=part.end_of_stream))
                if part.end_of_stream:
                    return
            case "response_trailers":
                answer.goes_on(b"", ended=True)
                yield ProcessingResponse(response_trailers=TrailersResponse())
                return
            case "request_trailers":
                yield ProcessingResponse(request_trailers=TrailersResponse())


def _passed(body: bytes, *, ended: bool) -> Any:
    streamed = StreamedBodyResponse(body=body, end_of_stream=ended)
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed)))


def _refusal(error: ApiError) -> Any:
    return _immediate(error.status, error.body(), error.retry_headers())


def _immediate(status: int, body: bytes, headers: Mapping[str, str]) -> Any:
    said = HeaderMutation(set_headers=_options({"content-type": "application/json", **headers}))
    return ProcessingResponse(
        immediate_response=ImmediateResponse(status=HttpStatus(code=status), headers=said, body=body)
    )


def _options(headers: Mapping[str, str]) -> list[Any]:
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode()),
            append_action=OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers.items()
    ]


def _headers(said: Iterable[Any]) -> dict[str, str]:
    return {each.key: each.raw_value.decode(errors="replace") or each.value for each in said}
