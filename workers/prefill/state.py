"""The state machine of a prefill worker: `on` takes an event and returns actions.

Pure: no clock, no I/O, no threads, no model. The shell (`halfmoon.workers.prefill.worker`) obeys the actions in
their order and feeds back one event for each way that an action can end; a simulated world does the same.

`halfmoon.workers.prefill.job` has the stages of one order; here are the things that orders share: the queue, and the
turn to compute. Rules:

- Orders compute one at a time, in the order of the queue. Its first `prepared_max` are prepared meanwhile: their tokens
  are taken, their slots are reserved, their fetches are under way.
- An order goes to the end of the queue, or before the one that it names (`StartPrefill.before`), but never before one
  that is being prepared.
- An order whose prompt begins with blocks that one before it fetches or is to compute asks for its slots once they are
  there.
- PrefillFinished or PrefillFailed answers an order, exactly once; a cancelled order is not answered. Before
  PrefillFinished, RequestFinished ends a request whose answer is its first token; that is delivered from here.
- A part of another worker's prompt (`layer_stages.job`) has its turn in the same queue. All workers hear of orders in
  one order, so the oldest one of all that are open has, or gets, its turn at each of its workers: none waits for ever.
- EndOrder is the last action of every order (DropStage, of a part). Until then the order is listed in heartbeats.
- An event of an order that has ended, or that its stage does not wait for, changes nothing.

Source: Mooncake (FAST'25), section 5.2 (layer-wise prefill) and figure 4; dask.distributed's
`worker_state_machine` (stimulus in, instructions out).
"""

from __future__ import annotations

from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.tokens import ResendReply, ResendRequest
from halfmoon.workers.finished_orders import FinishedOrders
from halfmoon.workers.machines import (
    Announce,
    AnnounceRequested,
    AnswerResend,
    OrderCancelled,
    ResendRequested,
    WorkerFacts,
    WorkerStopped,
)
from halfmoon.workers.prefill.actions import Action
from halfmoon.workers.prefill.cache_window import outgrows_cache
from halfmoon.workers.prefill.events import Event, PrefillOrdered, StageOrdered
from halfmoon.workers.prefill.first_tokens import FirstTokenAnswer
from halfmoon.workers.prefill.job import Job
from halfmoon.workers.prefill.layer_stages.job import StageJob
from halfmoon.workers.prefill.prefix_waits import reserve_in_turn
from halfmoon.workers.prefill.prompt_chunks import chunk_of
from halfmoon.workers.prefill.stages import PAUSED_STAGES, TURN_STAGES, WAITING_STAGES, JobRules, PrefillStage


class PrefillState:
    """See the module. `jobs` are the open orders in the order of their arrival, `queue` those of them whose turn has
    not come in the order of their turns, `turn` the one that computes.
    """

    def __init__(
        self,
        worker: WorkerFacts,
        *,
        prepared_max: int = 3,
        chunk_tokens: int = 1024,
        stream_layers: bool = True,
    ) -> None:
        layout, kv_blocks, has_store = worker.layout, worker.kv_blocks, worker.has_store
        self.worker_id = worker.worker_id
        self.incarnation = worker.incarnation
        self.kv_blocks = kv_blocks
        self.prepared_max = prepared_max
        #: Prompts may be longer than the engine's cache: their past is attended to in the pool.
        self.outgrows_cache = has_store and outgrows_cache(layout, kv_blocks)
        self.rules = JobRules(
            worker_id=worker.worker_id,
            layout=layout,
            has_store=has_store,
            chunk_tokens=chunk_of(layout, chunk_tokens),
            stream_layers=stream_layers,
            prompt_blocks_max=None if self.outgrows_cache or not layout.layers else kv_blocks,
            eos_ids=worker.eos_ids,
        )
        #: Answers of one token, which may be asked for again.
        self.answers = FinishedOrders[FirstTokenAnswer]()
        self.jobs: dict[str, Job | StageJob] = {}
        self.queue: list[Job | StageJob] = []
        self.turn: Job | StageJob | None = None
        self.stopped = False

    def on(self, event: Event) -> list[Action]:
        """The actions that follow from `event`, in the order in which they must be begun."""
        out: list[Action] = []
        match event:
            case PrefillOrdered():
                self._receive(Job(event.order, self.rules, event.at_ns))
            case StageOrdered():
                self._receive(StageJob(event.order, self.rules))
            case OrderCancelled():
                if (job := self.jobs.get(event.order_id)) is not None:
                    self._cancel(job, out)
            case AnnounceRequested():
                for job in list(self.jobs.values()):
                    self._cancel(job, out)
                out.append(Announce())
            case WorkerStopped():
                self._stop(out)
            case ResendRequested():
                out.append(AnswerResend(self._resend(event.request)))
            case _:
                if (job := self.jobs.get(event.order_id)) is not None:
                    job.step(event, out)
                    self._settle(job)
        self._prepare_some(out)
        self._reserve_some(event.at_ns, out)
        self._begin_turn(event.at_ns, out)
        return out

    def heartbeat(self, obeyed_seq: int) -> WorkerHeartbeat:
        """How the worker is, and which orders it has open. `obeyed_seq`: cause of the newest decision obeyed."""
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            queued=len(self.queue),
            running=len(self.jobs) - len(self.queue),
            kv_blocks_used=self.kv_blocks_used,
            orders=list(self.jobs),
            obeyed_seq=obeyed_seq,
        )

    def validate(self) -> None:
        """Asserts the invariants that hold between any two events."""
        layers, has_store, turn = max(1, self.rules.layout.layers), self.rules.has_store, self.turn
        queue = set(self.queue)
        # It runs after every event of a simulated world: values for a message are gathered only when one is needed.
        for order_id, job in self.jobs.items():
            stage, queued = job.stage, job in queue
            assert job.order_id == order_id, ("I69 another id", order_id, job.order_id)
            assert queued == (stage in WAITING_STAGES), ("I69 queue and stage differ", order_id, stage)
            assert (job is turn) == (stage in TURN_STAGES), ("I69 turn and stage differ", order_id, stage)
            assert stage is not PrefillStage.ENDED, ("I69 ended and still open", order_id)
            assert not (job.cancelled and queued), ("I70 cancelled and still in the queue", order_id, stage)
            if isinstance(job, StageJob):
                continue
            assert not job.paused or stage in PAUSED_STAGES, ("I70 paused", order_id, stage)
            assert not job.fetching or has_store, ("I70 fetches without a store", order_id, stage)
            waits = stage is PrefillStage.AWAITING_FETCH
            assert not waits or job.fetching, ("I70 waits for a fetch that is not under way", order_id)
            assert 0 <= job.prefix_blocks <= job.usable_blocks, (
                "I71 more cached than usable",
                order_id,
                stage,
            )
            assert job.fetched_layer < layers, ("I71 a layer too many", order_id, stage, job.fetched_layer)
        assert all(self.jobs.get(job.order_id) is job for job in self.queue), (
            "I69 an ended order in the queue"
        )
        assert self.turn is None or self.turn.order_id in self.jobs, "I69 an ended order has the turn"
        for place, job in enumerate(self.queue):
            begun = job.stage is not PrefillStage.QUEUED
            assert begun == (place < self.prepared_max), ("I72 prepared out of turn", job.order_id, place)
        idle = self.turn is None and self.queue and self.queue[0].stage is PrefillStage.PREPARED
        assert not idle, ("I73 prepared, and nothing computes", self.queue[0].order_id)
        assert not (self.stopped and self.jobs), ("I75 open orders of a stopped worker", list(self.jobs))

    @property
    def kv_blocks_used(self) -> int:
        """Blocks of the engine's own paged cache in use."""
        if self.turn is None or self.turn.stage is not PrefillStage.COMPUTING:
            return 0
        return min(self.kv_blocks, self.rules.layout.blocks(self.turn.order.prompt_tokens))

    def _receive(self, job: Job | StageJob) -> None:
        if job.order_id in self.jobs or self.stopped:
            return
        self.jobs[job.order_id] = job
        self.queue.insert(self._place(job), job)

    def _place(self, job: Job | StageJob) -> int:
        """Behind all, unless it is to be computed before one that is still open."""
        other = self.jobs.get(job.order.before) if isinstance(job, Job) else None
        if other is None:
            return len(self.queue)
        begun = sum(one.stage is not PrefillStage.QUEUED for one in self.queue)
        return max(begun, self.queue.index(other) if other in self.queue else 0)

    def _prepare_some(self, out: list[Action]) -> None:
        for job in self.queue[: self.prepared_max]:
            if job.stage is PrefillStage.QUEUED:
                job.prepare(out)

    def _reserve_some(self, at_ns: int, out: list[Action]) -> None:
        begun = [self.turn] if isinstance(self.turn, Job) else []
        waiting = [job for job in self.queue[: self.prepared_max] if isinstance(job, Job)]
        reserve_in_turn(begun, waiting, at_ns, out)

    def _begin_turn(self, at_ns: int, out: list[Action]) -> None:
        # In the order of the queue: one that is prepared already waits for an earlier one that is not.
        if self.turn is None and self.queue and self.queue[0].stage is PrefillStage.PREPARED:
            self.turn = self.queue.pop(0)
            self.turn.begin_turn(at_ns, out)
            self._prepare_some(out)

    def _resend(self, request: ResendRequest) -> ResendReply:
        """The answer once more. Of one that is not drawn yet there is nothing to send."""
        job = self.jobs.get(request.order_id)
        if isinstance(job, Job) and job.order.answers and job.order.frontend_id == request.frontend_id:
            return ResendReply(known=True)
        answer = self.answers.get(request.order_id)
        return answer.resend(request) if answer is not None else ResendReply(known=False)

    def _cancel(self, job: Job | StageJob, out: list[Action]) -> None:
        job.cancel(out)
        self._settle(job)

    def _stop(self, out: list[Action]) -> None:
        """Answer nothing any more; stop the computation that runs, and do not wait for it."""
        self.stopped = True
        for job in list(self.jobs.values()):
            job.cancel(out)
            if job.stage is not PrefillStage.ENDED:
                job.fail("cancelled", out, retryable=False)
            self._settle(job)

    def _settle(self, job: Job | StageJob) -> None:
        """The queue, the turn and the open orders follow a job's stage."""
        if job is self.turn and job.stage not in TURN_STAGES:
            self.turn = None
        if job.stage is PrefillStage.ENDED:
            del self.jobs[job.order_id]
            if isinstance(job, Job) and job.answer is not None:
                self.answers.keep(job.answer)
            if job in self.queue:
                self.queue.remove(job)
