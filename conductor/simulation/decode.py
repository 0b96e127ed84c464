"""A simulated decode worker: the time that `halfmoon.workers.decode.worker` takes.

An order waits for its first token (then the worker checks the SLO once more) and for its KV, then joins the batch
between two steps, when there is room for all that it will grow to. So nothing is ever swapped out, which the real
worker does when a growing batch needs more room than there is.
"""

from __future__ import annotations

from collections import deque

from halfmoon.conductor.simulation.batch import StepMeans, Steps, tbt_ns
from halfmoon.conductor.simulation.context import SimulationContext
from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.events import DecodeRefused, DecodeStarted, WorkerHeartbeat


class SimulatedSequence:
    """One order in hand."""

    __slots__ = (
        "blocks",
        "first_ns",
        "joined",
        "joined_ns",
        "kv_there",
        "order",
        "output_tokens",
    )

    def __init__(self, order: StartDecode, output_tokens: int, blocks: int) -> None:
        self.order, self.output_tokens, self.blocks = order, output_tokens, blocks
        self.kv_there = False
        self.first_ns = self.joined_ns = -1
        #: Steps that the worker had made when it joined.
        self.joined = 0


class SimulatedDecode:
    """Answers every StartDecode by RequestFinished or DecodeRefused, unless it is cancelled."""

    def __init__(
        self, context: SimulationContext, worker_id: str, kv_blocks: int, *, incarnation: str = "i1"
    ) -> None:
        self.incarnation = incarnation
        self.context, self.worker_id = context, worker_id
        self.steps = Steps(context.profile.cost)
        self.open: dict[str, SimulatedSequence] = {}
        self.waiting: deque[SimulatedSequence] = deque()
        self.batch: dict[str, SimulatedSequence] = {}
        self.blocks_free = kv_blocks
        self.epoch = 0
        self.obeyed_seq = 0
        #: Time computed. It computes no prompts.
        self.prefill_ns = self.decode_ns = 0
        self._means = StepMeans()

    def heartbeat(self) -> WorkerHeartbeat:
        steps, step_ns, sequences, context_tokens = self._means.take()
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            queued=len(self.waiting),
            running=len(self.batch),
            steps=steps,
            step_ns=step_ns,
            step_sequences=sequences,
            step_context_tokens=context_tokens,
            orders=list(self.open),
            obeyed_seq=self.obeyed_seq,
        )

    @property
    def running(self) -> int:
        return len(self.batch)

    def present_step_ns(self) -> float:
        """A step of those that decode now; 0 for none."""
        return self.steps.step_ns(self.steps.sequences, self.steps.context_tokens) if self.batch else 0.0

    def orders_open(self) -> int:
        return len(self.open)

    def start(self, order: StartDecode) -> None:
        context = self.context
        output = context.outcomes[order.request_id].output_tokens
        blocks = -(-(order.prompt_tokens + output) // context.block_tokens)
        self.open[order.order_id] = SimulatedSequence(order, output, blocks)

    def cancel(self, order_id: str) -> None:
        sequence = self.open.pop(order_id, None)
        if sequence is None:
            return
        if order_id in self.batch:
            self._stop_run(self.context.clock.now_ns, order_id)
            self._start_run()
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def first_token(self, order_id: str) -> None:
        """Prefill is done: the double check, then the client has its first token."""
        sequence = self.open.get(order_id)
        if sequence is None:
            return
        context, order, steps = self.context, sequence.order, self.steps
        outcome = context.outcomes[order.request_id]
        step_ns = int(steps.step_ns(steps.sequences + 1, steps.context_tokens + order.prompt_tokens))
        if order.placement == 1 and order.tbt_slo_ns and step_ns > order.tbt_slo_ns:
            del self.open[order_id]
            outcome.wasted = True
            context.say(
                DecodeRefused(
                    order_id=order_id,
                    request_id=order.request_id,
                    worker_id=self.worker_id,
                    reason=f"a step would take {step_ns // 1_000_000} ms, over the SLO",
                    predicted_tbt_ns=step_ns,
                )
            )
            return
        sequence.first_ns = context.clock.now_ns
        outcome.first_token_ns = sequence.first_ns
        if sequence.output_tokens == 1:
            self._finish(sequence, 0, [])
        elif sequence.kv_there:
            self._ready(sequence)

    def kv_there(self, order_id: str) -> None:
        sequence = self.open.get(order_id)
        if sequence is None:
            return
        sequence.kv_there = True
        if sequence.first_ns >= 0:
            self._ready(sequence)

    # --- the batch ------------------------------------------------------------------------------------------

    def _ready(self, sequence: SimulatedSequence) -> None:
        self.waiting.append(sequence)
        if not self.batch:
            self._start_run()
        elif self._fits(sequence) and self.waiting[0] is sequence:
            self._book(self.steps.steps_until(self.context.clock.now_ns))

    def _fits(self, sequence: SimulatedSequence) -> bool:
        return len(self.batch) < self.context.profile.batch_max and sequence.blocks <= self.blocks_free

    def _start_run(self) -> None:
        """Requests that wait and fit join the batch; the next run starts now."""
        now_ns = self.context.clock.now_ns
        while self.waiting and self._fits(self.waiting[0]):
            self._join(self.waiting.popleft(), now_ns)
        self.epoch += 1
        if self.batch:
            self.steps.start_run(now_ns, self.context.clock.jitter())
            self._book(self.steps.steps_to_end())

    def _book(self, steps: int) -> None:
        """The run ends after `steps`, or before when a sequence ends."""
        steps = min(steps, self.steps.steps_to_end())
        self.epoch += 1
        self.context.clock.at(
            self.steps.since_ns + self.steps.run_ns(steps), self._run_over, steps, self.epoch
        )

    def _join(self, sequence: SimulatedSequence, now_ns: int) -> None:
        order = sequence.order
        sequence.joined_ns, sequence.joined = now_ns, self.steps.made
        self.blocks_free -= sequence.blocks
        self.batch[order.order_id] = sequence
        self.steps.join(order.order_id, order.prompt_tokens + 1, sequence.output_tokens - 1)
        self.context.say(
            DecodeStarted(
                order_id=order.order_id,
                request_id=order.request_id,
                worker_id=self.worker_id,
                wait_ns=now_ns - sequence.first_ns,
            )
        )

    def _run_over(self, steps: int, epoch: int) -> None:
        if epoch != self.epoch:
            return
        for order_id in self._advance(steps):
            sequence = self.batch[order_id]
            decode_ns = self.context.clock.now_ns - sequence.joined_ns
            intervals = self.steps.intervals(sequence.joined)
            # The second token waited for the KV and for the step before.
            length, count = intervals[0]
            intervals[0] = (length, count - 1)
            intervals.append((length + sequence.joined_ns - sequence.first_ns, 1))
            self._leave(sequence)
            self._finish(sequence, decode_ns, intervals)
        self._start_run()

    def _advance(self, steps: int) -> list[str]:
        took_ns = self.steps.run_ns(steps)
        self.decode_ns += took_ns
        sequences, context_tokens = self.steps.sequences, self.steps.context_tokens
        context_steps = steps * (context_tokens + sequences * (steps - 1) // 2)
        self._means.add(steps, took_ns, steps * sequences, context_steps)
        return self.steps.advance(steps)

    def _stop_run(self, now_ns: int, order_id: str) -> None:
        """The run ends for one that is cancelled. The step under way counts as made, unless it is somebody's
        last.
        """
        self._advance(min(self.steps.steps_until(now_ns), self.steps.steps_to_end() - 1))
        self._leave(self.batch[order_id])

    def _leave(self, sequence: SimulatedSequence) -> None:
        order = sequence.order
        del self.batch[order.order_id]
        self.blocks_free += sequence.blocks
        context = order.prompt_tokens + 1 + self.steps.made - sequence.joined
        self.steps.leave(order.order_id, context)

    def _finish(
        self, sequence: SimulatedSequence, decode_ns: int, intervals: list[tuple[float, int]]
    ) -> None:
        order = sequence.order
        self.open.pop(order.order_id, None)
        self.context.finish(
            order, completion_tokens=sequence.output_tokens, tbt_ns=tbt_ns(intervals), decode_ns=decode_ns
        )
