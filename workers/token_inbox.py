"""The tokens of a worker's orders: given by the frontend as soon as it hears of the placement, or asked for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerError, PeerUnreachable
from halfmoon.schemas import subjects
from halfmoon.schemas.roles import WorkerRole
from halfmoon.schemas.tokens import ORDER_UNKNOWN, DecodeGiven, TakeReply, TakeRequest, TokensGiven

#: Tokens that were not given by then are asked for: a message of core NATS may be lost.
GIVE_S = 0.25
#: Tokens may overtake the order that they belong to (another stream): those of this many orders are kept.
EARLY_ORDERS_MAX = 256
TAKE_TIMEOUT_S = 2.0
TAKE_TRIES = 4
TAKE_PAUSE_S = 0.2


class TokenInbox:
    """Tokens for one worker. Call `open` before the first order."""

    def __init__(self, bus: Bus, worker_id: str, *, needs_prompts: bool = True) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._needs_prompts = needs_prompts
        #: By frontend and order: another frontend's tokens are not for the order. None: they are to be asked for.
        self._early: OrderedDict[tuple[str, str], TakeReply | None] = OrderedDict()
        self._awaited: dict[tuple[str, str], asyncio.Future[TakeReply | None]] = {}

    async def open(self) -> None:
        subject = subjects.give(self._worker_id, "*")
        await self._bus.subscribe(subject, TokensGiven | DecodeGiven, self._on_given, author="frontend_id")

    def given(self, frontend_id: str, order_id: str, *, grammar: bool = True) -> TakeReply | None:
        """The tokens that were given ahead; once. `grammar`: also if its tokens are drawn by a grammar."""
        mark = frontend_id, order_id
        reply = self._early.get(mark)
        if reply is None or (reply.sampling.grammar and not grammar):
            return None
        del self._early[mark]
        return reply

    async def take(
        self, frontend_id: str, request_id: str, order_id: str, role: WorkerRole
    ) -> TakeReply | None:
        """The request's tokens; None: its frontend does not answer."""
        mark = frontend_id, order_id
        given = self.given(frontend_id, order_id)
        if given is None and mark not in self._early:
            given = await self._wait(mark)
        if given is not None:
            return given
        self._early.pop(mark, None)
        ask = TakeRequest(request_id=request_id, order_id=order_id, worker_id=self._worker_id, role=role)
        for _ in range(TAKE_TRIES):
            try:
                return await self._bus.request(
                    subjects.take(frontend_id, self._worker_id), ask, TakeReply, timeout_s=TAKE_TIMEOUT_S
                )
            except PeerError as problem:
                if problem.code != ORDER_UNKNOWN:
                    return TakeReply(gone=True)
            except PeerUnreachable:
                await asyncio.sleep(TAKE_PAUSE_S)
        return None

    async def _wait(self, mark: tuple[str, str]) -> TakeReply | None:
        loop = asyncio.get_running_loop()
        awaited: asyncio.Future[TakeReply | None] = loop.create_future()
        self._awaited[mark] = awaited
        timer = loop.call_later(GIVE_S, _settle, awaited, None)
        try:
            return await awaited
        finally:
            timer.cancel()
            del self._awaited[mark]

    def _on_given(self, message: TokensGiven | DecodeGiven) -> None:
        mark = message.frontend_id, message.order_id
        taken: TakeReply | None = message.taken
        if isinstance(message, DecodeGiven) and (self._needs_prompts or message.taken.sampling.reads_prompt):
            taken = None
        awaited = self._awaited.get(mark)
        if awaited is not None:
            _settle(awaited, taken)
            return
        self._early[mark] = taken
        while len(self._early) > EARLY_ORDERS_MAX:
            self._early.popitem(last=False)


def _settle(awaited: asyncio.Future[TakeReply | None], taken: TakeReply | None) -> None:
    if not awaited.done():
        awaited.set_result(taken)
