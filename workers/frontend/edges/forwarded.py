"""Requests of a gateway: placed here as all others are, and sent to their engines by the gateway itself.

::

    open ─▶ a conductor places it ─▶ the adapter names its engine ─▶ the gateway sends it there
                                                    └─◀ parts of the answer, passed on ─◀┘

The adapter makes tokens and reports of the answer, as of any that it asked for itself. So the conductors know of the
request what they know of others, and its text ends here unread.
"""

from __future__ import annotations

import asyncio
import dataclasses

from halfmoon.schemas import subjects
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest
from halfmoon.schemas.codec import encode
from halfmoon.schemas.tokens import AnswerRelayed, EngineNamed
from halfmoon.workers.frontend.open_request import OpenRequest, Piece
from halfmoon.workers.frontend.registry import RequestRegistry

#: Of an answer, in one message.
_PART_BYTES_MAX = 256 << 10


class ForwardedRequests:
    """Those of one frontend that are open. `start` before the first."""

    def __init__(self, registry: RequestRegistry) -> None:
        self._registry = registry

    async def start(self) -> None:
        """Raises BusError."""
        named = subjects.forward(self._registry.config.frontend_id, "*")
        await self._registry.bus.subscribe(named, EngineNamed, self._on_named, author="worker_id")

    async def open(
        self, ask: ApiRequest, *, traceparent: str, max_tokens_default: int | None
    ) -> ForwardedRequest:
        """Raises ApiError; then nothing is open."""
        one = ForwardedRequest(self._registry)
        # An engine answers all choices, and all prompts of a list, at one place: that of the first.
        answer = dataclasses.replace(ask.answer, forwarded=True)
        ask = dataclasses.replace(ask, answer=answer, more_prompts=())
        one.request = await self._registry.open(
            ask, one, traceparent=traceparent, max_tokens_default=max_tokens_default
        )
        return one

    def _on_named(self, engine: EngineNamed) -> None:
        request = self._registry.requests.get(engine.request_id)
        if request is None or not isinstance(request.listener, ForwardedRequest):
            return
        if (request.order_id, request.decode_worker) == (engine.order_id, engine.worker_id):
            request.listener.on_engine(engine)


class ForwardedRequest:
    """One request, and the listener of its tokens."""

    request: OpenRequest

    def __init__(self, registry: RequestRegistry) -> None:
        self._registry = registry
        #: The engine, or an ApiError.
        self.engine: asyncio.Future[EngineNamed] = asyncio.get_running_loop().create_future()
        self._parts = 0
        self._heard_all = False

    # --- from the registry ----------------------------------------------------------------------------------

    def on_engine(self, engine: EngineNamed) -> None:
        if not self.engine.done():
            self.engine.set_result(engine)
            self.request.answered_elsewhere = True
        elif self.engine.result().order_id != engine.order_id:
            # It was placed again. Its client has an answer, or half of one, or an error from the gateway.
            self._registry.cancel(self.request, "its engine is gone")

    def on_piece(self, request: OpenRequest, piece: Piece) -> None:
        if not self.engine.done():
            message = f"{request.decode_worker} is no engine that a gateway could ask"
            self.engine.set_exception(ApiError(503, message, code="no_engine"))

    def on_error(self, request: OpenRequest, error: ApiError) -> None:
        if not self.engine.done():
            self.engine.set_exception(error)

    # --- for the edge ---------------------------------------------------------------------------------------

    def hear(self, body: bytes, *, status: int, streamed: bool, ended: bool) -> None:
        """A part of the answer, for the engine's adapter. What comes after the end is left out."""
        if self._heard_all:
            return
        self._heard_all = ended
        if self._registry.requests.get(self.request.request_id) is not self.request:
            return  # it has ended
        self.request.answered_elsewhere = not ended
        engine, me = self.engine.result(), self._registry.config.frontend_id
        for at in range(0, len(body) or 1, _PART_BYTES_MAX):
            part = AnswerRelayed(
                frontend_id=me,
                order_id=engine.order_id,
                number=self._parts,
                status=status,
                streamed=streamed,
                body=body[at : at + _PART_BYTES_MAX],
                ended=ended and at + _PART_BYTES_MAX >= len(body),
            )
            self._parts += 1
            self._registry.bus.nc.send(subjects.relay(engine.worker_id, me), encode(part))

    def leave(self) -> None:
        """The client has its answer, or has gone without, or will get none: then the request is cancelled."""
        if not self._heard_all:
            self._registry.cancel(self.request)
            self.engine.cancel()
