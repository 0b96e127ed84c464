"""A simulated decode worker: the time that `halfmoon.workers.decode.worker` takes.

An order waits for its first token (then the worker checks the SLO once more) and for its KV, then joins the batch
between two steps, when there is room for all that it will grow to. So nothing is ever swapped out, which the real
worker does when a growing batch needs more room than there is.

What the conductor has lent is held at the others from the order on, and goes there from this worker's node once the
prompt is there. A move begins and ends between two steps; until its end the room is booked at both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from halfmoon.conductor.simulation.batch import StepMeans, Steps, tbt_ns
from halfmoon.conductor.simulation.context import SimulationContext
from halfmoon.conductor.simulation.lending import HeldRoom, MoveUnderWay, longest_wait_ns
from halfmoon.conductor.simulation.network import Transfer
from halfmoon.schemas.decisions import EndMove, Loan, MoveKv, StartDecode
from halfmoon.schemas.events import (
    DecodeRefused,
    DecodeStarted,
    KvMoved,
    KvMoveRefused,
    WorkerHeartbeat,
)


class SimulatedSequence:
    """One order in hand."""

    __slots__ = (
        "blocks",
        "first_ns",
        "joined",
        "joined_ns",
        "kv_there",
        "loans",
        "order",
        "output_tokens",
        "second_ns",
        "to_lenders",
    )

    def __init__(self, order: StartDecode, output_tokens: int, blocks: int) -> None:
        self.order, self.output_tokens, self.blocks = order, output_tokens, blocks
        self.kv_there = False
        #: Parts that others hold, `blocks` without them; and those on their way there.
        self.loans: list[Loan] = order.loans
        self.to_lenders: list[Transfer] = []
        self.first_ns = self.joined_ns = self.second_ns = -1
        #: Steps that the worker had made when it joined.
        self.joined = 0


class SimulatedDecode:
    """Answers every StartDecode by RequestFinished or DecodeRefused, unless it is cancelled."""

    def __init__(
        self,
        context: SimulationContext,
        worker_id: str,
        kv_blocks: int,
        others: Mapping[str, SimulatedDecode],
        *,
        incarnation: str = "i1",
    ) -> None:
        self.incarnation = incarnation
        #: All decode workers by id, who may hold parts of its sequences.
        self._others = others
        self.held = HeldRoom()
        #: Of what it holds, the tokens that are attended to in steps; its own sequences with loans; its move.
        self._lent_tokens = 0
        self._borrowing: dict[str, SimulatedSequence] = {}
        self._moving: MoveUnderWay | None = None
        self.context, self.worker_id = context, worker_id
        self.steps = Steps(context.profile.cost)
        self.open: dict[str, SimulatedSequence] = {}
        self.waiting: deque[SimulatedSequence] = deque()
        self.batch: dict[str, SimulatedSequence] = {}
        self.blocks_free = kv_blocks
        self.epoch = 0
        self.obeyed_seq = 0
        self.busy_ns = 0
        self._means = StepMeans()

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            queued=len(self.waiting),
            running=len(self.batch),
            **self._means.take(),
            orders=[*self.open, *self.held.orders],
            obeyed_seq=self.obeyed_seq,
        )

    def orders_open(self) -> int:
        return len(self.open) + len(self.held.orders)

    def start(self, order: StartDecode) -> None:
        context = self.context
        output = context.outcomes[order.request_id].output_tokens
        blocks = -(-(order.prompt_tokens + output) // context.block_tokens)
        for loan in order.loans:
            lent = loan.segments * context.segment_blocks
            blocks -= lent
            # The conductor has booked it there, and frees nothing before the worker does.
            if not self._others[loan.worker_id].hold(order.order_id, "", lent):
                raise AssertionError(("lent what is not free", order))
        self.open[order.order_id] = SimulatedSequence(order, output, blocks)

    def cancel(self, order_id: str) -> None:
        """Stop the order, or drop what is held for another worker's."""
        self._free(self.held.drop_order(order_id))
        sequence = self.open.pop(order_id, None)
        if sequence is None:
            return
        for transfer in sequence.to_lenders:
            self.context.network.stop(transfer)
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
            self._finish(sequence, 0)
        elif sequence.kv_there:
            self._ready(sequence)

    def kv_there(self, order_id: str) -> None:
        sequence = self.open.get(order_id)
        if sequence is None:
            return
        for loan in sequence.loans:
            size = loan.segments * self.context.segment_blocks * self.context.block_bytes
            sequence.to_lenders.append(
                self.context.network.send(
                    f"node-{self.worker_id}",
                    f"node-{loan.worker_id}",
                    (size, lambda: self._kv_everywhere(sequence)),
                )
            )
        self._kv_everywhere(sequence)

    def _kv_everywhere(self, sequence: SimulatedSequence) -> None:
        if not all(transfer.ended for transfer in sequence.to_lenders):
            return
        sequence.kv_there = True
        if sequence.first_ns >= 0:
            self._ready(sequence)

    # --- lending --------------------------------------------------------------------------------------------

    def hold(self, order_id: str, plan_id: str, blocks: int) -> bool:
        """Keep room for another worker's sequence; False: there is none."""
        if blocks > self.blocks_free:
            return False
        self.blocks_free -= blocks
        self.held.hold(order_id, plan_id, blocks)
        return True

    def attend(self, tokens: int) -> None:
        """To so many more of others' tokens in each step (negative: to fewer), from the next one on."""
        self._lent_tokens += tokens
        self._end_run_soon()

    def end_move(self, order: EndMove) -> None:
        self._free(self.held.drop_plan(order.order_id, order.plan_id))

    def move(self, order: MoveKv) -> None:
        """Have another hold some segments, if it has room: what the conductor knows may be old."""
        context, lender = self.context, self._others[order.lender_id]
        reason = ""
        if order.order_id not in self.batch:
            reason = "the request does not run"
        elif self._moving is not None:
            reason = "another move is under way"
        elif not lender.hold(order.order_id, order.plan_id, order.segments * context.segment_blocks):
            reason = "the lender has no room"
        if reason:
            context.say(
                KvMoveRefused(
                    plan_id=order.plan_id,
                    order_id=order.order_id,
                    request_id=order.request_id,
                    worker_id=self.worker_id,
                    reason=reason,
                )
            )
            return
        self._moving = MoveUnderWay(order, order.segments * context.segment_tokens)
        self._end_run_soon()

    def _moved(self, order: MoveKv) -> None:
        """All of it is there: the room here is free."""
        self._moving = None
        context, lender = self.context, self._others[order.lender_id]
        if not lender.held.holds(order.order_id, order.plan_id):
            return  # the conductor did not wait so long: all of it is still here
        sequence, blocks = self.batch[order.order_id], order.segments * context.segment_blocks
        sequence.loans = [*sequence.loans, Loan(worker_id=order.lender_id, segments=order.segments)]
        sequence.blocks -= blocks
        self.blocks_free += blocks
        self._borrowing[order.order_id] = sequence
        lender.attend(order.segments * context.segment_tokens)
        moved_bytes = blocks * context.block_bytes
        context.network.bytes_moved += moved_bytes
        context.say(
            KvMoved(
                plan_id=order.plan_id,
                order_id=order.order_id,
                request_id=order.request_id,
                worker_id=self.worker_id,
                blocks=blocks,
                moved_bytes=moved_bytes,
            )
        )

    def _free(self, blocks: int) -> None:
        """Others do not need these any more; the first that waits may fit now."""
        self.blocks_free += blocks
        if blocks and self.waiting and self._fits(self.waiting[0]):
            if self.batch:
                self._end_run_soon()
            else:
                self._start_run()

    def _end_run_soon(self) -> None:
        """With the step that is under way."""
        if self.batch:
            self._book(self.steps.steps_until(self.context.clock.now_ns))

    def _note_loans(self) -> None:
        """The next run's steps attend to this much for others, and have others attend to this much."""
        steps, context = self.steps, self.context
        steps.lent_tokens = self._lent_tokens
        borrowed = [sequence.loans for sequence in self._borrowing.values()]
        steps.away_tokens = context.segment_tokens * sum(loan.segments for each in borrowed for loan in each)
        steps.away_ns = (
            longest_wait_ns(context.profile, context.segment_tokens, borrowed) if borrowed else 0.0
        )

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
            self._note_loans()
            times = self.context.clock.jitter()
            if self._moving is not None:
                self._moving.begin(self.steps.made)
                times *= self._moving.slower
            self.steps.start_run(now_ns, times)
            self._book(self.steps.steps_to_end())

    def _book(self, steps: int) -> None:
        """The run ends after `steps`, or before when a sequence or a move ends, or the wait for others."""
        steps = min(steps, self.steps.steps_to_end(), self.steps.waiting_steps or steps)
        if self._moving is not None:
            steps = min(steps, self._moving.steps_left(self.steps.made))
        self.epoch += 1
        self.context.clock.at(
            self.steps.since_ns + self.steps.run_ns(steps), self._run_over, steps, self.epoch
        )

    def _join(self, sequence: SimulatedSequence, now_ns: int) -> None:
        order = sequence.order
        sequence.joined_ns, sequence.joined = now_ns, self.steps.made
        self.blocks_free -= sequence.blocks
        self.batch[order.order_id] = sequence
        if sequence.loans:
            self._borrowing[order.order_id] = sequence
            self._have_attended(sequence, 1)
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
            self.context.outcomes[sequence.order.request_id].tbt_ns = tbt_ns(intervals)
            self._finish(sequence, decode_ns)
        if self._moving is not None and not self._moving.steps_left(self.steps.made):
            self._moved(self._moving.order)
        self._start_run()

    def _advance(self, steps: int) -> list[str]:
        took_ns, sequences = self.steps.run_ns(steps), self.steps.sequences
        self.busy_ns += took_ns
        context = steps * (self.steps.context_tokens + sequences * (steps - 1) // 2)
        self._means.add(steps, took_ns, steps * sequences, context)
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
        if self._borrowing.pop(order.order_id, None) is not None:
            self._have_attended(sequence, -1)
        if self._moving is not None and self._moving.order.order_id == order.order_id:
            self._moving = None  # who holds it hears that the order is over
        context = order.prompt_tokens + 1 + self.steps.made - sequence.joined
        self.steps.leave(order.order_id, context)

    def _have_attended(self, sequence: SimulatedSequence, sign: int) -> None:
        for loan in sequence.loans:
            self._others[loan.worker_id].attend(sign * loan.segments * self.context.segment_tokens)

    def _finish(self, sequence: SimulatedSequence, decode_ns: int) -> None:
        order = sequence.order
        self.open.pop(order.order_id, None)
        self.context.finish(
            order,
            completion_tokens=sequence.output_tokens,
            tbt_ns=max(self.context.outcomes[order.request_id].tbt_ns, 0),
            decode_ns=decode_ns,
        )
