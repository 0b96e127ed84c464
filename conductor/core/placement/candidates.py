"""Candidates: the cost of a request at each worker.

`candidates` costs one prompt at every prefill worker, `decode_candidates` at every decode worker. They change nothing,
so that replay can call them to explain a decision. `policies` says which candidate is taken, `best_first` finds that
one without looking at all.

Source: Mooncake (FAST'25), Algorithm 1; which blocks to fetch from where is in `fetch_plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import assert_never

import msgspec

from halfmoon.conductor.core.placement.cache_places import longest_elsewhere, places_for
from halfmoon.conductor.core.placement.fetch_plan import (
    FetchPlan,
    Prompt,
    best_plan,
    plan_as_printed,
    plan_from_own_ssd,
)
from halfmoon.conductor.core.placement.lending import Borrowing, borrowings, longest_with_loans
from halfmoon.conductor.core.placement.measures import Candidate, DecodeCandidate
from halfmoon.conductor.core.placement.policies import FetchRule, rules_of
from halfmoon.conductor.core.placement.prefix_match import PrefixMatch
from halfmoon.conductor.core.placement.prices import Row, rows_of, step_price
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import queue_ns, tokens_max
from halfmoon.conductor.core.state.records import WorkerRecord, part_blocks
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.lending import KvPart

# --- prefill ------------------------------------------------------------------------------------------------


def candidates(
    state: State, request: RequestArrived, match: PrefixMatch, now_ns: int, *, avoid: Sequence[str] = ()
) -> list[Candidate]:
    """Every prefill worker that could take the request, by id, with its cost under the policy in force.

    Workers in `avoid` are left out unless there are no others. Empty when no worker is there or none can hold the
    prompt.
    """
    fitting = [worker for worker in state.loads.prefill.workers if prefill_fits(state, worker, request)]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    return [candidate_of(state, worker, request.prompt_tokens, match, now_ns) for worker in workers]


def candidate_of(
    state: State, worker: WorkerRecord, tokens: int, match: PrefixMatch, now_ns: int
) -> Candidate:
    """The cost of a prompt of `tokens` at one prefill worker."""
    policy, duty = state.policy, worker.prompts
    assert duty is not None, worker
    queue = queue_ns(worker, now_ns)
    limit = cached_blocks_max(worker, tokens)
    local = min(match.dram.get(worker.node_id, 0), limit)
    copies = copies_ns(state, worker.cost, worker.block_tokens, min(match.longest, limit) - local)
    cached, transfer, source, sharing, ssd = local, 0, "", 1, False
    prefill = worker.cost.prefill_ns(tokens, local * worker.block_tokens)
    ttft = queue + prefill
    if limit and match.longest > local:
        prompt = Prompt(worker, tokens, match, now_ns, queue, local, limit)
        plan = _plan(state, prompt, rules_of(state).fetch, ttft)
        if plan is not None:
            cached, transfer, source, ssd = plan.blocks, plan.transfer_ns, plan.node_id, plan.from_ssd
            prefill, ttft, sharing, local = plan.prefill_ns, plan.ttft_ns, plan.sharing, plan.first_block
    fetches = []
    # The source may be the worker's own node: then the blocks are read from its SSD.
    if source and cached > local:
        replicas = _replicas(match, cached, 0 if ssd else policy.fetch_replicas, source, worker.node_id)
        fetches.append(Fetch(node_id=source, first_block=local, blocks=cached - local, replicas=replicas))
    return Candidate(
        worker_id=worker.worker_id,
        node_id=worker.node_id,
        queue_ns=queue,
        transfer_ns=transfer,
        prefill_ns=prefill,
        ttft_ns=ttft,
        cached_tokens=cached * worker.block_tokens,
        cached_blocks=cached,
        local_blocks=local,
        fetches=fetches,
        fetch_sharing=sharing,
        from_ssd=ssd,
        orders=len(worker.orders),
        pending_blocks=duty.pending_blocks,
        prompt_blocks=duty.prompt_blocks,
        uncached_blocks=-(-tokens // worker.block_tokens) - cached,
        copies_ns=copies,
        full=len(worker.orders) >= policy.queued_max_per_worker,
    )


def _plan(state: State, prompt: Prompt, rule: FetchRule, computed_ns: int) -> FetchPlan | None:
    """The fetch plan by the policy's rule; None when computing, done after `computed_ns`, is as early."""
    match rule:
        case "cheapest":
            plan = best_plan(state, prompt)
        case "local_only":
            plan = plan_from_own_ssd(state, prompt)
        case "as_printed":
            # The printed rule compares lengths of prefixes only: its plan is taken though computing may be faster.
            return plan_as_printed(state, prompt)
        case _:
            assert_never(rule)
    return plan if plan is not None and plan.ttft_ns < computed_ns else None


def cached_blocks_max(worker: WorkerRecord, tokens: int) -> int:
    """Blocks of a prompt that need not be computed at most: the last token always is, for its logits."""
    return (tokens - 1) // worker.block_tokens if worker.block_bytes else 0


def _replicas(match: PrefixMatch, blocks: int, count: int, *but: str) -> list[str]:
    """Up to `count` nodes that have the first `blocks` in DRAM, longest prefix first, without those in `but`."""
    if not count:
        return []
    held = (
        source.node_id
        for source in match.sources(blocks - 1)
        if source.dram_blocks >= blocks and source.node_id not in but
    )
    return list(islice(held, count))


def copies_ns(state: State, cost: CostProfile, block_tokens: int, blocks: int) -> int:
    """Price of `blocks` that another node holds and this one will; 0 under a policy that does not price copies.

    In a full pool they displace as many others, each of which may have to be computed when it is asked for again: as
    often as displaced blocks were, for all who wait then (`displaced`), or as often as blocks are reused on average
    (`reuse`).
    """
    counters = state.counters
    if blocks <= 0 or not rules_of(state).copies_priced:
        return 0
    compute_ns = blocks * (cost.prefill_per_token_ps * block_tokens // 1_000)
    if state.policy.copies_price == "displaced":
        return state.displaced.price_ns(compute_ns, state.loads.prompts_permille())
    if not counters.prompt_tokens:
        return 0
    reused = counters.cached_local_tokens + counters.cached_fetched_tokens
    return compute_ns * reused // counters.prompt_tokens


def prefill_fits(state: State, worker: WorkerRecord, request: RequestArrived) -> bool:
    """True when the worker's context and cache, and its node's pool, hold the prompt."""
    return request.prompt_tokens <= min(tokens_max(worker), state.pool_tokens(worker))


# --- decode -------------------------------------------------------------------------------------------------


def decode_candidates(
    state: State,
    request: RequestArrived,
    match: PrefixMatch,
    answer_tokens: int,
    *,
    avoid: Sequence[str] = (),
) -> list[DecodeCandidate]:
    """Every decode worker that could take the request, by id, with all reservations counted; where none could alone,
    those that could with others' help.
    """
    fitting = [worker for worker in state.loads.decode.workers if decode_fits(state, worker, request)]
    context = request.prompt_tokens + answer_tokens
    if any(worker.cache_elsewhere for worker in fitting):
        trusted = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
        return list(_elsewhere_candidates(state, trusted, request, match, context))
    if not fitting:
        return [
            _borrowing_candidate(state, one, request, match, context)
            for one in borrowings(state, request, avoid=avoid)
        ]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    return [decode_candidate_of(state, worker, match, context) for worker in workers]


def decode_candidate_of(
    state: State,
    worker: WorkerRecord,
    match: PrefixMatch,
    context_tokens: int,
    *,
    loans: Sequence[KvPart] = (),
    cache: Sequence[KvPart] = (),
) -> DecodeCandidate:
    """One decode worker with a request of `context_tokens` (prompt and expected answer) on top of its load; `loans` and
    `cache`: who else has some of its KV.
    """
    blocks = -(-context_tokens // worker.block_tokens) if worker.block_bytes else 0
    sequences = len(worker.orders)
    rows = [*rows_of(state, worker), Row(context_tokens, list(loans), list(cache))]
    price = step_price(state, worker, sequences + 1, worker.context_tokens + context_tokens, rows)
    return DecodeCandidate(
        worker_id=worker.worker_id,
        node_id=worker.node_id,
        tbt_ns=price.ns,
        waits_ns=price.waits_ns,
        groups=price.groups,
        loans=list(loans),
        cache=list(cache),
        blocks=blocks,
        reserved_blocks=worker.reserved_blocks,
        room=has_room(worker, sequences, worker.reserved_blocks, blocks),
        prefix_blocks=match.held.get(worker.node_id, 0),
        sequences=sequences,
        full=sequences - worker.batch_max >= state.policy.queued_max_per_worker,
    )


def _borrowing_candidate(
    state: State, borrowing: Borrowing, request: RequestArrived, match: PrefixMatch, context_tokens: int
) -> DecodeCandidate:
    worker, loans, room = borrowing
    # Not for the expected answer but for the longest: lenders can take no more later.
    blocks = -(-(request.prompt_tokens + request.max_tokens) // worker.block_tokens)
    blocks -= sum(part_blocks(worker.layout, loan) for loan in loans)
    candidate = decode_candidate_of(state, worker, match, context_tokens, loans=loans)
    return msgspec.structs.replace(candidate, blocks=blocks, room=room)


def _elsewhere_candidates(
    state: State, workers: Sequence[WorkerRecord], request: RequestArrived, match: PrefixMatch, context: int
) -> Iterator[DecodeCandidate]:
    """Those of the workers whose sequences find room where their KV lies, and those that keep it themselves."""
    for worker in workers:
        if not worker.cache_elsewhere:
            yield decode_candidate_of(state, worker, match, context)
        elif (found := places_for(state, worker, request)) is not None:
            room = found.room and len(worker.orders) < worker.batch_max
            candidate = decode_candidate_of(state, worker, match, context, cache=found.places)
            yield msgspec.structs.replace(candidate, blocks=0, room=room, cache_blocks=found.blocks)


def decode_fits(state: State, worker: WorkerRecord, request: RequestArrived) -> bool:
    """True when the worker's context and cache hold prompt and answer, and its node's pool the prompt."""
    if request.prompt_tokens > state.pool_tokens(worker):
        return False
    return request.prompt_tokens + request.max_tokens <= tokens_max(worker)


def fits(state: State, worker: WorkerRecord, request: RequestArrived) -> bool:
    """Whether the worker, and its node's pool, could hold its part of the request, were they empty."""
    if worker.batch is not None:  # of a mixed one too: it decodes what it has computed
        return decode_fits(state, worker, request)
    # Who only holds parts of others' sequences has no half of a request, so none is too long for it.
    return worker.prompts is None or prefill_fits(state, worker, request)


def capacity(state: State) -> tuple[int, int]:
    """Tokens of the longest prompt, and of the longest prompt with its answer, that the workers which take orders could
    hold, were they empty; 0 where a pool has no worker.
    """
    prefills, decodes, mixed = (
        state.loads.prefill.workers,
        state.loads.decode.workers,
        state.loads.mixed.workers,
    )
    prompts = [
        max((min(_tokens_max(state, worker), state.pool_tokens(worker)) for worker in workers), default=0)
        for workers in (prefills, decodes)
    ]
    lent, pool = longest_with_loans(state), max(map(state.pool_tokens, decodes), default=0)
    prompts[1] = max(prompts[1], min(lent, pool))
    whole = max(max((_tokens_max(state, worker) for worker in (*decodes, *mixed)), default=0), lent)
    one = max((min(tokens_max(worker), state.pool_tokens(worker)) for worker in mixed), default=0)
    return max(min(prompts), one), whole


def _tokens_max(state: State, worker: WorkerRecord) -> int:
    """Tokens of the longest request that a decode worker, or who holds its KV, could take."""
    if worker.cache_elsewhere:
        return min(tokens_max(worker), longest_elsewhere(state, worker))
    return tokens_max(worker)


def has_room(worker: WorkerRecord, sequences: int, reserved_blocks: int, blocks: int) -> bool:
    """True when one more request fits beside `sequences` that hold `reserved_blocks`."""
    # A null engine has no KV to fit.
    if worker.block_bytes == 0:
        return True
    return sequences < worker.batch_max and reserved_blocks + blocks <= worker.kv_blocks
