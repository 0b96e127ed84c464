"""The mixed machine: a worker that prefills and decodes in one loop. Events in, actions out. Pure.

::

    order ─▶ prepared as a prefill is ─▶ the batch former ─▶ chunks ─▶ first token ─▶ decodes ─▶ ended

A request's tokens, its slots of the node's pool and its fetches are a prefill's (`Job`), and so is the answer that its
prompt is computed; tokens that are drawn, delivered and sent again are a decode's (`DecodeSequence`). Between them
nothing moves: the KV stays in the worker's cache. Each iteration has one row of every sequence that decodes and chunks
of prompts within its tokens and its time (`halfmoon.workers.batch_former`); whole blocks of the prompt are copied to
the node's pool, where others find them.

Prompts are never starved by decodes: beside them there is always room for one grain. A preempted request computes its
prompt again and feeds its drawn tokens through decode, so that exact numerics give the same bits.

Source: Sarathi-Serve (OSDI'24), section 4.2 (stall-free batching).
"""

# The idea is Sarathi-Serve's: an iteration that only decodes leaves the processor idle, so chunks of prompts ride
# along, and a budget bounds how much they slow the decodes: of tokens there, of time by the worker's profile here. The
# budget is the whole of the scheduling.
#
# It is simpler here than a scheduler that knows both phases. A mixed order is a prefill's job and a decode's sequence,
# both as the other workers have them, and it answers with their events. The conductor, the frontend and the pool see
# no third kind of order. It is harder in exact numerics: a block's KV depends on the chunk that it is computed in, so
# chunks are whole blocks (`grain`), where the paper cuts a chunk at any token to fill the budget.
#
# Turned down:
# - Swapping a preempted sequence to host memory, as the decode worker does: the former admits it anew, which is one
#   path for both numerics, and it is seldom taken.
# - Chunks in an engine call of their own: the weights would be read twice an iteration.
# - A budget that never grows: with as many decodes as tokens in it no prompt would get in, so one grain is always left.
#
# In doubt: the time of an iteration is split by prediction. Decodes are charged their learned step and the chunks the
# rest, since there is one measured time for both.

from __future__ import annotations

import msgspec

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import StartMixed
from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.batch_former import BatchFormer, Iteration
from halfmoon.workers.decode.actions import EndSpan, Measure, Wake
from halfmoon.workers.decode.deliveries import deliveries_of, resend_reply
from halfmoon.workers.decode.events import EngineIdled
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.decode.step_times import StepTimes
from halfmoon.workers.finished_orders import FinishedOrders
from halfmoon.workers.machines import (
    Announce,
    AnnounceRequested,
    AnswerResend,
    OrderCancelled,
    Report,
    ResendRequested,
    TokensTaken,
    WorkerFacts,
    WorkerStopped,
)
from halfmoon.workers.mixed import rows
from halfmoon.workers.mixed.actions import Action, RunIteration
from halfmoon.workers.mixed.events import Event, IterationMade, MixedOrdered
from halfmoon.workers.mixed.request import MixedRequest
from halfmoon.workers.mixed.room import CacheRoom
from halfmoon.workers.prefill.actions import CommitPrompt
from halfmoon.workers.prefill.events import Preparing
from halfmoon.workers.prefill.job import Job
from halfmoon.workers.prefill.prefix_waits import reserve_in_turn
from halfmoon.workers.prefill.stages import JobRules, PrefillStage


class MixedState:
    """See the module. `requests` are the open orders by id, in the order of their arrival."""

    def __init__(
        self,
        worker: WorkerFacts,
        profile: CostProfile,
        *,
        batch_max: int,
        budget_tokens: int,
        iteration_ns: int,
        prepared_max: int = 3,
    ) -> None:
        layout, kv_blocks = worker.layout, worker.kv_blocks
        self.worker_id, self.node_id, self.incarnation = worker.worker_id, worker.node_id, worker.incarnation
        self.layout, self.kv_blocks, self.prepared_max = layout, kv_blocks, prepared_max
        #: Exact numerics: a row attends to its own block apart, so chunks are whole blocks.
        self.grain = layout.block_tokens if layout.numerics == "exact" else 1
        self.budget_tokens = max(budget_tokens, self.grain)
        self.rules = JobRules(
            worker_id=worker.worker_id,
            layout=layout,
            has_store=worker.has_store,
            chunk_tokens=self.budget_tokens,
            stream_layers=False,
            prompt_blocks_max=kv_blocks if layout.layers else None,
        )
        self.requests: dict[str, MixedRequest] = {}
        self.finished = FinishedOrders[DecodeSequence]()
        self.room = CacheRoom(self.requests, layout, kv_blocks)
        self.former = BatchFormer(
            self.room,
            budget_tokens=self.budget_tokens,
            sequences_max=batch_max,
            grain_tokens=self.grain,
            replays=True,
            cost=profile,
            iteration_ns=iteration_ns,
        )
        self.times = StepTimes(profile)
        #: The iteration of the compute thread, and orders that were cancelled during it: they end after it.
        self.in_step: RunIteration | None = None
        self.ending: list[Job] = []
        #: The compute thread waits for Wake.
        self.asleep = True
        self.stopped = False
        self.now_ns = self.wall_ns = 0
        self.out: list[Action] = []
        self._eos_ids = worker.eos_ids

    def on(self, event: Event) -> list[Action]:
        """The actions that follow from `event`, in the order in which they must be begun."""
        self.now_ns, self.wall_ns, self.out = event.at_ns, event.wall_ns, []
        match event:
            case EngineIdled():
                self._next_iteration()
            case IterationMade():
                self._made(event)
            case MixedOrdered():
                self._begin(event.order)
            case OrderCancelled():
                if (request := self.requests.get(event.order_id)) is not None:
                    self._drop(request)
            case ResendRequested():
                known = self._known(event.request.order_id)
                return [AnswerResend(resend_reply(known, event.request, self.worker_id))]
            case AnnounceRequested():
                self._drop_all()
                self.out.append(Announce())
            case WorkerStopped():
                self.stopped = True
                self._drop_all()
                self._end_cancelled()
            case _:
                self._prepared_further(event)
        self._go_on()
        return self.out

    @property
    def kv_blocks_used(self) -> int:
        """Blocks of the engine's cache."""
        return self.room.blocks_used

    def orders_open(self) -> int:
        return len(self.requests) + len(self.ending)

    def heartbeat(self, obeyed_seq: int) -> WorkerHeartbeat:
        """How the worker is; the step figures, which are of decodes alone, begin again."""
        steps, step_ns, sequences, context = self.times.take()
        running = len(self.former.running)
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            queued=len(self.requests) - running,
            running=running,
            kv_blocks_used=self.kv_blocks_used,
            steps=steps,
            step_ns=step_ns,
            step_sequences=sequences,
            step_context_tokens=context,
            orders=list(self.requests),
            obeyed_seq=obeyed_seq,
        )

    # --- an order arrives, and is prepared ------------------------------------------------------------------

    def _begin(self, order: StartMixed) -> None:
        if self.stopped or self._known(order.order_id) is not None:
            return
        self.requests[order.order_id] = MixedRequest(order, self.rules, self.node_id, self.now_ns)

    def _known(self, order_id: str) -> DecodeSequence | None:
        request = self.requests.get(order_id)
        return self.finished.get(order_id) if request is None else request.sequence

    def _prepared_further(self, event: Preparing) -> None:
        request = self.requests.get(event.order_id)
        if request is None or request.answered:
            return
        request.job.step(event, self.out)
        taken = isinstance(event, TokensTaken) and request.job.stage is not PrefillStage.ENDED
        if taken and not request.sequence.taken:
            request.take(self._eos_ids)
            if self.layout.layers and (blocks := request.blocks_max(self.layout)) > self.kv_blocks:
                reason = f"prompt and answer take {blocks} blocks of the worker's {self.kv_blocks}"
                request.job.fail(reason, self.out, retryable=True)
        if request.job.stage is PrefillStage.ENDED:
            self._forget(request)

    def _go_on(self) -> None:
        """Prepare the next requests, give the former those that are prepared, and wake the compute thread."""
        if self.stopped:
            return
        # Few are prepared at a time: a prepared order holds slots of the node's pool while it waits for its turn.
        running = {order_id: self.requests[order_id] for order_id in self.former.running}
        waiting = [each for each in self.requests.values() if each.order_id not in running]
        first = waiting[: self.prepared_max]
        for request in first:
            if request.job.stage is PrefillStage.QUEUED:
                request.job.prepare(self.out)
        begun = [each.job for each in running.values() if not each.answered]
        reserve_in_turn(begun, [each.job for each in first if not each.answered], self.now_ns, self.out)
        for request in waiting:
            if request.ready and not request.formed:
                request.formed = True
                request.sequence.ready_ns, request.sequence.ready_wall_ns = self.now_ns, self.wall_ns
                self.former.add(request.order_id, request.order.prompt_tokens)
        if self.asleep and self.in_step is None and (self.former.waiting or self.former.running):
            self.asleep = False
            self.out.append(Wake())

    # --- iterations -----------------------------------------------------------------------------------------

    def _next_iteration(self) -> None:
        """The compute thread is idle: give it the next iteration, or let it sleep until Wake."""
        assert self.in_step is None, "the last iteration is under way"
        self.asleep = True
        if self.stopped:
            return
        # Decodes run whatever the budget is. With more of them than tokens in it no prompt would ever be computed.
        former = self.former
        decoding = len(former.running) - former.prefilling
        former.budget_tokens = max(self.budget_tokens, decoding + self.grain)
        formed = former.form()
        self._moved_in_and_out(formed)
        if formed.idle:
            former.made()
            return
        self.asleep = False
        decodes = [rows.decode_row(self.requests[name]) for name in formed.decodes]
        chunks = [rows.chunk_rows(self.requests[chunk.name], chunk) for chunk in formed.chunks]
        loads = [rows.loaded_blocks(self.requests[load.name], load) for load in formed.loads]
        context = sum(row.position + 1 for row in decodes)
        self.in_step = RunIteration(loads=loads, chunks=chunks, decodes=decodes, context_tokens=context)
        self.out.append(self.in_step)

    def _moved_in_and_out(self, formed: Iteration) -> None:
        # The client keeps its tokens: they are fed again as known ones, and `drawn` counts those fed so far.
        for name in formed.preempted:
            request = self.requests[name]
            request.drawn = 0
            request.sequence.preemptions += 1
        # Admitted again after a preemption, a request has waited for room twice; its first wait is the one measured.
        for name in formed.admitted:
            request = self.requests[name]
            if not request.job.started_ns:
                request.job.started_ns = self.now_ns
                self.out.append(Measure("room_wait", self.now_ns - request.sequence.ready_ns))

    def _made(self, event: IterationMade) -> None:
        step, self.in_step = self.in_step, None
        assert step is not None
        # Only now has the compute thread left the blocks and slots of orders that were cancelled during the iteration.
        formed = self.former.made()
        self._end_cancelled()
        self._timed(step, formed, event)
        drawn = iter(event.decoded)
        fresh: list[tuple[DecodeSequence, int]] = []
        for row in step.decodes:
            token = next(drawn) if row.draws else None
            request = self.requests.get(row.sequence.order_id)
            if request is None:
                continue
            if token is not None:
                index = len(request.sequence.output)
                if request.sequence.add(request.sequence.next_known() or token, self.now_ns):
                    fresh.append((request.sequence, index))
                if index == 1:
                    first_step_ns = self.now_ns - request.sequence.started_ns
                    self.out.append(Measure("first_step", first_step_ns))
            request.drawn += 1
        for name in event.lost:
            self._lose(name)
        self._commit(formed)
        self._draw_first(step, event, fresh)
        self.out += deliveries_of(fresh, self.worker_id)
        touched = [row.sequence for row in step.decodes] + [row.sequence for row in step.chunks]
        for sequence in dict.fromkeys(touched):
            request = self.requests.get(sequence.order_id)
            if request is not None and sequence.finish_reason:
                self._finish(request)

    def _timed(self, step: RunIteration, formed: Iteration, event: IterationMade) -> None:
        """Learn a step's cost from iterations of decodes alone; charge the rest of a mixed one to its chunks."""
        # By tokens: of two chunks in one iteration neither has a time of its own.
        count, rows_ns = len(step.decodes), event.step_ns - event.load_ns
        if blocks := sum(len(load.blocks) for load in step.loads):
            self._learn_load(event.load_ns, blocks * self.layout.block_tokens)
        chunks = [chunk for chunk in formed.chunks if chunk.name not in event.kept]
        if not chunks:
            if count:
                self.times.observe(rows_ns, count, step.context_tokens)
            return
        decode_ns = self.times.predict(count, step.context_tokens) if count else 0
        chunks_ns = max(0, rows_ns - decode_ns)
        tokens = sum(chunk.tokens for chunk in chunks)
        for chunk in chunks:
            if (request := self.requests.get(chunk.name)) is not None:
                request.compute_ns += chunks_ns * chunk.tokens // tokens

    def _learn_load(self, load_ns: int, tokens: int) -> None:
        former, seen_ps = self.former, load_ns * 1_000 // tokens
        known_ps = former.load_per_token_ps
        former.load_per_token_ps = (3 * known_ps + seen_ps) // 4 if known_ps else seen_ps

    def _commit(self, formed: Iteration) -> None:
        """Commit blocks that are stored and have a key: these are whole, and others may read them."""
        size = self.layout.block_tokens
        for chunk in formed.chunks:
            request = self.requests.get(chunk.name)
            if request is None or request.answered or not self.rules.has_store:
                continue
            keyed = len(request.sequence.block_keys) // KEY_BYTES
            first, end = chunk.start // size, min((chunk.start + chunk.tokens) // size, keyed)
            new = [block for block in range(first, end) if block not in request.stored]
            request.stored.update(new)
            if new:
                self.out.append(
                    CommitPrompt(order_id=request.order_id, first_block=new[0], blocks=new[-1] + 1 - new[0])
                )

    def _draw_first(
        self, step: RunIteration, event: IterationMade, fresh: list[tuple[DecodeSequence, int]]
    ) -> None:
        """Prompts that are whole have their first token, or had it before they were preempted."""
        drawn = iter(event.first)
        for row in step.chunks:
            if not row.draws:
                continue
            token = next(drawn)
            request = self.requests.get(row.sequence.order_id)
            if request is None:
                continue
            request.drawn = 1
            if request.answered:
                continue
            request.answered = True
            request.job.kept = request.order_id in event.kept
            sequence = request.sequence
            token = sequence.next_known() or token
            if sequence.add(token, self.now_ns):
                fresh.append((sequence, 0))
            decodes = not sequence.finish_reason
            sequence.result = request.job.end_computed(
                token, request.compute_ns, self.wall_ns, self.out, decodes=decodes
            )
            sequence.result_ns = sequence.started_ns = self.now_ns

    # --- the end of an order --------------------------------------------------------------------------------

    def _finish(self, request: MixedRequest) -> None:
        sequence = request.sequence
        assert sequence.result is not None, request.order_id
        self._end_span(sequence)
        told = sequence.finished(self.worker_id, sequence.result, self.now_ns)
        # Decodes in the iterations of its prompt took time too, which is no part of what computing it took.
        ttft_ns = sequence.started_ns - request.job.arrived_ns
        self.out.append(Report(msgspec.structs.replace(told, ttft_ns=ttft_ns)))
        self.finished.keep(sequence)
        self._forget(request)

    def _lose(self, order_id: str) -> None:
        request = self.requests.get(order_id)
        if request is not None and not request.answered:
            reason = "its slots of the node's pool were given away before its prefix had been read"
            request.job.fail(reason, self.out, retryable=True)
            self._forget(request)

    def _drop(self, request: MixedRequest) -> None:
        """By the conductor, or with the worker: no answer."""
        self._forget(request)
        computes = self.in_step is not None and (
            any(row.sequence is request.sequence for row in self.in_step.chunks)
            or any(load.order_id == request.order_id for load in self.in_step.loads)
        )
        if request.answered:
            self._end_span(request.sequence, cancelled=True)
        elif computes:  # its slots are being written, or read
            self.ending.append(request.job)
        else:
            request.job.cancel(self.out)

    def _drop_all(self) -> None:
        for request in list(self.requests.values()):
            self._drop(request)

    def _end_cancelled(self) -> None:
        ending, self.ending = self.ending, []
        for job in ending:
            job.cancel(self.out)

    def _forget(self, request: MixedRequest) -> None:
        self.former.remove(request.order_id)
        del self.requests[request.order_id]

    def _end_span(self, sequence: DecodeSequence, *, cancelled: bool = False) -> None:
        if sequence.traceparent:
            self.out.append(EndSpan(sequence, "", cancelled))

    def validate(self) -> None:
        """Raises AssertionError, with values, when an invariant does not hold."""
        held = [block for request in self.requests.values() for block in request.sequence.table]
        if self.layout.layers:
            assert len(held) == len(set(held)) == self.room.blocks_used, (
                "I77 blocks of nobody, or of two",
                held,
                self.room.blocks_used,
            )
        assert self.in_step is not None or not self.ending, "I78 ends after no iteration"
        running = set(self.former.running)
        for order_id in (*self.former.running, *self.former.waiting):
            assert self.requests[order_id].formed, ("I79 in hand and not formed", order_id)
        for order_id, request in self.requests.items():
            stage, sequence = request.job.stage, request.sequence
            assert not (request.formed and order_id not in running and order_id not in self.former.waiting), (
                "I79 formed and not in hand",
                order_id,
            )
            assert bool(sequence.table) == (order_id in running), ("I77 blocks and not in hand", order_id)
            assert (stage is PrefillStage.ENDED) == request.answered, (
                "I80 ended and answered differ",
                order_id,
                stage,
                request.answered,
            )
            assert request.drawn <= len(sequence.output), ("I80 drawn", order_id, request.drawn)
            assert not sequence.finish_reason, ("I80 ended and still open", order_id)
        idle = self.asleep and self.in_step is None and not self.stopped
        assert not (idle and running), ("I81 sequences run and nothing computes", running)
        assert not (self.stopped and self.requests), (
            "I75 open orders of a stopped worker",
            list(self.requests),
        )
