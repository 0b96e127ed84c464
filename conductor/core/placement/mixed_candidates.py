"""Candidates that are one mixed worker each: a request's times where prompts and answers share iterations.

Beside a prompt's chunks go the decodes that the worker has, so a prompt takes as many decode steps longer as it takes
iterations; and beside the answer go chunks of other prompts, up to the token budget and the time of an iteration,
wherever there are others.

Source: Sarathi-Serve (OSDI'24), sections 4.2 and 4.3: the time that a chunk adds to a decode's iteration, and the
reverse.

In a large fleet nearly all workers are passed over: `least_mixed` bounds ranks from below, and costs those workers
alone whose bound is no more than the best so far; one with a queue longer than that is not even looked at. The answer
is that of looking at all of them, ties included: tests compare the two, on random logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from halfmoon.conductor.core.placement.best_first import NEVER_NS, likely_places
from halfmoon.conductor.core.placement.candidates import cached_blocks_max, candidate_of, coming_blocks
from halfmoon.conductor.core.placement.decode_candidates import decode_candidate_of, decode_fits
from halfmoon.conductor.core.placement.measures import MixedCandidate
from halfmoon.conductor.core.placement.policies import (
    EARLIEST_TOKEN_MIXED,
    LEAST_DELAYS_MIXED,
    Least,
    MixedRule,
    rules_of,
)
from halfmoon.conductor.core.placement.prefix_match import PrefixMatch
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import NO_KV_BLOCKS
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import RequestArrived

#: The figures that `EARLIEST_TOKEN_MIXED` and `LEAST_DELAYS_MIXED` compare, then the id.
Rank = tuple[int, int, int, str]


class _Ranked(NamedTuple):
    rank: Rank
    candidate: MixedCandidate


def mixed_candidates(
    state: State,
    request: RequestArrived,
    match: PrefixMatch,
    now_ns: int,
    answer_tokens: int,
    *,
    avoid: Sequence[str] = (),
) -> list[MixedCandidate]:
    """Every mixed worker that could take the request, by id. Workers in `avoid` are left out unless there are no
    others.
    """
    fitting = [worker for worker in state.loads.mixed.workers if decode_fits(state, worker, request)]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    return [_candidate_of(state, worker, request, match, now_ns, answer_tokens) for worker in workers]


def least_mixed(
    state: State,
    request: RequestArrived,
    match: PrefixMatch,
    now_ns: int,
    answer_tokens: int,
    rule: MixedRule,
) -> MixedCandidate | None:
    """The candidate that `rule` takes among those that are not full and have room; where none has, among those that are
    not full, unless admission looks for room later.

    None when it is not known here: the rule has no bound, the workers differ in capacity, or there is none. Then all
    must be looked at.
    """
    index = state.loads.mixed
    if not isinstance(rule, Least) or rule not in (EARLIEST_TOKEN_MIXED, LEAST_DELAYS_MIXED):
        return None
    # The index is of the state's own time. A request that is explained at an earlier time is costed whole.
    if now_ns < state.at_ns or request.prompt_tokens + request.max_tokens > index.tokens_max:
        return None
    search = _Search(state, request, match, now_ns, answer_tokens, rule)
    context = request.prompt_tokens + answer_tokens
    best = search.least(-(-context // index.block_tokens) if index.block_tokens else 0)
    if best is None and state.policy.admission not in ("early", "predicted"):
        best = search.least(-NO_KV_BLOCKS)
    return best


class _Search:
    """Branch and bound over the mixed workers, as `best_first` does it for prefill workers."""

    __slots__ = (
        "_answer_tokens",
        "_delays",
        "_match",
        "_now_ns",
        "_own",
        "_request",
        "_rule",
        "_state",
    )

    def __init__(
        self,
        state: State,
        request: RequestArrived,
        match: PrefixMatch,
        now_ns: int,
        answer_tokens: int,
        rule: Least[MixedCandidate],
    ) -> None:
        self._state, self._request, self._match, self._now_ns = state, request, match, now_ns
        self._answer_tokens, self._rule, self._delays = answer_tokens, rule, rule == LEAST_DELAYS_MIXED
        #: A worker reads the blocks of its own memory alone.
        self._own = rules_of(state).fetch == "local_only" and match.dram is match.held

    def least(self, blocks: int) -> MixedCandidate | None:
        """The best of the workers whose queue is not full and that have so many blocks free."""
        index = self._state.loads.mixed
        # A good cost at the start passes over the most: that of the best bound among those that mostly win.
        likely = likely_places(index, self._match)
        bounds = self._bounds(likely, blocks)
        _, first = min(bounds, default=(0, -1))
        best = self._ranked(first) if first >= 0 else None
        # Without a good cost, no worker is passed over.
        limit_ns = NEVER_NS if best is None else best.rank[0]
        bounded = dict.fromkeys(likely)
        places = [place for _, place in index.up_to(self._now_ns + limit_ns) if place not in bounded]
        bounds += self._bounds(places, blocks, limit_ns)
        for least_ns, place in sorted(bounds):
            if place == first:
                continue
            if best is not None and least_ns >= best.rank[0]:
                if least_ns > best.rank[0]:
                    break
                if self._rank_bound(index.workers[place], least_ns) > best.rank:
                    continue
            here = self._ranked(place)
            if best is None or here.rank < best.rank:
                best = here
        return None if best is None else best.candidate

    def _bounds(self, places: list[int], blocks: int, limit_ns: int = NEVER_NS) -> list[tuple[int, int]]:
        """A lower bound of the first figure of the rank, with the waits of others or without, and the place, of those
        of the workers at `places` whose queue is not full and that have so many blocks free; none that is certain to
        be above `limit_ns`.

        No first token comes before the queue is done and all is computed behind what may be read: the worker's own
        blocks in memory where nothing is fetched, else the longest match; or what comes there. Transfers, copies and
        decodes beside it are taken to be free.
        """
        match, now_ns, tokens = self._match, self._now_ns, self._request.prompt_tokens
        index, most = self._state.loads.mixed, self._state.policy.queued_max_per_worker
        cached_max = cached_blocks_max(index.workers[0], tokens) if index.workers else 0
        cached_here: dict[int, int] = {}
        if self._own:
            for node_id, held in match.dram.items():
                cached_here.update(dict.fromkeys(index.on_node.get(node_id, ()), min(held, cached_max)))
        cached_else = 0 if self._own else min(match.longest, cached_max)
        coming_here = coming_blocks(self._state, match)
        for place in index.places(coming_here):
            coming = min(coming_here[index.workers[place].worker_id], cached_max)
            cached_here[place] = max(cached_here.get(place, cached_else), coming)
        # At the least cost of any worker: mostly that is enough to pass over one with a long queue.
        least_ns = index.least.prefill_ns(tokens, cached_else * index.block_tokens)
        rows, delays, found = index.rows, self._delays, []
        for place in places:
            free_ns, behind_ns, orders, blocks_free = rows[place]
            if orders >= most or blocks_free < blocks:
                continue
            times = orders + 1 if delays else 1
            queue_ns = free_ns - now_ns
            if queue_ns < behind_ns:
                queue_ns = behind_ns
            if place in cached_here:
                cached = cached_here[place]
            elif queue_ns + times * least_ns > limit_ns:
                continue
            else:
                cached = cached_else
            own_ns = index.workers[place].cost.prefill_ns(tokens, cached * index.block_tokens)
            if (bound_ns := queue_ns + times * own_ns) <= limit_ns:
                found.append((bound_ns, place))
        return found

    def _rank_bound(self, worker: WorkerRecord, least_ns: int) -> Rank:
        """A lower bound of the worker's rank, whose first figure is `least_ns` or more."""
        sequences = len(worker.orders)
        context = worker.context_tokens + self._request.prompt_tokens + self._answer_tokens
        step_ns = 0 if worker.priced else worker.cost.step_ns(sequences + 1, context)
        return least_ns, step_ns, sequences, worker.worker_id

    def _ranked(self, place: int) -> _Ranked:
        state = self._state
        worker = state.loads.mixed.workers[place]
        here = _candidate_of(state, worker, self._request, self._match, self._now_ns, self._answer_tokens)
        least_ns, step_ns, orders = (measure.of(here) for measure in self._rule.measures)
        return _Ranked((least_ns, step_ns, orders, here.worker_id), here)


def _candidate_of(
    state: State,
    worker: WorkerRecord,
    request: RequestArrived,
    match: PrefixMatch,
    now_ns: int,
    answer_tokens: int,
) -> MixedCandidate:
    prefill = candidate_of(state, worker, request.prompt_tokens, match, now_ns)
    own_tokens = request.prompt_tokens + answer_tokens
    decode = decode_candidate_of(state, worker, match, own_tokens)
    # Those that wait now are computed before it, and write their answers by then.
    others_wait_ns = prefill.prefill_ns * len(worker.orders)
    decoding = [order for order_id in worker.orders if (order := state.orders[order_id]).phase == "decode"]
    if decoding:
        context = sum(order.decode.context_tokens for order in decoding)
        tokens, chunks_ns = chunks_beside(worker, len(decoding), context)
        computed = request.prompt_tokens - prefill.cached_tokens
        iterations = max(-(-computed // tokens), -(-prefill.prefill_ns // chunks_ns))
        beside_ns = iterations * worker.cost.step_ns(len(decoding), context)
        prefill = msgspec.structs.replace(
            prefill, prefill_ns=prefill.prefill_ns + beside_ns, ttft_ns=prefill.ttft_ns + beside_ns
        )
    if worker.orders:
        tokens, chunks_ns = chunks_beside(worker, len(worker.orders), worker.context_tokens + own_tokens)
        chunk_ns = min(worker.cost.prefill_ns(tokens, 0), chunks_ns)
        decode = msgspec.structs.replace(decode, tbt_ns=decode.tbt_ns + chunk_ns)
    return MixedCandidate(prefill=prefill, decode=decode, others_wait_ns=others_wait_ns)


class ChunksBeside(NamedTuple):
    """Chunks of prompts in one iteration, at most."""

    tokens: int
    ns: int


def chunks_beside(worker: WorkerRecord, sequences: int, context_tokens: int) -> ChunksBeside:
    """In an iteration beside so many decodes: whole grains, one at least."""
    duty, cost = worker.batch, worker.cost
    assert duty is not None, worker
    grain = worker.block_tokens if worker.layout.numerics == "exact" else 1
    tokens = max(grain, (duty.token_budget - sequences) // grain * grain)
    if not duty.iteration_ns:
        return ChunksBeside(tokens, NEVER_NS)
    left_ns = cost.beside_ns(duty.iteration_ns, sequences, context_tokens)
    return ChunksBeside(tokens, max(left_ns, cost.chunk_ns(0, grain), 1))
