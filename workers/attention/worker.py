"""The shell of an attention worker: it attends to KV of sequences that others decode. Nothing is decided here.

It has no weights: its `engine` is a cache and the attention operator (`halfmoon.workers.model.attention.engine`).
"""

from __future__ import annotations

import time
from typing import Any, assert_never

from halfmoon.bus.connection import Bus
from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision
from halfmoon.store.agent_client import AgentClient
from halfmoon.workers.attention.actions import AnswerHold, DropHold, LoadHold, OfferHold
from halfmoon.workers.attention.hold_service import HoldService
from halfmoon.workers.attention.lender import Lender
from halfmoon.workers.attention.state import Action, AttentionState
from halfmoon.workers.machines import Announce, AnnounceRequested, OrderCancelled, WorkerStopped
from halfmoon.workers.worker import Worker, WorkerConfig


class AttentionWorker(Worker):
    """See the module; every decision is in `state`."""

    role = "attention"
    state: AttentionState
    takes_tokens = False

    def __init__(self, bus: Bus, engine: Any, store: AgentClient | None, config: WorkerConfig) -> None:
        super().__init__(bus, engine, store, config)
        self.state = AttentionState(
            worker_id=config.worker_id,
            incarnation=self.incarnation,
            layout=config.layout,
            kv_blocks=config.kv_blocks,
            first_kv_head=config.first_kv_head,
            kv_heads=config.kv_heads,
        )
        assert config.lending is not None, "nobody can reach it"
        lender = Lender(engine, config.layout, config.lending.hello, config.lending.options)
        self._holds = HoldService(self, lender)

    async def prepare(self) -> None:
        assert self.store is not None
        await self._holds.open(await self.store.attach())

    def obey(self, decision: Decision) -> None:
        match decision:
            case CancelOrder():
                self.hear(OrderCancelled(order_id=decision.order_id, at_ns=time.monotonic_ns()))
            case AnnounceYourself():
                self.hear(AnnounceRequested(at_ns=time.monotonic_ns()))
            case _:
                pass  # not for an attention worker

    def orders_open(self) -> int:
        return len(self.state.holds.order_ids())

    async def release_all(self) -> None:
        self.hear(WorkerStopped(at_ns=time.monotonic_ns()))
        await self._holds.close()

    def obey_action(self, action: Action) -> None:
        match action:
            case Announce():
                self.announce()
            case AnswerHold() | LoadHold() | OfferHold() | DropHold():
                self._holds.do(action)
            case _:
                assert_never(action)
