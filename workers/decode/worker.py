"""The shell of the decode machine: feeds it what happens, and does what it says. Nothing is decided here.

Orders and KV progress come from the bus. The compute thread steps the batch and swaps sequences out and in; the copy
thread moves KV between the node's pool and the engine's cache meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypedDict, assert_never

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError
from halfmoon.bus.tail import StreamTail
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, StartDecode
from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.lending import HoldReply, HoldRequest
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import ResendReply, ResendRequest
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.errors import StoreError
from halfmoon.workers import machines
from halfmoon.workers.attention.errors import LenderLost
from halfmoon.workers.decode import events
from halfmoon.workers.decode.actions import (
    Action,
    AnswerHold,
    AnswerResend,
    AskHold,
    CopyLayers,
    Deliver,
    DropHold,
    EndSpan,
    LoadHold,
    Measure,
    OfferHold,
    Release,
    RunStep,
    ShareOutput,
    SwapIn,
    SwapOut,
    Wake,
)
from halfmoon.workers.decode.borrower import Borrower
from halfmoon.workers.decode.cache_copies import copy_in, copy_layers, copy_out
from halfmoon.workers.decode.lender import Lender, load_hold
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.decode.shared_output import share_output
from halfmoon.workers.decode.spans import end_decode
from halfmoon.workers.decode.state import DecodeState
from halfmoon.workers.machines import Announce, Report, TakeTokens
from halfmoon.workers.sample_requests import request_of, token_of
from halfmoon.workers.worker import Worker, WorkerConfig

if TYPE_CHECKING:
    from halfmoon.workers.decode.borrower import Borrower
    from halfmoon.workers.decode.lender import Lender

#: How long another worker may take to load a part.
HOLD_S = 30.0


class Now(TypedDict):
    """The times that every event carries."""

    at_ns: int
    wall_ns: int


def now() -> Now:
    """The time by both clocks."""
    return {"at_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}


class DecodeWorker(Worker):
    """See the module; every decision is in `state`."""

    role = "decode"

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
        self._lender: Lender | None = None
        self._borrower: Borrower | None = None
        if config.lending is not None:
            # They import torch, which a worker without a model does not wait for.
            from halfmoon.workers.decode.borrower import Borrower
            from halfmoon.workers.decode.lender import Lender

            hello, options = config.lending.hello, config.lending.options
            self._lender = Lender(engine, config.layout, hello, options)
            segment_blocks = config.layout.segment_tokens // config.layout.block_tokens
            self._borrower = Borrower(engine, segment_blocks, hello, options)
        #: Who asked to have something held, by the number that the machine knows the question by.
        self._hold_asks: dict[int, asyncio.Future[AnswerHold]] = {}
        self._ask_number = 0
        self._awake = asyncio.Event()
        #: The next instruction for the compute thread.
        self._work: RunStep | SwapOut | SwapIn | None = None

    async def prepare(self) -> None:
        self._pool = await self.store.attach() if self.store else None
        if self.store is not None:
            self.store.restarted.append(lambda: self._feed(events.MemoryLost(**now())))
            # Nobody else does, once the push that filled the slots is closed.
            self.store.kept_too.append(self.state.orders.leased)
        asked = subjects.resend(self.config.worker_id, "*")
        await self.bus.serve(asked, ResendRequest, self._resend, author="frontend_id")
        if self._lender is not None:
            asked = subjects.hold(self.config.worker_id, "*")
            await self.bus.serve(asked, HoldRequest, self._hold, author="owner_id")
        self.spawn(self._follow_kv(await self.bus.open_kv(self.config.worker_id)))
        self.spawn(self._compute_all())

    def obey(self, decision: Decision) -> None:
        match decision:
            case StartDecode():
                self._feed(events.DecodeOrdered(order=decision, **now()))
            case CancelOrder():
                self._feed(machines.OrderCancelled(order_id=decision.order_id, **now()))
            case AnnounceYourself():
                self._feed(machines.AnnounceRequested(**now()))
            case _:
                pass  # not for a decode worker

    def heartbeat(self) -> WorkerHeartbeat:
        return self.state.heartbeat(self.obeyed_seq)

    def orders_open(self) -> int:
        return len(self.state.orders.open) + len(self.state.orders.holds.order_ids())

    def kv_blocks_used(self) -> int:
        return self.state.kv_blocks_used

    async def release_all(self) -> None:
        for action in self.state.on(machines.WorkerStopped(**now())):
            if isinstance(action, Release):
                await self._release(action)
            else:
                self._do(action)
        if self._lender is not None:
            await asyncio.to_thread(self._lender.close)

    # --- the machine ----------------------------------------------------------------------------------------

    def _feed(self, event: events.Event) -> None:
        """Tell the machine what happened, and obey."""
        for action in self.state.on(event):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Deliver():
                self.bus.publish_soon(
                    subjects.tokens(action.frontend_id, self.config.worker_id), action.message
                )
            case RunStep() | SwapOut() | SwapIn():
                assert self._work is None, (self._work, action)
                self._work = action
            case Report():
                self.report(action.event)
            case Wake():
                self._awake.set()
            case CopyLayers():
                self.spawn(self._copy(action))
            case TakeTokens():
                self.spawn(self._take(action))
            case Release():
                self.spawn(self._release(action))
            case Measure():
                self.metrics.waited(action.name, action.elapsed_ns)
            case EndSpan():
                end_decode(self.tracing, action, self.config.worker_id)
            case ShareOutput():
                self.spawn(self._share(action))
            case AskHold():
                self.spawn(self._ask_hold(action))
            case AnswerHold():
                self._hold_asks.pop(action.ask_id).set_result(action)
            case LoadHold():
                self.spawn(self._load_hold(action))
            case OfferHold():
                assert self._lender is not None
                self._lender.offer(action.hold, action.blocks)
            case DropHold():
                assert self._lender is not None
                self._lender.drop(action.hold)
            case Announce():
                self.announce()
            case AnswerResend():
                raise AssertionError("a reply to nobody")
            case _:
                assert_never(action)

    # --- the bus --------------------------------------------------------------------------------------------

    async def _follow_kv(self, reader: StreamTail) -> None:
        async for author_id, message in self.bus.follow_kv(reader):
            self._feed(events.KvHeard(author_id=author_id, message=message, **now()))

    async def _take(self, ask: TakeTokens) -> None:
        reply = await self.inbox.take(ask.frontend_id, ask.request_id, ask.order_id, "decode")
        self._feed(machines.TokensTaken(order_id=ask.order_id, reply=reply, **now()))

    def _resend(self, request: ResendRequest) -> ResendReply:
        (answer,) = self.state.on(events.ResendRequested(request=request, **now()))
        assert isinstance(answer, AnswerResend), answer
        return answer.reply

    async def _hold(self, request: HoldRequest) -> HoldReply:
        """Another decode worker asks."""
        self._ask_number += 1
        answer: asyncio.Future[AnswerHold] = self._loop.create_future()
        self._hold_asks[self._ask_number] = answer
        self._feed(events.HoldAsked(ask_id=self._ask_number, request=request, **now()))
        found = await answer
        assert self._lender is not None
        addresses = [] if found.refused else self._lender.addresses
        return HoldReply(hold=found.hold, addresses=addresses, refused=found.refused[:500])

    async def _ask_hold(self, ask: AskHold) -> None:
        if ask.after_ns:
            await asyncio.sleep(ask.after_ns / SECOND_NS)
        order_id, worker_id = ask.request.order_id, ask.worker_id
        reply = HoldReply(refused="this worker does not lend")
        if self._borrower is not None:
            subject = subjects.hold(worker_id, self.config.worker_id)
            try:
                reply = await self.bus.request(subject, ask.request, HoldReply, timeout_s=HOLD_S)
            except BusError as problem:
                reply = HoldReply(refused=str(problem)[:500])
        if reply.refused or self._borrower is None:
            self._feed(
                events.PartNotHeld(order_id=order_id, worker_id=worker_id, reason=reply.refused, **now())
            )
        else:
            self._borrower.addresses[worker_id] = reply.addresses
            self._feed(events.PartHeld(order_id=order_id, worker_id=worker_id, hold=reply.hold, **now()))

    async def _load_hold(self, load: LoadHold) -> None:
        assert self.store is not None
        assert self._pool is not None

        problem = ""
        try:
            await load_hold(
                self.store,
                self._pool,
                self.engine.cache,
                self.config.layout,
                load,
                lambda copy: self._loop.run_in_executor(self._copies, copy),
            )
        except (StoreError, BusError) as error:
            problem = str(error) or type(error).__name__
        self._feed(events.HoldLoaded(hold=load.hold, problem=problem, **now()))

    async def _release(self, release: Release) -> None:
        if release.after_ns:
            await asyncio.sleep(release.after_ns / SECOND_NS)
        assert self.store is not None
        with contextlib.suppress(StoreError, BusError):  # the lease's own end takes care of it
            await self.store.release(release.order_id)

    # --- the copy thread ------------------------------------------------------------------------------------

    async def _copy(self, order: CopyLayers) -> None:
        assert self._pool is not None
        cache, pool, copies = self.engine.cache, self._pool, order.copies
        await self._loop.run_in_executor(self._copies, copy_layers, cache, pool, copies)
        self._feed(events.LayersCopied(copy_id=order.copy_id, **now()))

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
                lambda copy: self._loop.run_in_executor(self._copies, copy),
            )
        finally:
            self._feed(events.OutputShared(order_id=output.order_id, **now()))

    # --- the compute thread ---------------------------------------------------------------------------------

    async def _compute_all(self) -> None:
        while True:
            self._feed(events.EngineIdled(**now()))
            work, self._work = self._work, None
            match work:
                case None:
                    await self._awake.wait()
                    self._awake.clear()
                case RunStep():
                    await self._run_step(work)
                case SwapOut():
                    held = await self.compute(copy_out, self.engine.cache, work.table)
                    self._feed(events.SwappedOut(held=held, **now()))
                case SwapIn():
                    await self.compute(copy_in, self.engine.cache, work.table, work.held)
                    self._feed(events.SwappedIn(**now()))

    async def _run_step(self, step: RunStep) -> None:
        started_ns = time.monotonic_ns()
        try:
            tokens = await self.compute(self._sample, step.batch)
        except LenderLost as lost:
            self._feed(events.StepFailed(worker_id=lost.worker_id, reason=str(lost), **now()))
            return
        step_ns = time.monotonic_ns() - started_ns
        self.metrics.stepped(step_ns, len(step.batch), step.context_tokens)
        self._feed(events.StepEnded(tokens=tokens, step_ns=step_ns, **now()))
        if self.config.layout.layers == 0:
            await asyncio.sleep(0)  # an engine that computes nothing must not starve the loop

    def _sample(self, batch: list[DecodeSequence]) -> list[SampledToken]:
        """On the compute thread: one token of each sequence. Known tokens (a replay) are not drawn.

        Raises LenderLost.
        """
        if self._borrower is not None:
            logits = self._borrower.decode(batch)
        else:
            logits = self.engine.decode(
                [s.output[-1] for s in batch], [s.length for s in batch], [s.table for s in batch]
            )
        requests = [request_of(self.engine, s.params, s.sampling, s.prompt, s.output) for s in batch]
        sampled = self.engine.sample_rows(logits, requests)
        return [
            s.next_known() or token_of(self.engine, one, s.sampling, logits[row])
            for row, (s, one) in enumerate(zip(batch, sampled, strict=True))
        ]
