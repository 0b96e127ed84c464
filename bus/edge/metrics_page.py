"""`/metrics` of a process, for Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from halfmoon.bus.edge.http_server import HttpLimits, HttpServer
from halfmoon.bus.telemetry.metrics import CONTENT_TYPE, exposition
from halfmoon.schemas.api.errors import ApiError


async def serve_metrics(
    registry: CollectorRegistry, *, host: str, port: int, refresh: Callable[[], Awaitable[None]] | None = None
) -> HttpServer:
    """`/metrics` of a process; `await server.stop()` ends it. `refresh` asks others first. Raises OSError."""

    async def show(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/metrics":
            raise ApiError(404, f"there is no {request.path[:200]}", code="unknown_url")
        if request.method not in ("GET", "HEAD"):
            raise ApiError(405, "/metrics wants GET", code="method_not_allowed")
        if refresh is not None:
            await refresh()
        return web.Response(body=exposition(registry), headers={"content-type": CONTENT_TYPE})

    limits = HttpLimits(connections_max=64, connections_per_address_max=32, reserved_max=8)
    server = HttpServer(show, limits, urgent=frozenset(("/metrics",)))
    await server.start(host, port)
    return server
