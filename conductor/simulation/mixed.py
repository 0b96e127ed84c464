"""A simulated colocated worker: it prefills and decodes on the same device, as the baselines do.

- Prefill first (vLLM's first scheduler): whoever waits and fits is prefilled at once, whole; decode stands
  still.
- Chunked prefill: every iteration decodes the whole batch and computes prompt tokens up to the budget beside
  it. It takes the base once, the chunk's part of its prefill, and the batch's part of a step.

Running requests hold the cache that they will grow to; with prefix caching the rest keeps blocks of those
that ended.

Source: vLLM (SOSP'23), section 4; SARATHI (arXiv 2308.16369) and Sarathi-Serve (OSDI'24), section 4, for the
batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from halfmoon.conductor.simulation.batch import Steps, tbt_ns
from halfmoon.conductor.simulation.block_cache import BlockCache
from halfmoon.conductor.simulation.clock import Clock
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile


class MixedRequest:
    """One request in hand."""

    __slots__ = (
        "blocks",
        "computed",
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
        #: Prompt tokens that are in the cache now, and that were when it was admitted.
        self.computed = self.used = 0
        self.held: list[bytes] = []
        self.private = 0
        self.joined = 0
        self.queued_ns = self.started_ns = 0
        self.first_interval = 0.0


class MixedWorker:
    """`start` takes a request; `ended` is called with each that has ended."""

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
        ended: Callable[[MixedRequest], None],
    ) -> None:
        self.worker_id, self.clock, self.profile = worker_id, clock, profile
        self.block_tokens, self.kv_blocks = block_tokens, kv_blocks
        #: 0: prefill first.
        self.chunk_tokens = chunk_tokens
        self.prefix_caching = prefix_caching
        self.pool = BlockCache(kv_blocks)
        self._ended = ended
        self.steps = Steps(profile.cost)
        self.waiting: deque[MixedRequest] = deque()
        self.prefilling: deque[MixedRequest] = deque()
        self.batch: dict[str, MixedRequest] = {}
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

    def cached_blocks(self, request: MixedRequest) -> int:
        """Cached blocks of the prompt, now; at least one token is computed."""
        if not self.prefix_caching:
            return 0
        usable = (request.outcome.prompt_tokens - 1) // self.block_tokens
        return min(self.pool.run(request.keys), usable)

    def predicted_ns(self, request: MixedRequest) -> int:
        used = self.cached_blocks(request) * self.block_tokens
        return self.profile.cost.prefill_ns(request.outcome.prompt_tokens, used)

    def start(self, request: MixedRequest) -> None:
        request.queued_ns = self.predicted_ns(request)
        self.queue_ns += request.queued_ns
        self.prompt_blocks += -(-request.outcome.prompt_tokens // self.block_tokens)
        self.active_blocks += request.blocks
        self.waiting.append(request)
        if self._state == "idle":
            self._next()
        elif self._state == "decode" and self._fits(self.waiting[0]):
            self._book_run(self.steps.steps_until(self.clock.now_ns))

    # --- what comes next ------------------------------------------------------------------------------------

    def _next(self) -> None:
        """The device is free."""
        if self.waiting and (not self.chunk_tokens or not self.prefilling):
            self._admit()
        if self.prefilling:
            if self.chunk_tokens:
                self._iterate()
            else:
                self._prefill_whole(self.prefilling.popleft())
        elif self.batch:
            self._decode()
        else:
            self._state = "idle"

    def _admit(self) -> None:
        while self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            request.used = self.cached_blocks(request) * self.block_tokens
            request.computed = request.used
            request.held = self.pool.hold(request.keys[: request.used // self.block_tokens])
            request.private = request.blocks - len(request.held)
            self.private += request.private
            self._resize()
            request.started_ns = self.clock.now_ns
            request.outcome.queue_ns = self.clock.now_ns - request.outcome.arrived_ns
            request.outcome.local_tokens = request.used
            self.prefilling.append(request)
            if not self.chunk_tokens:
                break

    def _fits(self, request: MixedRequest) -> bool:
        if len(self.batch) + len(self.prefilling) >= self.profile.batch_max:
            return False
        # Blocks that it shares with nobody who runs must be free, whether they are cached or not.
        shared = self.pool.held_of(request.keys[: self.cached_blocks(request)])
        return self.private + self.pool.held + request.blocks - shared <= self.kv_blocks

    def _resize(self) -> None:
        self.pool.resize(self.kv_blocks - self.private)

    # --- prefill first --------------------------------------------------------------------------------------

    def _prefill_whole(self, request: MixedRequest) -> None:
        self._state = "prefill"
        if self._stalled_since_ns < 0:
            self._stalled_since_ns = self.clock.now_ns
        tokens = request.outcome.prompt_tokens
        took_ns = int(self.profile.cost.prefill_ns(tokens, request.used) * self.clock.jitter())
        self.prefill_ns += took_ns
        request.outcome.compute_ns = took_ns
        self.clock.after(took_ns, self._prefilled, request)

    def _prefilled(self, request: MixedRequest) -> None:
        self._first_token(request)
        self._next()

    def _first_token(self, request: MixedRequest) -> None:
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

    def _iterate(self) -> None:
        self._state = "iteration"
        cost = self.profile.cost
        budget = max(1, self.chunk_tokens - self.steps.sequences)
        took_ns, done, computed = float(cost.prefill_base_ns), [], 0
        while budget > 0 and self.prefilling:
            request = self.prefilling[0]
            tokens = min(budget, request.outcome.prompt_tokens - request.computed)
            after = request.computed + tokens
            part_ns = cost.prefill_ns(after, request.computed) - cost.prefill_base_ns
            request.outcome.compute_ns += part_ns
            computed += part_ns
            request.computed = after
            budget -= tokens
            if after == request.outcome.prompt_tokens:
                done.append(self.prefilling.popleft())
            if not self.prefilling and self.waiting:
                self._admit()
        self.prefill_ns += computed + cost.prefill_base_ns
        took_ns += computed
        if self.steps.sequences:
            took_ns += (
                self.steps.step_ns(self.steps.sequences, self.steps.context_tokens) - cost.decode_base_ns
            )
        took_ns *= self.clock.jitter()
        self.clock.after(int(took_ns), self._iterated, took_ns, done)

    def _iterated(self, took_ns: float, done: list[MixedRequest]) -> None:
        if self.batch:
            self._end_all(self.steps.single(took_ns))
        for request in done:
            self._first_token(request)
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

    def _end(self, request: MixedRequest) -> None:
        self.pool.release(request.held)
        self.private -= request.private
        self.active_blocks -= request.blocks
        self._resize()
        outcome = request.outcome
        outcome.end, outcome.ended_ns = "finished", self.clock.now_ns
        self._ended(request)
