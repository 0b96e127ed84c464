"""Candidates that are one mixed worker each: a request's times where prompts and answers share iterations.

Beside a prompt's chunks go the decodes that the worker has, so a prompt takes as many decode steps longer as it takes
iterations; and beside the answer go chunks of other prompts, up to the token budget, wherever there are others.

Source: Sarathi-Serve (OSDI'24), sections 4.2 and 4.3: the time that a chunk adds to a decode's iteration, and the
reverse.

In a large fleet nearly all workers are passed over: `least_mixed` bounds each one's rank from below, and costs those
alone whose bound is no more than the best so far. The answer is that of looking at all of them, ties included: tests
compare the two, on random logs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from halfmoon.conductor.core.placement.candidates import cached_blocks_max, candidate_of
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
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import RequestArrived

#: The figures that `EARLIEST_TOKEN_MIXED` and `LEAST_DELAYS_MIXED` compare, then the id.
Rank = tuple[int, int, int, str]


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
    if request.prompt_tokens + request.max_tokens > index.tokens_max:
        return None
    context = request.prompt_tokens + answer_tokens
    places = _able_places(state, context)
    best: MixedCandidate | None = None
    rank: Rank | None = None
    delays = rule == LEAST_DELAYS_MIXED
    for least_ns, place in sorted(
        _bounds(state, places, request.prompt_tokens, match, now_ns, delays=delays)
    ):
        worker = index.workers[place]
        if rank is not None and least_ns >= rank[0]:
            if least_ns > rank[0]:
                break
            if _rank_bound(worker, least_ns, context) > rank:
                continue
        here = _candidate_of(state, worker, request, match, now_ns, answer_tokens)
        here_rank = _rank(rule, here)
        if rank is None or here_rank < rank:
            best, rank = here, here_rank
    return best


def _rank(rule: Least[MixedCandidate], candidate: MixedCandidate) -> Rank:
    least_ns, step_ns, orders = (measure.of(candidate) for measure in rule.measures)
    return least_ns, step_ns, orders, candidate.worker_id


def _able_places(state: State, context_tokens: int) -> list[int]:
    """Places of the workers among which the choice is; []: it is not by rank alone."""
    index, policy = state.loads.mixed, state.policy
    blocks = -(-context_tokens // index.block_tokens) if index.block_tokens else 0
    able = [
        place
        for place, worker in enumerate(index.workers)
        if len(worker.orders) < policy.queued_max_per_worker
    ]
    roomy = [place for place in able if index.rows[place].blocks_free >= blocks]
    return roomy or ([] if policy.admission in ("early", "predicted") else able)


def _bounds(
    state: State, places: list[int], tokens: int, match: PrefixMatch, now_ns: int, *, delays: bool
) -> list[tuple[int, int]]:
    """A lower bound of the first figure of the rank, with the waits of others or without, at each of the mixed workers,
    and its place.

    No first token comes before the queue is done and all is computed behind what may be read: the worker's own blocks
    in memory where nothing is fetched, else the longest match. Transfers, copies and decodes beside it are taken to be
    free.
    """
    workers, dram = state.loads.mixed.workers, match.dram
    limit = cached_blocks_max(workers[0], tokens) if workers else 0
    own = rules_of(state).fetch == "local_only" and dram is match.held
    longest = min(match.longest, limit)
    found = []
    for place in places:
        worker = workers[place]
        cached = min(dram.get(worker.node_id, 0), limit) if own else longest
        compute_ns = worker.cost.prefill_ns(tokens, cached * worker.block_tokens)
        waits_ns = compute_ns * len(worker.orders) if delays else 0
        found.append((queue_ns(worker, now_ns) + compute_ns + waits_ns, place))
    return found


def _rank_bound(worker: WorkerRecord, least_ns: int, context_tokens: int) -> Rank:
    """A lower bound of the worker's rank, whose first figure is `least_ns` or more."""
    sequences = len(worker.orders)
    if worker.priced:
        return least_ns, 0, sequences, worker.worker_id
    step_ns = worker.cost.step_ns(sequences + 1, worker.context_tokens + context_tokens)
    return least_ns, step_ns, sequences, worker.worker_id


def _candidate_of(
    state: State,
    worker: WorkerRecord,
    request: RequestArrived,
    match: PrefixMatch,
    now_ns: int,
    answer_tokens: int,
) -> MixedCandidate:
    prefill = candidate_of(state, worker, request.prompt_tokens, match, now_ns)
    decode = decode_candidate_of(state, worker, match, request.prompt_tokens + answer_tokens)
    # Those that wait now are computed before it, and write their answers by then.
    others_wait_ns = prefill.prefill_ns * len(worker.orders)
    decoding = [order for order_id in worker.orders if (order := state.orders[order_id]).phase == "decode"]
    if decoding:
        computed = request.prompt_tokens - prefill.cached_tokens
        iterations = -(-computed // chunk_tokens(worker, len(decoding)))
        step_ns = worker.cost.step_ns(len(decoding), sum(order.decode.context_tokens for order in decoding))
        beside_ns = iterations * step_ns
        prefill = msgspec.structs.replace(
            prefill, prefill_ns=prefill.prefill_ns + beside_ns, ttft_ns=prefill.ttft_ns + beside_ns
        )
    if worker.orders:
        chunk_ns = worker.cost.prefill_ns(chunk_tokens(worker, len(worker.orders)), 0)
        decode = msgspec.structs.replace(decode, tbt_ns=decode.tbt_ns + chunk_ns)
    return MixedCandidate(prefill=prefill, decode=decode, others_wait_ns=others_wait_ns)


def chunk_tokens(worker: WorkerRecord, decoding: int) -> int:
    """Tokens of prompts in an iteration beside `decoding` decodes: whole blocks in exact numerics, one at least."""
    grain = worker.block_tokens if worker.layout.numerics == "exact" else 1
    assert worker.batch is not None, worker
    return max(grain, (worker.batch.token_budget - decoding) // grain * grain)
