"""The feed of the page: one question to the conductors every half second, for all who look, and no other.

All conductors answer that they are there; one, which we name, answers in full. When it falls silent another
is named, so the page goes on as the cluster does. A slow reader gets the newest view when it is ready for one,
never a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import orjson
from nats.errors import Error as NatsError

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerError, PeerUnreachable
from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.version import VERSION
from halfmoon.schemas import subjects
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.codec import encode
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.view import ClusterView, Explained, ExplainRequest, ViewRequest
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.log_health import LogHealth

EVERY_S = 0.5
#: A conductor that has not answered for so long is silent.
SILENT_S = 1.75
WATCHERS_MAX = 32
#: Events that who begins to look is told.
EVENTS_KEPT = 60
EXPLAIN_S = 50.0
EXPLAINING_MAX = 4
_STATUS = {"not_found": 404, "too_old": 410, "busy": 503}


class PageFeed:
    """`watch` for each who looks; `explain` for one request. `close` ends all."""

    def __init__(self, bus: Bus, config: FrontendConfig, health: LogHealth) -> None:
        self._bus = bus
        self._health = health
        self._config = config
        self._watchers: set[asyncio.Event] = set()
        self._asking: asyncio.Task[None] | None = None
        self._closed = False
        self._explaining = 0
        #: Conductors that were heard: when, and up to which event they have read.
        self._heard: dict[str, tuple[float, int]] = {}
        self._named = ""
        self._after_seq = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._view: dict[str, Any] = {}
        self._view_at_s = 0.0
        self._number = 0
        self._encoded: dict[int, bytes] = {}

    @property
    def watched(self) -> bool:
        """Somebody looks: the conductors are asked."""
        return self._asking is not None

    async def close(self) -> None:
        """Every stream ends."""
        self._closed = True
        for news in self._watchers:
            news.set()
        if self._asking is not None:
            await end_tasks([self._asking])
            self._asking = None

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Views as server-sent events, endless: at once what is known, then each half second. Raises ApiError
        429.
        """
        if len(self._watchers) >= WATCHERS_MAX:
            message = f"{len(self._watchers)} look at this frontend's page already"
            raise ApiError(429, message, code="too_many_watchers", retry_after_ns=5 * SECOND_NS)
        news = asyncio.Event()
        self._watchers.add(news)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        told = 0
        try:
            while not self._closed:
                if self._view and told != self._number:
                    since, told = told, self._number
                    yield self._event(since)
                news.clear()
                await news.wait()
        finally:
            self._watchers.discard(news)
            if not self._watchers and self._asking is not None:
                asking, self._asking = self._asking, None
                asking.cancel()

    def _event(self, told: int) -> bytes:
        """The newest view, with what happened since the one that was `told`; made once for all who need the
        same.
        """
        if told not in self._encoded:
            events = [event for event in self._events if event["number"] > told]
            view = orjson.dumps({**self._view, "events": events})
            self._encoded[told] = b"id: %d\nevent: view\ndata: %s\n\n" % (self._number, view)
        return self._encoded[told]

    # --- conductors -----------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        inbox = self._bus.nc.new_inbox()
        subscription, asked = None, 0
        self._heard.clear()
        self._after_seq = 0
        self._view_at_s = time.monotonic()
        try:
            while True:
                if not self._bus.nc.is_connected:
                    self._tell({"state": "no NATS"})
                else:
                    with contextlib.suppress(NatsError):
                        if subscription is None:
                            subscription = await self._bus.subscribe(f"{inbox}.*", ClusterView, self._on_view)
                        self._name()
                        question = ViewRequest(conductor_id=self._named, after_seq=self._after_seq)
                        asked += 1  # another inbox for each, or it would count as the same question once more
                        reply = f"{inbox}.{asked}"
                        self._bus.nc.send(subjects.view(subjects.CONDUCTORS), encode(question), reply=reply)
                    if time.monotonic() - self._view_at_s > SILENT_S:
                        self._tell({"state": "no conductor"})
                await asyncio.sleep(EVERY_S)
        finally:
            if subscription is not None and not self._bus.nc.is_closed:
                with contextlib.suppress(NatsError):
                    await subscription.unsubscribe()

    def _name(self) -> None:
        """Keep to the one that answers; else the one that has read furthest."""
        now_s = time.monotonic()
        self._heard = {name: heard for name, heard in self._heard.items() if now_s - heard[0] < SILENT_S}
        if self._named not in self._heard:
            self._named = max(self._heard, key=lambda name: (self._heard[name][1], name), default="")

    def _on_view(self, view: ClusterView) -> None:
        first = not self._heard
        self._heard[view.conductor_id] = (time.monotonic(), view.seq)
        if not view.full:
            if first:  # not to wait another half second
                self._name()
            return
        if view.seq < self._after_seq:
            self._events.clear()  # another log
        self._after_seq = view.seq
        self._view_at_s = time.monotonic()
        plain = msgspec.to_builtins(view)
        for event in plain.pop("events", []):
            self._events.append({**event, "number": self._number + 1})
        refusal = self._health.refusal()
        problem = "" if refusal is None else refusal.message
        self._tell({**plain, "state": "live", "problem": problem, "conductors": self._conductors()})

    def _conductors(self) -> list[dict[str, Any]]:
        return [{"id": name, "seq": seq} for name, (_, seq) in sorted(self._heard.items())]

    def _tell(self, view: dict[str, Any]) -> None:
        self._number += 1
        self._encoded.clear()
        self._view = {
            **view,
            "frontend": self._config.frontend_id,
            "model": self._config.model,
            "version": VERSION,
            "every_s": EVERY_S,
            "watchers": len(self._watchers),
        }
        for news in self._watchers:
            news.set()

    # --- one request ----------------------------------------------------------------------------------------

    async def explain(self, request_id: str) -> bytes:
        """JSON. Raises ApiError: 404, 410 (too far back), 503 (no conductor, or a busy one)."""
        try:
            asked = msgspec.convert({"request_id": request_id}, ExplainRequest)
        except msgspec.ValidationError:
            raise ApiError(404, "that is no id of a request", code="not_found") from None
        if self._explaining >= EXPLAINING_MAX:
            raise ApiError(503, "other requests are being looked up", code="busy", retry_after_ns=SECOND_NS)
        self._explaining += 1
        try:
            found = await self._bus.request(
                subjects.explain(await self._conductor()), asked, Explained, timeout_s=EXPLAIN_S
            )
        except PeerUnreachable as problem:
            raise ApiError(503, f"no conductor answers: {problem}", code="no_conductor") from None
        except PeerError as problem:
            raise ApiError(_STATUS.get(problem.code, 500), problem.message, code=problem.code) from None
        finally:
            self._explaining -= 1
        return encode(found)

    async def _conductor(self) -> str:
        """The one that is named; while nobody looks, the first that says that it is there. Raises
        PeerUnreachable.
        """
        if self.watched and self._named:
            return self._named
        view = await self._bus.request(
            subjects.view(subjects.CONDUCTORS), ViewRequest(), ClusterView, timeout_s=SILENT_S
        )
        return view.conductor_id
