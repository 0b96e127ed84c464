"""One StartStage order of a prefill worker: some layers of a prompt, for the worker that has its last ones. Pure.

::

    queued ─ prepared ─ computing ─ ended

It needs nothing of its own node: its inputs come over a channel once it has its turn, and its results go back over it.
It is answered when its part is over, well or not; the other worker answers the order.
"""

from __future__ import annotations

from halfmoon.schemas.decisions import StartStage
from halfmoon.schemas.events import StageFinished
from halfmoon.workers.machines import Report
from halfmoon.workers.prefill import actions
from halfmoon.workers.prefill.actions import Actions
from halfmoon.workers.prefill.events import StageEnded, StepOfOrder
from halfmoon.workers.prefill.stages import REASON_CHARACTERS_MAX, JobRules, PrefillStage


class StageJob:
    """Used by the machine as a `Job` is: `prepare`, `begin_turn`, `step` and `cancel` append their actions."""

    def __init__(self, order: StartStage, rules: JobRules) -> None:
        self.order = order
        self.order_id = order.order_id
        self.rules = rules
        self.stage = PrefillStage.QUEUED
        self.cancelled = False

    def prepare(self, out: Actions) -> None:
        """There is nothing to prepare."""
        assert self.stage is PrefillStage.QUEUED, self.stage
        self.stage = PrefillStage.PREPARED

    def begin_turn(self, at_ns: int, out: Actions) -> None:
        """The other worker's channel is waited for from now on, no longer than a layer of a prefix."""
        assert self.stage is PrefillStage.PREPARED, (self.stage, at_ns)
        self.stage = PrefillStage.COMPUTING
        order = self.order
        out.append(
            actions.ComputeStage(
                order_id=self.order_id,
                prefill_worker_id=order.prefill_worker_id,
                prompt_tokens=order.prompt_tokens,
                first_layer=order.stage.first_layer,
                layers=order.stage.layers,
            )
        )

    def cancel(self, out: Actions) -> None:
        """One that computes stops before its next layer."""
        if self.cancelled:
            return
        self.cancelled = True
        if self.stage is PrefillStage.COMPUTING:
            out.append(actions.StopComputing(order_id=self.order_id))
        else:
            self._end(out)

    def fail(self, reason: str, out: Actions, *, retryable: bool) -> None:
        """The worker leaves: nothing is answered."""
        assert self.cancelled, (reason, retryable)
        self._end(out)

    def step(self, event: StepOfOrder, out: Actions) -> None:
        if not isinstance(event, StageEnded) or self.stage is not PrefillStage.COMPUTING:
            return
        if not self.cancelled:
            finished = StageFinished(
                order_id=self.order_id,
                request_id=self.order.request_id,
                worker_id=self.rules.worker_id,
                elapsed_ns=event.elapsed_ns,
                compute_ns=event.compute_ns,
                reason=event.reason[:REASON_CHARACTERS_MAX],
            )
            out.append(Report(event=finished))
        self._end(out)

    def _end(self, out: Actions) -> None:
        self.stage = PrefillStage.ENDED
        # A channel that comes for it now finds nobody.
        out.append(actions.DropStage(order_id=self.order_id))
