"""The mixed worker: prompts and answers in one loop, over one cache.

The shell of `MixedState`: it feeds the machine events and obeys its actions. Nothing is decided here.

Source: Sarathi-Serve (OSDI'24), section 4.
"""

from __future__ import annotations

import asyncio
import time
from typing import assert_never

from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, StartMixed
from halfmoon.store.errors import LeaseLost
from halfmoon.workers import machines
from halfmoon.workers.decode import events as decode_events
from halfmoon.workers.decode.actions import EndSpan, Measure, Wake
from halfmoon.workers.decode.spans import end_decode
from halfmoon.workers.machines import Announce, AnswerResend, Deliver, Report, TakeTokens
from halfmoon.workers.mixed import iteration
from halfmoon.workers.mixed.actions import Action, RunIteration
from halfmoon.workers.mixed.events import IterationMade, MixedOrdered
from halfmoon.workers.mixed.state import MixedState
from halfmoon.workers.prefill.actions import (
    BeginSpan,
    CommitPrompt,
    ComputePrompt,
    ComputeStage,
    DrawFirstToken,
    DropStage,
    EndOrder,
    EndPush,
    FailLoads,
    FailReference,
    FetchReference,
    LoadLayers,
    LoadReference,
    PauseOrder,
    ReserveReference,
    ReserveSlots,
    SendLayer,
    SendResult,
    StartFetch,
    StartPush,
    StopComputing,
)
from halfmoon.workers.prefill.kept_prompts import KeptPrompts
from halfmoon.workers.prefill.prompt_worker import PromptWorker


class MixedWorker(PromptWorker):
    """See the module; every decision is in `state`."""

    role = "mixed"
    state: MixedState

    async def prepare(self) -> None:
        config = self.config
        self.state = MixedState(
            self.facts(self.engine.config.eos_token_ids),
            config.profile,
            batch_max=config.batch_max,
            budget_tokens=config.token_budget,
            iteration_ns=config.iteration_ns,
            prepared_max=config.prepared_max,
        )
        self._awake = asyncio.Event()
        self._kept = KeptPrompts()
        #: The next iteration of the compute thread.
        self._work: RunIteration | None = None
        await self.prepare_prompts()
        await self.serve_resends()
        self.spawn(self._compute_all())

    def obey(self, decision: Decision) -> None:
        now_ns = time.monotonic_ns()
        match decision:
            case StartMixed():
                self.hear(MixedOrdered(at_ns=now_ns, order=decision))
            case CancelOrder():
                self.hear(machines.OrderCancelled(at_ns=now_ns, order_id=decision.order_id))
            case AnnounceYourself():
                self.hear(machines.AnnounceRequested(at_ns=now_ns))
            case _:
                pass  # not for a mixed worker

    def orders_open(self) -> int:
        return self.state.orders_open()

    # --- the machine ----------------------------------------------------------------------------------------

    def obey_action(self, action: Action) -> None:
        match action:
            case RunIteration():
                assert self._work is None, (self._work, action)
                self._work = action
            case Deliver():
                self.deliver(action)
            case Wake():
                self._awake.set()
            case Report():
                self.report(action.event)
            case Measure():
                self.metrics.waited(action.name, action.elapsed_ns)
            case EndSpan():
                end_decode(self.tracing, action, self.config.worker_id)
            case Announce():
                self.announce()
            case (
                CommitPrompt()
                | TakeTokens()
                | BeginSpan()
                | ReserveSlots()
                | PauseOrder()
                | StartFetch()
                | EndOrder()
            ):
                self.prepare_further(action)
            case (
                AnswerResend()
                | StartPush()
                | ComputePrompt()
                | ComputeStage()
                | DropStage()
                | LoadLayers()
                | FailLoads()
                | ReserveReference()
                | FetchReference()
                | LoadReference()
                | FailReference()
                | StopComputing()
                | SendLayer()
                | DrawFirstToken()
                | SendResult()
                | EndPush()
            ):
                raise AssertionError(("not of a mixed worker's orders", action))
            case _:
                assert_never(action)

    # --- the compute thread ---------------------------------------------------------------------------------

    async def _compute_all(self) -> None:
        while True:
            self.hear(decode_events.EngineIdled(at_ns=time.monotonic_ns()))
            work, self._work = self._work, None
            if work is None:
                await self._awake.wait()
                self._awake.clear()
            else:
                await self._iterate(work)

    async def _iterate(self, step: RunIteration) -> None:
        started_ns = time.monotonic_ns()
        made = await self.compute(iteration.run, self.engine, self._pool, step, self._kept)
        lost = [load.order_id for load in step.loads if not self._is_unchanged(load.order_id)]
        step_ns = time.monotonic_ns() - started_ns
        if step.decodes and len(made.kept) == len(step.chunks):
            self.metrics.stepped(step_ns - made.load_ns, len(step.decodes), step.context_tokens)
        self.hear(
            IterationMade(
                at_ns=time.monotonic_ns(),
                wall_ns=time.time_ns(),
                decoded=made.decoded,
                first=made.first,
                step_ns=step_ns,
                load_ns=made.load_ns,
                lost=lost,
                kept=made.kept,
            )
        )
        if self.config.layout.layers == 0:
            await asyncio.sleep(0)  # an engine that computes nothing must not starve the loop

    def _is_unchanged(self, order_id: str) -> bool:
        """A lease that ended meanwhile (the process stood still) gave others the slots that were loaded from."""
        assert self.store is not None
        try:
            self.store.require_unchanged(order_id)
        except LeaseLost:
            return False
        return True
