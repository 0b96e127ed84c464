"""The frontend's core: all open requests, between the edges (NATS, HTTP) and the cluster.

An edge calls `open` with a checked request and a listener; from then on the registry owns the request until
it ends in exactly one of: the last piece, an error told to the listener, `cancel` by the edge. What a client
sent stays in this process: the workers that a
conductor named take it from here (`take`), the log gets lengths and keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine
from typing import Any

import msgspec

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusOverloaded
from halfmoon.bus.tail import StreamTail
from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.metrics import process_registry
from halfmoon.schemas.api.errors import CLIENT_GONE, ApiError
from halfmoon.schemas.api.requests import ApiRequest
from halfmoon.schemas.decisions import (
    AnnounceYourself,
    FailRequest,
    RejectRequest,
)
from halfmoon.schemas.events import (
    FrontendHeartbeat,
    FrontendJoined,
    FrontendLeft,
    RequestCancelled,
)
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.status import ConductorStatus
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.intake import RequestIntake
from halfmoon.workers.frontend.log_health import LogHealth
from halfmoon.workers.frontend.metrics import FrontendMetrics, LogDisk
from halfmoon.workers.frontend.open_request import Listener, OpenRequest
from halfmoon.workers.frontend.rejections import failure, rejection
from halfmoon.workers.frontend.spans import end_request
from halfmoon.workers.frontend.tenants import ALL_TENANTS
from halfmoon.workers.frontend.token_exchange import TokenExchange
from halfmoon.workers.model.text.tokenizer import Tokenizer

_TICK_S = 0.25
#: For a frontend that is joining. Its clients are to try again after a second where it has not by then.
JOINING_S = 2.0


class RequestRegistry:
    """See the module. `start` before the edges; `stop` after they take nothing new."""

    def __init__(self, bus: Bus, config: FrontendConfig, tokenizer: Tokenizer, layout: Layout) -> None:
        self.bus = bus
        self.config = config
        self.tokenizer = tokenizer
        self._layout = layout
        of_process = process_registry(bus, role="frontend", process_id=config.frontend_id)
        self.requests: dict[str, OpenRequest] = {}
        self.metrics = FrontendMetrics(config.model, self.requests, of_process)
        self.log_health = LogHealth(bus, config)
        of_process.register(LogDisk(self.log_health, config))
        self.intake = RequestIntake(config, tokenizer, layout, payload_bytes_max=bus.nc.max_payload)
        self.prompts = self.intake.prompts
        #: Of the KVCache: requests share whole blocks.
        self.block_tokens = layout.block_tokens
        self.draining = self.paused = False
        self._joined = asyncio.Event()
        self.started_at_s = int(time.time())
        self._incarnation = uuid.uuid4().hex[:16]
        #: By tenant and name: no tenant sees another's names, not even by one that is taken.
        self._aliases: dict[tuple[str, str], OpenRequest] = {}
        self.exchange = TokenExchange(self, prompts_to_decode=layout.numerics == "fast")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    # --- life -----------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Before `join`: nothing that others say from then on is missed. Raises BusError."""
        self._decisions = await self.bus.open_decisions(self.config.frontend_id)
        await self.exchange.start()

    async def join(self) -> None:
        """Take part in the cluster. Raises BusError."""
        frontend_id = self.config.frontend_id
        await self.bus.append(
            FrontendJoined(frontend_id=frontend_id, incarnation=self._incarnation), source_id=frontend_id
        )
        self.spawn(self._follow_decisions(self._decisions))
        self.spawn(self._tick())
        # A pause is known well before a silence is too long.
        self.spawn(self.metrics.slo.follow(self.bus, self.learn, self.config.silence_s / 4))
        self._joined.set()

    async def stop(self) -> None:
        """Finish what is open within `drain_ns_max`, tell the rest why, leave."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_ns_max / SECOND_NS):
                await self._empty.wait()
        for request in list(self.requests.values()):
            self.fail(request, ApiError(503, "this frontend is stopping", code="stopping"), "frontend stops")
        await end_tasks(self._tasks)
        self.intake.close()
        if not self.bus.nc.is_closed:
            left = FrontendLeft(
                frontend_id=self.config.frontend_id, incarnation=self._incarnation, reason="stopped"
            )
            self.bus.append_soon(left, source_id=self.config.frontend_id)
            await self.bus.flush(2.0)

    def learn(self, status: ConductorStatus) -> None:
        """A conductor's word about the cluster; it may not know all of the log yet."""
        self.prompts.learn(status)
        if status.caught_up:
            self.paused = status.paused

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """A task that ends with the frontend at the latest."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- requests, from the edges ---------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """The model that is served, and how; no secret."""
        config = self.config
        return {
            "frontend_id": config.frontend_id,
            "served_model_names": [config.model, *config.model_aliases],
            "context_tokens": config.context_tokens,
            "max_model_len": self.prompts.max_model_len,
            "sampling_defaults": dict(config.sampling_defaults),
            "layout": msgspec.to_builtins(self._layout),
            "limits": {
                "open_requests_max": config.open_requests_max,
                "body_bytes_max": config.http_limits.body_bytes_max,
                "connections_max": config.http_limits.connections_max,
            },
            "api_keys": bool(config.api_keys),
        }

    @property
    def open_requests(self) -> int:
        return len(self.requests) + self.prompts.pending

    async def admit(self) -> None:
        """May another request come in? Asked before its body is looked at. Raises ApiError 503 or 429.

        A frontend that is joining is waited for: others read in the log that it has before it knows that itself.
        """
        if not self._joined.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), JOINING_S)
        if self.draining or not self._joined.is_set():
            doing = "stopping" if self.draining else "starting"
            raise ApiError(503, f"this frontend is {doing}", code=doing, retry_after_ns=SECOND_NS)
        if (refusal := self.log_health.refusal()) is not None:
            raise refusal
        if self.open_requests >= self.config.open_requests_max:
            self.metrics.rejected("queue_full")
            message = f"{self.open_requests} requests are open here already"
            raise ApiError(429, message, code="queue_full", retry_after_ns=SECOND_NS)

    async def open(
        self,
        ask: ApiRequest,
        listener: Listener,
        *,
        traceparent: str = "",
        max_tokens_default: int | None = None,
    ) -> OpenRequest:
        """Take a request in. Raises ApiError; then the listener is never called.

        `max_tokens_default` of one that does not say; None: of a chat all that the context has left, else the
        configuration's.
        """
        now_ns = time.monotonic_ns()
        ask, prompt = await self.intake.read(ask, max_tokens_default)
        if (ask.tenant, ask.request_id) in self._aliases:
            raise ApiError(
                422, "a request of this request_id is open", param="request_id", code="request_id_in_use"
            )
        request = self.intake.request(ask, prompt, listener, now_ns=now_ns, traceparent=traceparent)
        arrived = request.arrived
        try:  # before anything knows it: what the log cannot take was never accepted
            self.bus.append_soon(arrived, source_id=self.config.frontend_id)
        except BusOverloaded as problem:
            raise ApiError(503, str(problem), code="log_not_stored", retry_after_ns=SECOND_NS) from None
        self.requests[arrived.request_id] = request
        self._empty.clear()
        if request.alias:
            self._aliases[ask.tenant, request.alias] = request
        return request

    def find(self, name: str, tenant: str) -> OpenRequest | None:
        """By request id, or by the id that the client gave: a request of `tenant`, of any where that is ALL_TENANTS."""
        if tenant != ALL_TENANTS:
            request = self.requests.get(name)
            return request if request and request.ask.tenant == tenant else self._aliases.get((tenant, name))
        named = (request for (_, alias), request in self._aliases.items() if alias == name)
        return self.requests.get(name) or self._aliases.get(("", name)) or next(named, None)

    def cancel(self, request: OpenRequest, reason: str = "client gone") -> bool:
        """The edge does not want it any more; the listener is not called again. False when it had ended."""
        if not self._remove(request):
            return False
        self.metrics.failed(CLIENT_GONE)
        end_request(request, self.config.model, ApiError(CLIENT_GONE, reason))
        self._tell_cancelled(request, reason)
        return True

    def fail(self, request: OpenRequest, error: ApiError, reason: str = "") -> None:
        """End it with an error for the client; `reason` when the cluster must be told too."""
        if self._remove(request):
            self.metrics.failed(error.status, accepted=True)
            end_request(request, self.config.model, error)
            if reason:
                self._tell_cancelled(request, reason)
            request.listener.on_error(request, error)

    def finish(self, request: OpenRequest, *, stopped: bool) -> None:
        """Its last token is out. `stopped`: at a stop string, of which its worker does not know."""
        self._remove(request)
        self.metrics.finish(request)
        end_request(request, self.config.model)
        if stopped:
            self._tell_cancelled(request, "stop")

    def _remove(self, request: OpenRequest) -> bool:
        if self.requests.pop(request.request_id, None) is None:
            return False
        if request.alias:
            self._aliases.pop((request.ask.tenant, request.alias), None)
        if not self.requests:
            self._empty.set()
        return True

    def _tell_cancelled(self, request: OpenRequest, reason: str) -> None:
        self.bus.append_soon(
            RequestCancelled(request_id=request.request_id, reason=reason), source_id=self.config.frontend_id
        )

    # --- decisions and time ---------------------------------------------------------------------------------

    async def _follow_decisions(self, reader: StreamTail) -> None:
        async for ordered in self.bus.follow_decisions(reader):
            decision = ordered.decision
            if isinstance(decision, AnnounceYourself):
                self._announce()
            elif isinstance(decision, RejectRequest | FailRequest):
                request = self.requests.get(decision.request_id)
                if request is None:
                    continue
                if isinstance(decision, RejectRequest):
                    self.metrics.rejected(decision.reason)
                    self.fail(request, rejection(decision, chat=request.ask.chat))
                else:
                    self.fail(request, failure(decision, chat=request.ask.chat))

    def _announce(self) -> None:
        """A conductor does not know us: say again who we are and what is open. It knows repeats for what they
        are.
        """
        source_id = self.config.frontend_id
        self.bus.append_soon(
            FrontendJoined(frontend_id=source_id, incarnation=self._incarnation), source_id=source_id
        )
        for request in self.requests.values():
            self.bus.append_soon(request.arrived, source_id=source_id)

    async def _tick(self) -> None:
        """Heartbeats, and requests that have been silent for too long."""
        source_id = self.config.frontend_id
        heartbeat_at_ns = 0
        while True:
            now_ns = time.monotonic_ns()
            if now_ns >= heartbeat_at_ns:
                heartbeat_at_ns = now_ns + self.config.heartbeat_ns
                beat = FrontendHeartbeat(
                    frontend_id=source_id,
                    incarnation=self._incarnation,
                    open_requests=len(self.requests),
                    silent=self.exchange.redelivery.silent(now_ns),
                )
                self.bus.append_soon(beat, source_id=source_id)
            for request in list(self.requests.values()):
                self.exchange.redelivery.watch(request, now_ns)
            await asyncio.sleep(min(_TICK_S, self.config.heartbeat_ns / SECOND_NS))
