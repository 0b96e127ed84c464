"""aiohttp's server, with defences against clients that are hostile, broken or slow.

1. A request's head and body have deadlines, and so has a client that does not read its answer.
2. Connections have a cap, for all and for one address. Beyond it the one that has been waiting longest for its next
   request makes room. When every other one is being served, a new one gets reserved room: there only urgent paths
   (health, metrics) are answered, and all others get an answer to come again.
3. Bytes that are no HTTP are refused in the API's form, and in one line of the log, of which there are few.

A server of Python's threads, or aiohttp's own `web.Application`, would need the same: neither has any of the three.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import resource
import ssl
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.logs import RateLimit
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.numbers import SECOND_NS

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
JSON = "application/json"
#: Between two looks at the deadlines of all connections.
SWEEP_S = 0.25
#: Files that are not connections: NATS, the log, the event loop, files that a library opens for a moment.
OTHER_FILES = 128
#: Of a line of the request and of a field of its head, in bytes; and fields.
LINE_BYTES_MAX = 8190
FIELDS_MAX = 100

log = logging.getLogger(__name__)
log.addFilter(RateLimit(burst=20, every_s=5.0))


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """How much room clients have, and how long they may take. Raises ValueError when there is none."""

    connections_max: int = 8192
    #: Of one address (of one /64 network with IPv6). A proxy in front is one address.
    connections_per_address_max: int = 4096
    #: Connections beyond the cap, for urgent paths.
    reserved_max: int = 64
    #: From the first byte of a request's head to its last; and until a new connection's first request has come.
    head_s: float = 10.0
    #: From there to the last byte of the body.
    body_s: float = 30.0
    #: Between two requests.
    idle_s: float = 75.0
    #: Longest time in which a client reads nothing of its waiting answer.
    write_s: float = 20.0
    body_bytes_max: int = 2 << 20

    def __post_init__(self) -> None:
        if min(self.connections_max, self.connections_per_address_max, self.reserved_max) < 1:
            raise ValueError(
                "connections_max, connections_per_address_max and reserved_max must be at least 1"
            )
        if min(self.head_s, self.body_s, self.idle_s, self.write_s) <= 0:
            raise ValueError("head_s, body_s, idle_s and write_s must be more than 0")
        if self.body_bytes_max < 1024:
            raise ValueError("body_bytes_max must be at least 1024")

    @property
    def connections_here(self) -> int:
        """The cap that this process's limit of open files has room for."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = (
            self.connections_max
            if files == resource.RLIM_INFINITY
            else files - OTHER_FILES - self.reserved_max
        )
        return max(1, min(self.connections_max, room))


class HttpServer:
    """`start` listens, `stop` closes. `handler` answers; an ApiError that it raises is sent as `error_body` writes it.

    `urgent`: paths that are answered in the reserved room too. `on_refusal` gets the status of each refusal made here.
    """

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits,
        *,
        urgent: frozenset[str],
        on_refusal: Callable[[int], None] = lambda _: None,
        headers_for: Callable[[web.BaseRequest], dict[str, str]] = lambda _: {},
        error_body: Callable[[web.BaseRequest, ApiError], bytes] = lambda _, error: error.body(),
    ) -> None:
        self._handler = handler
        self._urgent = urgent
        self._on_refusal = on_refusal
        self._error_body = error_body
        self.headers_for = headers_for
        self._runner: web.ServerRunner | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self.limits = limits
        self.room = _Room(limits)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> str:
        """Its URL; with port 0 a free one was taken. Raises OSError when the port is taken."""
        self._runner = web.ServerRunner(_Server(self), shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024, ssl_context=tls).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._sweeping = asyncio.create_task(self._sweep())
        name, number = self._runner.addresses[0][:2]
        scheme = "http" if tls is None else "https"
        return f"{scheme}://[{name}]:{number}" if ":" in name else f"{scheme}://{name}:{number}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._sweeping is not None:
            await end_tasks([self._sweeping])

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.room.connections):
                connection.look(now_s)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        try:
            if not connection.reserved:
                return await self._handler(request)
            if request.path not in self._urgent:
                message = f"{len(self.room.connections)} connections are open here already"
                raise ApiError(503, message, code="too_many_connections", retry_after_ns=SECOND_NS)
            response = await self._handler(request)
            response.force_close()
            return response
        except ApiError as error:
            self._on_refusal(error.status)
            named = client_request_id(request)
            headers = {"x-request-id": named} if named else {}
            response = refusal(error, headers, self._error_body(request, error))
            if connection.reserved or error.code in ("bad_body", "timeout"):
                response.force_close()
            return response
        except ConnectionError:
            raise  # the client is gone
        except Exception:
            # Whatever it is, it is ours and is logged: the client hears 500 and nothing of its words.
            log.exception("a request could not be answered")
            self._on_refusal(500)
            internal = ApiError(500, "internal error", code="internal")
            return refusal(internal, body=self._error_body(request, internal))
        finally:
            connection.served()

    def misunderstood(
        self, error: HttpProcessingError, status: int, message: str, remote: str
    ) -> web.Response:
        """The answer to bytes that are no HTTP."""
        if isinstance(error, LineTooLong):
            status, message = (
                431,
                f"a line or field of the request's head is longer than {LINE_BYTES_MAX} bytes",
            )
        told = _first_line(message or "").rstrip(": ")
        log.warning("%s sent no valid HTTP: %s", remote, told)
        self._on_refusal(status)
        return refusal(ApiError(status, told or "no valid HTTP", code="bad_request"))


async def read_body(request: web.BaseRequest, limits: HttpLimits) -> bytes:
    """Raises ApiError: 400 broken, 408 late, 413 too large, 415 packed in a way that is not known here, 417."""
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("", "identity", "gzip", "deflate"):
        raise ApiError(415, "content-encoding: gzip, deflate or none", code="unsupported_encoding")
    if expected := request.headers.get("expect"):
        if expected.strip().lower() != "100-continue":
            raise ApiError(417, "expect: only 100-continue is understood", code="expectation_failed")
        if request.version >= (1, 1) and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if request.content.is_eof():  # all of it is here: no timer
            return await request.read()
        async with asyncio.timeout(limits.body_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        message = f"the body is larger than {limits.body_bytes_max} bytes"
        raise ApiError(413, message, code="body_too_large") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {limits.body_s:g} s", code="timeout") from None
    except ConnectionError:
        raise
    except (
        web.RequestPayloadError,
        ValueError,
    ) as problem:
        # Malformed chunks, or a body that does not unpack.
        message = f"the body cannot be read: {_first_line(problem)}"
        raise ApiError(400, message, code="bad_body") from None


def client_request_id(request: web.BaseRequest) -> str:
    """The client's own name for its request, which a header of the answer repeats; "": none that fits there."""
    named = request.headers.get("x-request-id", "")
    return named if re.fullmatch(r"[\x21-\x7e]{1,256}", named) else ""


def _first_line(problem: BaseException | str) -> str:
    """Short and printable. A parser's message has the client's bytes after its first line."""
    return re.sub(r"[^\x20-\x7e]", "?", str(problem).strip().partition("\n")[0])[:200]


def refusal(
    error: ApiError, headers: dict[str, str] | None = None, body: bytes | None = None
) -> web.Response:
    """`error` as an answer. `body`: in another form than the API's own."""
    headers = {**(headers or {}), **error.retry_headers()}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return web.Response(status=error.status, body=body or error.body(), content_type=JSON, headers=headers)


class _Server(web.Server):
    """Makes the connections and the requests."""

    def __init__(self, owner: HttpServer) -> None:
        super().__init__(owner.answer, request_factory=self._request, handler_cancellation=True)
        self.owner = owner

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self.owner, loop=asyncio.get_running_loop())

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        protocol.taken()
        size = self.owner.limits.body_bytes_max
        request = _Request(message, payload, protocol, writer, task, protocol._loop, client_max_size=size)
        request.owner = self.owner
        return request


class _Request(web.BaseRequest):
    """Its answers, refusals and streams too, have the server's own headers."""

    owner: HttpServer

    async def _add_headers(self, response: web.StreamResponse) -> None:
        response.headers.update(self.owner.headers_for(self))

    #: aiohttp calls it before any answer's head is written.
    _prepare_hook = _add_headers


class Connection(web.RequestHandler):
    """One client's connection. It is idle from its start, and from the end of an answer, until a head is whole."""

    __slots__ = ("_stalled_at_s", "_unsent", "address", "head_at_s", "idle_at_s", "link", "owner", "reserved")

    def __init__(self, manager: web.Server, owner: HttpServer, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=owner.limits.idle_s,
            access_log=None,  # type: ignore[arg-type]
            logger=log,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            max_headers=FIELDS_MAX,
            lingering_time=min(5.0, owner.limits.body_s),
        )
        self.owner = owner
        self.address = ""
        #: Also while it closes, when aiohttp has let go of it.
        self.link: asyncio.Transport | None = None
        self.reserved = False
        #: When it became idle; 0: it is being served.
        self.idle_at_s = 0.0
        #: When the first byte of a head came that is not whole yet; 0: none has.
        self.head_at_s = 0.0
        self._unsent = 0
        self._stalled_at_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.link = self.transport
        self.address = _network(self.peername)
        self.idle_at_s = self.head_at_s = self._loop.time()  # the first head is expected at once
        self.owner.room.admit(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.owner.room.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.idle_at_s and not self.head_at_s:
            self.head_at_s = self._loop.time()
        super().data_received(data)

    def taken(self) -> None:
        """A head is whole: a request is being served."""
        self.idle_at_s = self.head_at_s = 0.0
        self.owner.room.busy(self)

    def served(self) -> None:
        """The answer is out, or about to be written."""
        self.idle_at_s = self._loop.time()
        self.owner.room.idle(self)

    def look(self, now_s: float) -> None:
        """Ends the connection when its client is late."""
        assert self.link is not None
        limits = self.owner.limits
        unsent = self.link.get_write_buffer_size()
        if not unsent or unsent < self._unsent or not self._unsent:
            self._stalled_at_s = now_s
        self._unsent = unsent
        if unsent:
            slow_s = limits.write_s * 3 if self.idle_at_s else float("inf")
            if now_s - self._stalled_at_s > limits.write_s or now_s - self.idle_at_s > slow_s:
                self.link.abort()
        elif self.transport is not None and self.head_at_s and now_s - self.head_at_s > limits.head_s:
            self._give_up(self.transport)

    def _give_up(self, transport: asyncio.Transport) -> None:
        """The head is late. aiohttp waits for it: the answer is written past it."""
        error = ApiError(
            408, f"the request did not come within {self.owner.limits.head_s:g} s", code="timeout"
        )
        body = error.body()
        head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: {JSON}\r\ncontent-length: {len(body)}\r\n"
        transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.force_close()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # The rest of a refused body is no error of ours.
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            raise exc  # the client is gone
        if not isinstance(exc, HttpProcessingError):  # our fault
            return super().handle_error(request, status, exc, message)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is on its way already")
        response = self.owner.misunderstood(exc, status, message or exc.message, self.address)
        self.served()
        response.force_close()
        return response


class _Room:
    """The open connections, and the choice of the one that makes room."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._max = limits.connections_here
        self.connections: set[Connection] = set()
        self._count = Counter[str]()
        #: Those that wait for a request, the one that has waited longest first: all, and by address.
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._idle_of: dict[str, OrderedDict[Connection, None]] = {}
        self._reserved: OrderedDict[Connection, None] = OrderedDict()

    def admit(self, connection: Connection) -> None:
        address = connection.address
        if self._count[address] >= self._limits.connections_per_address_max:
            self._make_room(connection, self._idle_of.get(address))
        elif len(self.connections) - len(self._reserved) >= self._max:
            self._make_room(connection, self._idle)
        self.connections.add(connection)
        self._count[address] += 1
        self.idle(connection)

    def _make_room(self, connection: Connection, idle: OrderedDict[Connection, None] | None) -> None:
        if idle:
            self._end(next(iter(idle)))
            return
        connection.reserved = True
        if len(self._reserved) >= self._limits.reserved_max:
            self._end(next(iter(self._reserved)))
        self._reserved[connection] = None

    def _end(self, connection: Connection) -> None:
        self.leave(connection)  # at once: its end is heard of a little later
        assert connection.link is not None
        if connection.link.get_write_buffer_size():
            connection.link.abort()
        connection.force_close()

    def leave(self, connection: Connection) -> None:
        if connection not in self.connections:
            return
        self.busy(connection)
        self.connections.discard(connection)
        self._reserved.pop(connection, None)
        self._count[connection.address] -= 1
        if not self._count[connection.address]:
            del self._count[connection.address]

    def idle(self, connection: Connection) -> None:
        if connection in self.connections and not connection.reserved:
            self._idle[connection] = None
            self._idle_of.setdefault(connection.address, OrderedDict())[connection] = None

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        if (idle := self._idle_of.get(connection.address)) is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle_of[connection.address]


def _network(peer: Any) -> str:
    """The address that a cap counts: one host, with IPv6 its /64 network."""
    if not isinstance(peer, tuple):
        return str(peer or "")
    host = str(peer[0]).partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)
