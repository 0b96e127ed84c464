"""Lost deliveries: tokens travel over core NATS, at most once, and this makes up for it.

A gap in the indices is repaired at once; a silence is looked into after `resend_after_ns`, because the lost
message may have been the last one. A worker that is gone is the conductors' business: they place the request
again.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerError, PeerUnreachable
from halfmoon.schemas import subjects
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.tokens import ResendReply, ResendRequest, TokensSampled
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.metrics import FrontendMetrics
from halfmoon.workers.frontend.open_request import OpenRequest

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
#: In one heartbeat.
SILENT_MAX = 256
#: After so many "no such order" in a row the request is told to the conductors anew.
UNKNOWN_COUNT_MAX = 3


def _phase(request: OpenRequest, now_ns: int) -> str:
    """Who had the request, how far it was, and whether that process is heard of."""
    if not request.order_id:
        return "no conductor has named workers for it"
    tokens = len(request.output_ids)
    worker_id = request.decode_worker
    heard_s = (now_ns - request.heard_at_ns) / SECOND_NS
    knows = "does not know it" if request.unknown_count else f"was last heard of {heard_s:.0f} s ago"
    if not tokens:
        return f"it waits for its first token, from {request.prefill_worker}; its decode worker {worker_id} {knows}"
    return f"its decode worker {worker_id}, which sent {tokens} tokens, {knows}"


class OpenRequests(Protocol):
    """The part of the registry that redelivery needs."""

    bus: Bus
    config: FrontendConfig
    metrics: FrontendMetrics
    requests: dict[str, OpenRequest]
    #: An operator has paused placements.
    paused: bool

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None: ...

    def fail(self, request: OpenRequest, error: ApiError, reason: str = "") -> None: ...


class Redelivery:
    """Asks again for tokens that were lost on the way. One for a registry."""

    def __init__(self, registry: OpenRequests, on_tokens: Callable[[TokensSampled], None]) -> None:
        """`on_tokens` gets what is sent again."""
        self._registry, self._on_tokens = registry, on_tokens

    def watch(self, request: OpenRequest, now_ns: int) -> None:
        """Called for every open request, often."""
        config = self._registry.config
        if now_ns - max(request.polled_at_ns, request.heard_at_ns) < config.resend_after_ns:
            return
        if self._registry.paused or request.answered_elsewhere:
            # A pause is an operator's will, and may be long: the silence begins when it ends. So may be an answer that
            # is not streamed.
            request.progress_at_ns = now_ns
        # A worker that still knows the order is heard of, and may be stuck all the same.
        silent_ns = now_ns - request.progress_at_ns
        if silent_ns > self._silence_ns_max(request):
            message = f"no token came for {silent_ns // SECOND_NS} s: {_phase(request, now_ns)}"
            log.warning("request %s: %s", request.request_id, message)
            self._registry.fail(request, ApiError(500, message, code="silence"), "silence")
            return
        self.ask(request)

    def _silence_ns_max(self, request: OpenRequest) -> int:
        """Twice the time that its first token may take, if that is longer."""
        ttft_ns = 0 if request.output_ids else request.arrived.ttft_slo_ns
        return max(int(self._registry.config.silence_s * SECOND_NS), 2 * ttft_ns)

    def silent(self, now_ns: int) -> list[str]:
        """Requests that may wait for a worker, or whose refusal was lost: a conductor knows."""
        silent_after_ns = self._registry.config.silent_after_ns
        silent = (
            request.request_id
            for request in self._registry.requests.values()
            if not request.order_id and now_ns - request.heard_at_ns >= silent_after_ns
        )
        return list(itertools.islice(silent, SILENT_MAX))

    def ask(self, request: OpenRequest) -> None:
        """Ask its decode worker, unless that is under way or no worker has it yet."""
        if not request.resending and request.decode_worker:
            request.resending = True
            request.polled_at_ns = time.monotonic_ns()
            self._registry.metrics.resends += 1
            self._registry.spawn(self._repair(request))

    async def _repair(self, request: OpenRequest) -> None:
        """Until nothing is missing that the worker has mentioned, or it brings nothing."""
        try:
            had = -1
            while self._is_open(request) and len(request.output_ids) > had:
                had = len(request.output_ids)
                more = await self._ask_once(request, had)
                if not more and request.seen_tokens <= len(request.output_ids):
                    return
        except PeerUnreachable:
            self._unknown(request)
        except PeerError:
            return
        finally:
            request.resending = False

    async def _ask_once(self, request: OpenRequest, index: int) -> bool:
        """True: the worker has more than its answer had room for."""
        worker_id, order_id = request.decode_worker, request.order_id
        me = self._registry.config.frontend_id
        question = ResendRequest(
            frontend_id=me, request_id=request.request_id, order_id=order_id, index=index
        )
        reply = await self._registry.bus.request(
            subjects.resend(worker_id, me), question, ResendReply, timeout_s=TIMEOUT_S
        )
        if reply.known:
            request.heard_at_ns = time.monotonic_ns()
            if reply.delivery is not None:
                self._on_tokens(TokensSampled(worker_id=worker_id, deliveries=[reply.delivery]))
        elif self._is_open(request) and request.order_id == order_id:
            self._unknown(request)
        return reply.more

    def _unknown(self, request: OpenRequest) -> None:
        """The worker is gone, or restarted: the conductors place the request again, unless it had told them
        that all is done. So they are told that it is not."""
        request.unknown_count += 1
        if self._is_open(request) and request.unknown_count % UNKNOWN_COUNT_MAX == 0:
            lost = msgspec.structs.replace(request.arrived, answer_lost=True)
            self._registry.bus.append_soon(lost, source_id=self._registry.config.frontend_id)

    def _is_open(self, request: OpenRequest) -> bool:
        return self._registry.requests.get(request.request_id) is request
