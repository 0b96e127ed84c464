"""The tokens of a worker's orders: given by the frontend as soon as it hears of the placement, or asked for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerError, PeerUnreachable
from halfmoon.schemas import subjects
from halfmoon.schemas.roles import WorkerRole
from halfmoon.schemas.tokens import ORDER_UNKNOWN, TakeReply, TakeRequest, TokensGiven

#: What was not given by then is asked for: a message of core NATS may be lost.
GIVE_S = 0.25
#: Tokens may overtake the order that they belong to (another stream): those of this many orders are kept.
EARLY_ORDERS_MAX = 256
TAKE_TIMEOUT_S = 2.0
TAKE_TRIES = 4
TAKE_PAUSE_S = 0.2


class TokenInbox:
    """Tokens for one worker. Call `open` before the first order."""

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self._bus = bus
        self._worker_id = worker_id
        #: By frontend and order: what another frontend gives is not for the order.
        self._early: OrderedDict[tuple[str, str], TakeReply] = OrderedDict()
        #: By order: the frontend that is to give them, who is told, and when they are late.
        self._awaited: dict[str, tuple[str, Callable[[TakeReply], None], asyncio.TimerHandle]] = {}

    async def open(self) -> None:
        subject = subjects.give(self._worker_id, "*")
        await self._bus.subscribe(subject, TokensGiven, self._on_given, author="frontend_id")

    def expect(
        self,
        frontend_id: str,
        order_id: str,
        taken: Callable[[TakeReply], None],
        late: Callable[[], object],
    ) -> None:
        """Have `taken` called once with the tokens: at once if they were given ahead, or when they are; or else `late`,
        after which `ask` has them. No task waits for what mostly comes within a millisecond.
        """
        early = self._early.pop((frontend_id, order_id), None)
        if early is not None:
            taken(early)
        else:
            timer = asyncio.get_running_loop().call_later(GIVE_S, self._give_up, order_id, late)
            self._awaited[order_id] = frontend_id, taken, timer

    def forget(self, order_id: str) -> None:
        """Its tokens are not wanted any more: nothing is called."""
        awaited = self._awaited.pop(order_id, None)
        if awaited is not None:
            awaited[-1].cancel()

    async def ask(
        self, frontend_id: str, request_id: str, order_id: str, role: WorkerRole
    ) -> TakeReply | None:
        """The request's tokens, from its frontend; None: it does not answer."""
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

    def _give_up(self, order_id: str, late: Callable[[], object]) -> None:
        del self._awaited[order_id]
        late()

    def _on_given(self, message: TokensGiven) -> None:
        awaited = self._awaited.get(message.order_id)
        if awaited is not None and awaited[0] == message.frontend_id:
            self.forget(message.order_id)
            awaited[1](message.taken)
            return
        self._early[message.frontend_id, message.order_id] = message.taken
        while len(self._early) > EARLY_ORDERS_MAX:
            self._early.popitem(last=False)
