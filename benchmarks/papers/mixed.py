"""A simulated colocated worker: it prefills and decodes on the same device, as the baselines do.

The batch former says what an iteration holds:

- Prefill first (vLLM's first scheduler): whoever waits and fits is prefilled at once, whole; decode stands
  still.
- Chunked prefill: every iteration decodes the whole batch and computes prompt tokens up to the budget beside
  it. It takes the base once, the chunk's part of its prefill, and the batch's part of a step.

Running requests hold the cache that they will grow to, so nobody is preempted; with prefix caching the rest
keeps blocks of those that ended. Iterations of decodes alone are summed (`batch`).

Source: vLLM (SOSP'23), section 4; SARATHI (arXiv 2308.16369) and Sarathi-Serve (OSDI'24), section 4, for the
batches.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers.batching.iteration_times import ProfileTimes
from benchmarks.papers.batching.ways import Batching, ComparedFormer
from halfmoon.conductor.simulation.batch import Steps, tbt_ns
from halfmoon.conductor.simulation.clock import Clock
from halfmoon.conductor.simulation.nodes import BlockCache
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.workers.batch_former import Iteration


class SimulatedMixedRequest:
    """One request in hand."""

    __slots__ = (
        "blocks",
        "first_interval",
        "held",
        "joined",
        "keys",
        "name",
        "outcome",
        "private",
        "queued_ns",
        "started_ns",
        "used",
    )

    def __init__(self, name: str, outcome: Outcome, keys: list[bytes], blocks: int) -> None:
        self.name, self.outcome, self.keys, self.blocks = name, outcome, keys, blocks
        #: Prompt tokens that were in the cache when it was admitted.
        self.used = 0
        self.held: list[bytes] = []
        self.private = 0
        self.joined = 0
        self.queued_ns = self.started_ns = 0
        self.first_interval = 0.0


class SimulatedMixed:
    """`start` takes a request; `ended` is called with each that has ended. It is its batch former's room."""

    def __init__(
        self,
        worker_id: str,
        clock: Clock,
        profile: Profile,
        *,
        block_tokens: int,
        kv_blocks: int,
        chunk_tokens: int,
        prefix_caching: bool,
        ended: Callable[[SimulatedMixedRequest], None],
    ) -> None:
        self.worker_id, self.clock, self.profile = worker_id, clock, profile
        self.block_tokens, self.kv_blocks = block_tokens, kv_blocks
        #: 0: prefill first.
        self.chunk_tokens = chunk_tokens
        self.prefix_caching = prefix_caching
        self.pool = BlockCache(kv_blocks)
        self._ended = ended
        self.steps = Steps(profile.cost)
        self.times = ProfileTimes(profile.cost)
        # Prefill first: no prompt fits the budget, so each goes alone.
        self._former = ComparedFormer(
            self,
            budget_tokens=chunk_tokens or 1,
            sequences_max=profile.batch_max,
            batching=Batching.STALL_FREE if chunk_tokens else Batching.PREFILL_FIRST,
        )
        self._requests: dict[str, SimulatedMixedRequest] = {}
        self.batch: dict[str, SimulatedMixedRequest] = {}
        #: Cache blocks that are in no pool: not yet computed, partial, or of answers.
        self.private = 0
        #: Predicted prefill time, and blocks to compute, of all that wait or are prefilled.
        self.queue_ns = 0
        self.prompt_blocks = 0
        self.active_blocks = 0
        self.prefill_ns = self.decode_ns = 0
        self._state = "idle"
        self._epoch = 0
        self._stalled_since_ns = -1

    def cached_blocks(self, request: SimulatedMixedRequest) -> int:
        """Cached blocks of the prompt, now; at least one token is computed."""
        if not self.prefix_caching:
            return 0
        usable = (request.outcome.prompt_tokens - 1) // self.block_tokens
        return min(self.pool.run(request.keys), usable)

    def predicted_ns(self, request: SimulatedMixedRequest) -> int:
        used = self.cached_blocks(request) * self.block_tokens
        return self.profile.cost.prefill_ns(request.outcome.prompt_tokens, used)

    def start(self, request: SimulatedMixedRequest) -> None:
        request.queued_ns = self.predicted_ns(request)
        self.queue_ns += request.queued_ns
        self.prompt_blocks += -(-request.outcome.prompt_tokens // self.block_tokens)
        self.active_blocks += request.blocks
        self._requests[request.name] = request
        self._former.add(request.name, request.outcome.prompt_tokens)
        if self._state == "idle":
            self._next()
        elif self._state == "decode" and self._fits(self._requests[self._former.waiting[0]]):
            self._book_run(self.steps.steps_until(self.clock.now_ns))

    @property
    def running(self) -> int:
        return len(self.batch)

    @property
    def queued(self) -> int:
        return len(self._former.waiting) + self._former.prefilling

    def step_ns(self) -> float:
        """A step of those who decode now."""
        return self.steps.step_ns(self.steps.sequences, self.steps.context_tokens)

    # --- what comes next ------------------------------------------------------------------------------------

    def _next(self) -> None:
        """The device is free."""
        made = self._former.form()
        if made.chunks and self.chunk_tokens:
            self._iterate(made)
        elif made.chunks:
            self._prefill_whole(self._requests[made.chunks[0].name])
        else:
            self._former.made()
            if self.batch:
                self._decode()
            else:
                self._state = "idle"

    def enter(self, name: str, tokens: int) -> int | None:
        """Room for all that the request will grow to."""
        request = self._requests[name]
        if not self._fits(request):
            return None
        request.used = self.cached_blocks(request) * self.block_tokens
        request.held = self.pool.hold(request.keys[: request.used // self.block_tokens])
        request.private = request.blocks - len(request.held)
        self.private += request.private
        self._resize()
        request.started_ns = self.clock.now_ns
        request.outcome.queue_ns = self.clock.now_ns - request.outcome.arrived_ns
        request.outcome.local_tokens = request.used
        return request.used

    def grow(self, name: str) -> bool:
        """Its room was taken when it entered."""
        return True

    def leave(self, name: str) -> None:
        """Its room is given up in `_end`."""

    def _fits(self, request: SimulatedMixedRequest) -> bool:
        if len(self._former.running) >= self.profile.batch_max:
            return False
        # Blocks that it shares with nobody who runs must be free, whether they are cached or not.
        shared = self.pool.held_of(request.keys[: self.cached_blocks(request)])
        return self.private + self.pool.held + request.blocks - shared <= self.kv_blocks

    def _resize(self) -> None:
        self.pool.resize(self.kv_blocks - self.private)

    # --- prefill first --------------------------------------------------------------------------------------

    def _prefill_whole(self, request: SimulatedMixedRequest) -> None:
        self._state = "prefill"
        if self._stalled_since_ns < 0:
            self._stalled_since_ns = self.clock.now_ns
        tokens = request.outcome.prompt_tokens
        took_ns = int(self.profile.cost.prefill_ns(tokens, request.used) * self.clock.jitter())
        self.prefill_ns += took_ns
        request.outcome.compute_ns = took_ns
        self.clock.after(took_ns, self._prefilled, request)

    def _prefilled(self, request: SimulatedMixedRequest) -> None:
        self._former.made()
        self._first_token(request)
        self._next()

    def _first_token(self, request: SimulatedMixedRequest) -> None:
        outcome = request.outcome
        outcome.first_token_ns = self.clock.now_ns
        self.queue_ns -= request.queued_ns
        self.prompt_blocks -= -(-outcome.prompt_tokens // self.block_tokens)
        if self.prefix_caching:
            added, _ = self.pool.commit(request.keys[len(request.held) :])
            request.held += added
            request.private -= len(added)
            self.private -= len(added)
            self._resize()
        if outcome.output_tokens == 1:
            outcome.tbt_ns = 0
            self._end(request)
            return
        request.joined = self.steps.made
        self.batch[request.name] = request
        self.steps.join(request.name, outcome.prompt_tokens + 1, outcome.output_tokens - 1)

    # --- decode alone ---------------------------------------------------------------------------------------

    def _decode(self) -> None:
        self._state = "decode"
        now_ns = self.clock.now_ns
        self.steps.start_run(now_ns, self.clock.jitter())
        if self._stalled_since_ns >= 0:
            # All that ran before waited for the prefills; who was prefilled, for those after its own.
            stalled_ns = now_ns - self._stalled_since_ns
            self._stalled_since_ns = -1
            step_ns = self.steps.run_ns(1)
            for request in self.batch.values():
                if request.joined == self.steps.made:
                    request.first_interval = step_ns + now_ns - request.outcome.first_token_ns
            self._epoch += 1
            self.decode_ns += step_ns
            self.clock.after(step_ns, self._step_over, float(stalled_ns + step_ns))
            self._state = "step"
            return
        self._book_run(self.steps.steps_to_end())

    def _step_over(self, length_ns: float) -> None:
        self._end_all(self.steps.single(length_ns))
        self._next()

    def _book_run(self, steps: int) -> None:
        steps = min(steps, self.steps.steps_to_end())
        self._epoch += 1
        self.clock.at(self.steps.since_ns + self.steps.run_ns(steps), self._run_over, steps, self._epoch)

    def _run_over(self, steps: int, epoch: int) -> None:
        if epoch == self._epoch:
            self.decode_ns += self.steps.run_ns(steps)
            self._end_all(self.steps.advance(steps))
            self._next()

    # --- chunks beside decode -------------------------------------------------------------------------------

    def _iterate(self, made: Iteration) -> None:
        self._state = "iteration"
        cost = self.profile.cost
        chunks = [(chunk.start, chunk.tokens) for chunk in made.chunks]
        for chunk in made.chunks:
            part_ns = cost.prefill_ns(chunk.start + chunk.tokens, chunk.start) - cost.prefill_base_ns
            self._requests[chunk.name].outcome.compute_ns += part_ns
        self.prefill_ns += int(self.times.iteration_ns(chunks, 0, 0))
        took_ns = self.times.iteration_ns(chunks, self.steps.sequences, self.steps.context_tokens)
        took_ns *= self.clock.jitter()
        self.clock.after(int(took_ns), self._iterated, took_ns, made)

    def _iterated(self, took_ns: float, made: Iteration) -> None:
        self._former.made()
        if self.batch:
            self._end_all(self.steps.single(took_ns))
        for chunk in made.chunks:
            if chunk.last:
                self._first_token(self._requests[chunk.name])
        self._next()

    # --- the end --------------------------------------------------------------------------------------------

    def _end_all(self, names: list[str]) -> None:
        for name in names:
            request = self.batch.pop(name)
            outcome = request.outcome
            intervals = self.steps.intervals(request.joined)
            if request.first_interval:
                length, count = intervals[0]
                intervals[0] = (length, count - 1)
                intervals.append((request.first_interval, 1))
            self.steps.leave(name, outcome.prompt_tokens + 1 + self.steps.made - request.joined)
            outcome.tbt_ns = tbt_ns(intervals)
            self._end(request)

    def _end(self, request: SimulatedMixedRequest) -> None:
        self._former.remove(request.name)
        del self._requests[request.name]
        self.pool.release(request.held)
        self.private -= request.private
        self.active_blocks -= request.blocks
        self._resize()
        outcome = request.outcome
        outcome.end, outcome.ended_ns = "finished", self.clock.now_ns
        self._ended(request)
