"""Obeys `Holds`: answers requests to hold KV, loads the KV, offers it and drops it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, assert_never

from halfmoon.bus.errors import BusError
from halfmoon.schemas import subjects
from halfmoon.schemas.lending import HoldReply, HoldRequest
from halfmoon.store.errors import StoreError
from halfmoon.store.pool.segment import PoolView
from halfmoon.workers.attention.actions import AnswerHold, DropHold, HoldAction, LoadHold, OfferHold
from halfmoon.workers.attention.events import HoldAsked, HoldLoaded
from halfmoon.workers.attention.load_hold import load_hold
from halfmoon.workers.worker import Worker

if TYPE_CHECKING:
    from halfmoon.workers.attention.lender import Lender


class HoldService:
    """Feeds the machine of `worker`."""

    def __init__(self, worker: Worker, lender: Lender) -> None:
        self._worker, self._lender = worker, lender
        self._pool: PoolView | None = None
        #: Open requests to hold KV, by the machine's number for each.
        self._asks: dict[int, asyncio.Future[AnswerHold]] = {}
        self._ask_number = 0

    async def open(self, pool: PoolView | None) -> None:
        """From now on decode workers may ask. `pool`: of the worker's node."""
        self._pool = pool
        asked = subjects.hold(self._worker.config.worker_id, "*")
        await self._worker.bus.serve(asked, HoldRequest, self._answer, author="owner_id")

    async def close(self) -> None:
        await asyncio.to_thread(self._lender.close)

    async def _answer(self, request: HoldRequest) -> HoldReply:
        self._ask_number += 1
        answer: asyncio.Future[AnswerHold] = asyncio.get_running_loop().create_future()
        self._asks[self._ask_number] = answer
        self._worker.hear(HoldAsked(ask_id=self._ask_number, request=request, at_ns=time.monotonic_ns()))
        found = await answer
        addresses = [] if found.refused else self._lender.addresses
        return HoldReply(hold=found.hold, addresses=addresses, refused=found.refused[:500])

    def do(self, action: HoldAction) -> None:
        match action:
            case AnswerHold():
                self._asks.pop(action.ask_id).set_result(action)
            case LoadHold():
                self._worker.spawn(self._load(action))
            case OfferHold():
                self._lender.offer(action.hold, action.blocks, action.tokens, action.expected)
            case DropHold():
                self._lender.drop(action.hold)
            case _:
                assert_never(action)

    async def _load(self, load: LoadHold) -> None:
        worker = self._worker
        assert worker.store is not None
        assert self._pool is not None
        problem = ""
        try:
            await load_hold(
                worker.store,
                self._pool,
                worker.engine.cache,
                worker.config.layout,
                load,
                worker.on_copy_thread,
            )
        except (StoreError, BusError) as error:
            problem = str(error) or type(error).__name__
        self._worker.hear(HoldLoaded(hold=load.hold, problem=problem, at_ns=time.monotonic_ns()))
