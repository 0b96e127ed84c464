"""KV elsewhere in the shell of a decode worker: its sequences' at others, or theirs here. Nothing is decided here."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from halfmoon.bus.errors import BusError
from halfmoon.schemas import subjects
from halfmoon.schemas.lending import HoldReply
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.store.pool.segment import PoolView
from halfmoon.workers.attention.actions import HoldAction
from halfmoon.workers.attention.errors import LenderLost, PartRefused
from halfmoon.workers.attention.hold_service import HoldService
from halfmoon.workers.decode import events
from halfmoon.workers.decode.actions import AskHold, PushTail, PushTokens
from halfmoon.workers.worker import Worker, now

if TYPE_CHECKING:
    from halfmoon.workers.attention.pusher import Pusher
    from halfmoon.workers.decode.borrower import Borrower

#: How long another worker may take to load a part.
HOLD_S = 30.0


class KvElsewhere:
    """Feeds the machine of `worker`. `borrower`: None where the worker neither lends nor borrows."""

    def __init__(self, worker: Worker, engine: Any) -> None:
        self._worker = worker
        self.borrower: Borrower | None = None
        self._holds: HoldService | None = None
        self._pusher: Pusher | None = None
        config = worker.config
        if config.lending is None:
            return
        # They import torch, which a worker without a model does not wait for.
        from halfmoon.workers.attention.lender import Lender
        from halfmoon.workers.attention.pusher import Pusher
        from halfmoon.workers.decode.borrower import Borrower
        from halfmoon.workers.decode.group_choice import GroupChoice

        hello, options = config.lending.hello, config.lending.options
        if config.cache_elsewhere:
            choice = GroupChoice(config.decode_groups, config.profile, hello)
            self.borrower = Borrower(engine, hello, options, choice)
        else:
            self._holds = HoldService(worker, Lender(engine, config.layout, hello, options))
            self.borrower = Borrower(engine, hello, options)
            self._pusher = Pusher(engine.cache, hello, options)

    async def open(self, pool: PoolView | None) -> None:
        """From now on others may ask for room, if this worker lends. `pool`: of its node."""
        if self._holds is not None:
            await self._holds.open(pool)

    async def close(self) -> None:
        if self._holds is not None:
            await self._holds.close()
        if self._pusher is not None:
            await asyncio.to_thread(self._pusher.close)

    def do(self, action: HoldAction) -> None:
        """Obey an action on holds of others."""
        assert self._holds is not None
        self._holds.do(action)

    async def ask(self, ask: AskHold) -> None:
        """PartHeld or PartNotHeld follows."""
        if ask.after_ns:
            await asyncio.sleep(ask.after_ns / SECOND_NS)
        worker, request = self._worker, ask.request
        order_id, worker_id, plan_id = request.order_id, ask.worker_id, request.plan_id
        reply = HoldReply(refused="this worker does not lend")
        if self.borrower is not None:
            subject = subjects.hold(worker_id, worker.config.worker_id)
            try:
                reply = await worker.bus.request(subject, request, HoldReply, timeout_s=HOLD_S)
            except BusError as problem:
                reply = HoldReply(refused=str(problem)[:500])
        if reply.refused or self.borrower is None:
            worker.hear(
                events.PartNotHeld(
                    order_id=order_id, worker_id=worker_id, reason=reply.refused, plan_id=plan_id, **now()
                )
            )
        else:
            self.borrower.addresses[worker_id] = reply.addresses
            worker.hear(
                events.PartHeld(
                    order_id=order_id, worker_id=worker_id, hold=reply.hold, plan_id=plan_id, **now()
                )
            )

    async def push(self, push: PushTokens) -> None:
        """TokensPushed follows."""
        assert self._pusher is not None
        assert self.borrower is not None
        addresses = self.borrower.addresses[push.worker_id]
        moved_bytes, problem = 0, ""
        try:
            moved_bytes = await self._pusher.push(
                push.worker_id, addresses, push.hold, push.blocks, push.first, push.tokens
            )
        except (LenderLost, PartRefused) as error:
            problem = str(error) or type(error).__name__
        self._worker.hear(events.TokensPushed(moved_bytes=moved_bytes, problem=problem, **now()))

    async def push_tail(self, tail: PushTail) -> None:
        """TailPushed follows."""
        borrower, problem = self.borrower, ""
        assert borrower is not None
        try:
            await self._worker.on_copy_thread(lambda: borrower.push(tail))
        except LenderLost as lost:
            problem = f"{lost.worker_id}: {lost}"
        self._worker.hear(events.TailPushed(order_id=tail.order_id, problem=problem, **now()))
