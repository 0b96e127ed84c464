"""The shell of the decode machine: feeds it events and obeys its actions. Nothing is decided here.

Orders and KV progress come from the bus. The compute thread steps the batch and swaps sequences out and in; the copy
thread moves KV between the node's pool and the engine's cache meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, assert_never

import msgspec

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError
from halfmoon.bus.tail import StreamTail
from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, EndMove, MoveKv, StartDecode
from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.errors import StoreError
from halfmoon.workers import machines
from halfmoon.workers.attention.actions import AnswerHold, DropHold, LoadHold, OfferHold
from halfmoon.workers.attention.errors import LenderLost
from halfmoon.workers.decode import events
from halfmoon.workers.decode.actions import (
    Action,
    AskHold,
    CopyLayers,
    EndSpan,
    Measure,
    PushTail,
    PushTokens,
    Release,
    RunStep,
    ShareOutput,
    SwapIn,
    SwapOut,
    Wake,
)
from halfmoon.workers.decode.cache_copies import copy_in, copy_layers, copy_out, share_output
from halfmoon.workers.decode.elsewhere import KvElsewhere
from halfmoon.workers.decode.spans import end_decode
from halfmoon.workers.decode.state import DecodeState
from halfmoon.workers.decode.step import next_tokens
from halfmoon.workers.machines import Announce, AnswerResend, Deliver, Report, TakeTokens
from halfmoon.workers.worker import Worker, WorkerConfig, now


class DecodeWorker(Worker):
    """See the module; every decision is in `state`."""

    role = "decode"
    needs_prompts = False
    state: DecodeState

    def __init__(self, bus: Bus, engine: Any, store: AgentClient | None, config: WorkerConfig) -> None:
        super().__init__(bus, engine, store, config)
        self.state = DecodeState(
            worker_id=config.worker_id,
            node_id=config.node_id,
            incarnation=self.incarnation,
            layout=config.layout,
            kv_blocks=config.kv_blocks,
            batch_max=config.batch_max,
            profile=config.profile,
            has_store=store is not None,
            eos_ids=frozenset(engine.config.eos_token_ids),
        )
        self._elsewhere = KvElsewhere(self, engine)
        self._awake = asyncio.Event()
        #: The next instruction for the compute thread.
        self._work: RunStep | SwapOut | SwapIn | None = None

    async def prepare(self) -> None:
        self._pool = await self.store.attach() if self.store else None
        if self.store is not None:
            self.store.restarted.append(lambda: self.hear(events.MemoryLost(**now())))
            # Nobody else does, once the push that filled the slots is closed.
            self.store.kept_too.append(self.state.orders.leased)
        await self.serve_resends()
        await self._elsewhere.open(self._pool)
        self.spawn(self._follow_kv(await self.bus.open_kv(self.config.worker_id)))
        self.spawn(self._compute_all())

    def obey(self, decision: Decision) -> None:
        match decision:
            case StartDecode():
                self.hear(events.DecodeOrdered(order=decision, **now()))
            case MoveKv():
                self.hear(events.MoveOrdered(order=decision, **now()))
            case EndMove():
                self.hear(events.MoveEnded(plan_id=decision.plan_id, **now()))
            case CancelOrder():
                self.hear(machines.OrderCancelled(order_id=decision.order_id, **now()))
            case AnnounceYourself():
                self.hear(machines.AnnounceRequested(**now()))
            case _:
                pass  # not for a decode worker

    def heartbeat(self) -> WorkerHeartbeat:
        found = super().heartbeat()
        borrower = self._elsewhere.borrower
        return msgspec.structs.replace(found, groups=borrower.groups) if borrower else found

    def orders_open(self) -> int:
        return len(self.state.orders.open) + len(self.state.orders.holds.order_ids())

    def lends(self) -> bool:
        return self.config.lending is not None and not self.config.cache_elsewhere

    async def release_all(self) -> None:
        for action in self.state.on(machines.WorkerStopped(**now())):
            if isinstance(action, Release):
                await self._release(action)
            else:
                self.obey_action(action)
        await self._elsewhere.close()

    # --- the machine ----------------------------------------------------------------------------------------

    def obey_action(self, action: Action) -> None:
        match action:
            case Deliver():
                self.deliver(action)
            case RunStep() | SwapOut() | SwapIn():
                assert self._work is None, (self._work, action)
                self._work = action
            case Report():
                self.report(action.event)
            case Wake():
                self._awake.set()
            case PushTail():
                self.spawn(self._elsewhere.push_tail(action))
            case CopyLayers():
                self.spawn(self._copy(action))
            case TakeTokens():
                if not self.hear_given(action):
                    self.spawn(self.take_tokens(action))
            case Release():
                self.spawn(self._release(action))
            case Measure():
                self.metrics.waited(action.name, action.elapsed_ns)
            case EndSpan():
                end_decode(self.tracing, action, self.config.worker_id)
            case PushTokens():
                self.spawn(self._elsewhere.push(action))
            case ShareOutput():
                self.spawn(self._share(action))
            case AskHold():
                self.spawn(self._elsewhere.ask(action))
            case AnswerHold() | LoadHold() | OfferHold() | DropHold():
                self._elsewhere.do(action)
            case Announce():
                self.announce()
            case AnswerResend():
                raise AssertionError("a reply to nobody")
            case _:
                assert_never(action)

    # --- the bus --------------------------------------------------------------------------------------------

    async def _follow_kv(self, reader: StreamTail) -> None:
        async for author_id, message in self.bus.follow_kv(reader):
            self.hear(events.KvHeard(author_id=author_id, message=message, **now()))

    async def _release(self, release: Release) -> None:
        if release.after_ns:
            await asyncio.sleep(release.after_ns / SECOND_NS)
        assert self.store is not None
        if release.confirm:
            held = False
            with contextlib.suppress(StoreError, BusError):
                await self.store.require_held(release.order_id)
                held = True
            self.hear(events.LeaseConfirmed(order_id=release.order_id, held=held, **now()))
        with contextlib.suppress(StoreError, BusError):  # the lease's own end takes care of it
            await self.store.release(release.order_id)

    # --- the copy thread ------------------------------------------------------------------------------------

    async def _copy(self, order: CopyLayers) -> None:
        assert self._pool is not None
        cache, pool = self.engine.cache, self._pool
        problem = await self._loop.run_in_executor(self._copies, copy_layers, cache, pool, order)
        self.hear(events.LayersCopied(copy_id=order.copy_id, problem=problem, **now()))

    async def _share(self, output: ShareOutput) -> None:
        assert self.store is not None
        assert self._pool is not None
        try:
            await share_output(
                self.store,
                self._pool,
                self.engine.cache,
                self.config.layout,
                output,
                self.on_copy_thread,
            )
        finally:
            self.hear(events.OutputShared(order_id=output.order_id, **now()))

    # --- the compute thread ---------------------------------------------------------------------------------

    async def _compute_all(self) -> None:
        while True:
            self.hear(events.EngineIdled(**now()))
            work, self._work = self._work, None
            match work:
                case None:
                    await self._awake.wait()
                    self._awake.clear()
                case RunStep():
                    await self._run_step(work)
                case SwapOut():
                    held = await self.compute(copy_out, self.engine.cache, work.table)
                    self.hear(events.SwappedOut(held=held, **now()))
                case SwapIn():
                    await self.compute(copy_in, self.engine.cache, work.table, work.held)
                    self.hear(events.SwappedIn(**now()))

    async def _run_step(self, step: RunStep) -> None:
        started_ns, borrower = time.monotonic_ns(), self._elsewhere.borrower
        try:
            tokens = await self.compute(next_tokens, self.engine, borrower, step.batch)
        except LenderLost as lost:
            failed = events.StepFailed(worker_id=lost.worker_id, reason=str(lost), hold=lost.hold, **now())
            self.hear(failed)
            return
        step_ns = time.monotonic_ns() - started_ns
        self.metrics.stepped(step_ns, len(step.batch), step.context_tokens)
        waits_ns = borrower.waits_ns if borrower is not None else {}
        self.hear(events.StepEnded(tokens=tokens, step_ns=step_ns, waits_ns=waits_ns, **now()))
        if self.config.layout.layers == 0:
            await asyncio.sleep(0)  # an engine that computes nothing must not starve the loop
