"""A simulated prefill worker: the time, memory and bandwidth that `halfmoon.workers.prefill.worker` takes.

One order computes at a time, in the order of the queue. The next few have their blocks held and fetched meanwhile; one
whose prompt begins with blocks that an order before it fetches or is to compute waits for these.
Loading overlaps with computing layer by layer, and so does pushing to the decode node: only the last layer's transfer
comes after the end of computing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

from halfmoon.conductor.simulation.context import SimulationContext
from halfmoon.conductor.simulation.decode import SimulatedDecode
from halfmoon.conductor.simulation.network import Transfer
from halfmoon.conductor.simulation.nodes import Node
from halfmoon.conductor.simulation.prompt_blocks import PromptBlocks
from halfmoon.conductor.simulation.stages import stage_times
from halfmoon.schemas.decisions import StartPrefill, StartStage
from halfmoon.schemas.events import PrefillFinished, StageFinished, WorkerHeartbeat
from halfmoon.schemas.similar import SimilarReuse, expected_reuse, reuse_of


class SimulatedJob:
    """One order in hand."""

    __slots__ = (
        "arrived_ns",
        "blocks",
        "busy_ns",
        "cancelled",
        "compute_ns",
        "computed",
        "order",
        "prepared",
        "push_missing",
        "pushing",
        "started_ns",
        "target_held",
    )

    def __init__(self, order: StartPrefill, blocks: PromptBlocks, now_ns: int) -> None:
        self.order, self.blocks, self.arrived_ns = order, blocks, now_ns
        self.prepared = self.cancelled = self.computed = False
        self.pushing: Transfer | None = None
        self.target_held: list[bytes] = []
        self.started_ns = self.compute_ns = self.push_missing = 0
        #: Part of the time in which this worker computed itself; -1: all.
        self.busy_ns = -1


class SimulatedPrefill:
    """Answers every StartPrefill by one PrefillFinished, unless it is cancelled. RequestFinished comes before it where
    the first token is the whole answer.

    `decode_workers`, by id, get first tokens and KV; `others` compute layers of prompts that have stages.
    """

    def __init__(
        self,
        context: SimulationContext,
        worker_id: str,
        node: Node,
        decode_workers: Mapping[str, SimulatedDecode],
        others: Mapping[str, SimulatedPrefill],
        *,
        incarnation: str = "i1",
    ) -> None:
        self.incarnation = incarnation
        self._decode_workers, self._others = decode_workers, others
        #: Parts of other workers' prompts: those given one were idle, so it computes at once.
        self.parts: dict[str, StartStage] = {}
        self.context, self.worker_id, self.node = context, worker_id, node
        self.queue: deque[SimulatedJob] = deque()
        self.jobs: dict[str, SimulatedJob] = {}
        self.running: SimulatedJob | None = None
        self.obeyed_seq = 0
        #: Time computed. It never decodes.
        self.prefill_ns = self.decode_ns = 0

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            queued=len(self.queue),
            running=len(self.jobs) - len(self.queue),
            orders=[*self.jobs, *self.parts],
            obeyed_seq=self.obeyed_seq,
        )

    @property
    def queued(self) -> int:
        """Orders that are not done, the one that is being computed among them."""
        return len(self.jobs)

    def orders_open(self) -> int:
        return len(self.jobs) + len(self.parts)

    def start_part(self, order: StartStage) -> None:
        """Some layers of another worker's prompt; that worker reports their end."""
        assert not self.orders_open(), ("a part for one that is busy", order)
        self.parts[order.order_id] = order

    def end_part(self, order_id: str, elapsed_ns: int, compute_ns: int) -> None:
        part = self.parts.pop(order_id, None)
        if part is None:
            return  # cancelled
        self.prefill_ns += compute_ns
        self.context.say(
            StageFinished(
                order_id=order_id,
                request_id=part.request_id,
                worker_id=self.worker_id,
                elapsed_ns=elapsed_ns,
                compute_ns=compute_ns,
            )
        )
        self._next()

    def start(self, order: StartPrefill) -> None:
        keys = self.context.keys(order.request_id)
        if order.reference is not None:
            keys = keys[: order.exact_blocks]  # what a similar prompt stood in for is shared with nobody
        blocks = PromptBlocks(self.context, self.node, keys)
        job = SimulatedJob(order, blocks, self.context.clock.now_ns)
        self.jobs[order.order_id] = job
        self.queue.insert(self._place(order), job)
        self._prepare_some()
        self._next()

    def _place(self, order: StartPrefill) -> int:
        """As in `PrefillState`: behind all, or before one that waits and is not prepared."""
        other = self.jobs.get(order.before)
        if other is None:
            return len(self.queue)
        place = self.queue.index(other) if other in self.queue else 0
        return min(len(self.queue), max(self.context.profile.prepared_max, place))

    def cancel(self, order_id: str) -> None:
        if self.parts.pop(order_id, None) is not None:
            self._next()
        job = self.jobs.pop(order_id, None)
        if job is None:
            return
        job.cancelled = True
        if job.pushing is not None:
            self.context.network.stop(job.pushing)
        if job in self.queue:
            self.queue.remove(job)
        job.blocks.let_go()
        self.context.nodes[job.order.decode_node_id].pool.release(job.target_held)
        if self.running is job:
            self.running = None
            self._next()

    # --- before ---------------------------------------------------------------------------------------------

    def _prepare_some(self) -> None:
        prepared_max = self.context.profile.prepared_max
        for place, job in enumerate(self.queue):
            if place >= prepared_max:
                break
            if not job.prepared and not self._prefix_is_coming(job, place):
                job.prepared = True
                self._prepare(job)

    def _prefix_is_coming(self, job: SimulatedJob, place: int) -> bool:
        """One before it fetches, or is to compute, blocks that it can use; they are there when it ends."""
        # Workers of older logs did not wait: their policy does not count on it.
        if not self.context.coming_blocks:
            return False
        before = [*([self.running] if self.running is not None else []), *islice(self.queue, place)]
        return any(one.blocks.brings_for(job.blocks, job.order.prompt_tokens) for one in before)

    def _prepare(self, job: SimulatedJob) -> None:
        job.blocks.prepare(
            job.order.prompt_tokens,
            job.order.fetches,
            first_layer=self._next,
            all_layers=lambda: self._computed(job),
        )

    # --- computing ------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self.running is not None or self.parts or not self.queue:
            return
        self._prepare_some()
        if not self.queue[0].blocks.layer_here:
            return
        job = self.running = self.queue.popleft()
        self._prepare_some()
        context, order = self.context, job.order
        now_ns = job.started_ns = context.clock.now_ns
        used = job.blocks.tokens
        times = context.clock.jitter()
        if order.stages:
            job.compute_ns = self._compute_together(job, used, times)
        elif order.reference is not None:
            job.compute_ns = int(order.predicted.prefill_ns * times)
        else:
            job.compute_ns = int(context.profile.cost.prefill_ns(order.prompt_tokens, used) * times)
        # Cached blocks are loaded from the pool, layer by layer, while layers are computed.
        job.compute_ns = max(job.compute_ns, context.profile.load_ns(used))
        if not order.answers:
            self._open_push(job)
        context.clock.at(now_ns + job.compute_ns, self._time_over, job)

    def _compute_together(self, job: SimulatedJob, used: int, times: float) -> int:
        """The time until the last layers are computed; the other workers' ends are reported when they come."""
        context, order = self.context, job.order
        found = stage_times(
            context.profile,
            order.stages,
            range(used, order.prompt_tokens, order.chunk_tokens),
            link_bytes_s=context.network.bytes_s,
            times=times,
        )
        *ends_ns, last_ns = found.ends_ns
        for stage, end_ns, busy_ns in zip(order.stages, ends_ns, found.busy_ns, strict=False):
            other = self._others[stage.worker_id]
            context.clock.after(end_ns, other.end_part, order.order_id, end_ns, busy_ns)
        job.busy_ns = found.busy_ns[-1]
        context.network.bytes_moved += found.moved_bytes
        return last_ns

    def _time_over(self, job: SimulatedJob) -> None:
        if not job.cancelled:
            job.computed = True
            self._computed(job)

    def _computed(self, job: SimulatedJob) -> None:
        """Both computing and the fetch are over (the last layer's blocks may have come after its time)."""
        if job.cancelled or not job.computed or not job.blocks.loaded or self.running is not job:
            return
        context, order = self.context, job.order
        self.running = None
        job.compute_ns = context.clock.now_ns - job.started_ns
        self.prefill_ns += job.busy_ns if job.busy_ns >= 0 else job.compute_ns
        job.blocks.commit()
        outcome = context.outcomes[order.request_id]
        outcome.queue_ns = job.started_ns - job.arrived_ns
        outcome.compute_ns += job.compute_ns
        outcome.local_tokens = job.blocks.local * context.block_tokens
        outcome.fetched_tokens = job.blocks.fetched * context.block_tokens
        if order.answers:
            outcome.first_token_ns = context.clock.now_ns
            context.finish(order, completion_tokens=1, tbt_ns=0, decode_ns=0)
        else:
            self._decode_workers[order.decode_worker_id].first_token(order.order_id)
        self._close_push(job)
        self._next()

    # --- pushing --------------------------------------------------------------------------------------------

    def _open_push(self, job: SimulatedJob) -> None:
        """All layers but the last go while computing."""
        context, order = self.context, job.order
        target = context.nodes[order.decode_node_id]
        job.target_held = target.pool.hold(job.blocks.keys)
        tokens = max(0, order.prompt_tokens - len(job.target_held) * context.block_tokens)
        job.push_missing = tokens * context.block_bytes // context.block_tokens
        early = job.push_missing - job.push_missing // context.profile.layers

        def early_there() -> None:
            job.pushing = None
            self._close_push(job)

        if early:
            job.pushing = context.network.send(self.node.node_id, target.node_id, (early, early_there))

    def _close_push(self, job: SimulatedJob) -> None:
        if job.cancelled or job.pushing is not None or not job.computed or self.running is job:
            return
        context, order = self.context, job.order
        last = job.push_missing // context.profile.layers
        if not last:
            self._finish(job)
            return
        job.pushing = context.network.send(
            self.node.node_id, order.decode_node_id, (last, lambda: self._finish(job))
        )

    def _finish(self, job: SimulatedJob) -> None:
        context, order = self.context, job.order
        if self.jobs.pop(order.order_id, None) is None:
            return
        if not order.answers:
            context.nodes[order.decode_node_id].commit(job.blocks.keys, job.target_held)
            job.target_held = []
        context.pushed_bytes += job.push_missing
        blocks = job.blocks
        context.fetched_bytes += blocks.fetched_bytes
        context.say(
            PrefillFinished(
                order_id=order.order_id,
                request_id=order.request_id,
                worker_id=self.worker_id,
                queue_ns=job.started_ns - job.arrived_ns,
                compute_ns=job.compute_ns,
                pushed_bytes=job.push_missing,
                prompt_tokens=order.prompt_tokens,
                stages=len(order.stages),
                similar=_reuse(order, blocks.tokens),
                **blocks.as_reported(),
            )
        )
        if not order.answers:
            self._decode_workers[order.decode_worker_id].kv_there(order.order_id)


def _reuse(order: StartPrefill, cached: int) -> SimilarReuse | None:
    """As much as the core expects."""
    reference, tokens = order.reference, order.prompt_tokens - cached
    if reference is None:
        return None
    if reference.named:
        return reuse_of(tokens, tokens * reference.resemblance // 100, reference.resemblance)
    return expected_reuse(tokens, reference.resemblance)
