"""Prefill candidates: the cost of a prompt at each prefill worker.

`candidates` costs it at all of them and changes nothing, so that replay can call it to explain a decision. `policies`
has the rule of choice, `best_first` finds its candidate without looking at all; `costed` asks the two.

Source: Mooncake (FAST'25), Algorithm 1; the fetches are planned in `fetch_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from halfmoon.conductor.core.placement.fetch_plan import Prompt, plan_by, replicas_of
from halfmoon.conductor.core.placement.measures import Candidate
from halfmoon.conductor.core.placement.policies import rules_of
from halfmoon.conductor.core.placement.prefix_match import PrefixMatch
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import queue_ns, tokens_max
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.events import RequestArrived


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
    limit = cached_blocks_max(worker, tokens)
    queue = queue_ns(worker, now_ns)
    held = match.dram.get(worker.node_id, 0)
    coming = coming_blocks(state, match).get(worker.worker_id, 0)
    local = min(max(held, coming), limit)
    copied = min(match.longest, limit) - local
    copies = copies_ns(copies_rate(state), worker.cost, worker.block_tokens, copied) if copied > 0 else 0
    cached, transfer, source, sharing, ssd = local, 0, "", 1, False
    prefill = worker.cost.prefill_ns(tokens, local * worker.block_tokens)
    ttft = queue + prefill
    if limit and match.longest > local:
        prompt = Prompt(worker, tokens, match, now_ns, queue, local, limit)
        plan = plan_by(rules_of(state).fetch, state, prompt, ttft)
        if plan is not None:
            cached, transfer, source, ssd = plan.blocks, plan.transfer_ns, plan.node_id, plan.from_ssd
            prefill, ttft, sharing, local = plan.prefill_ns, plan.ttft_ns, plan.sharing, plan.first_block
    fetches = []
    # The source may be the worker's own node: then the blocks are read from its SSD.
    if source and cached > local:
        replicas = replicas_of(match, cached, 0 if ssd else policy.fetch_replicas, source, worker.node_id)
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
        coming_blocks=max(0, min(coming, limit) - held),
        copies_ns=copies,
        full=len(worker.orders) >= policy.queued_max_per_worker,
    )


def cached_blocks_max(worker: WorkerRecord, tokens: int) -> int:
    """Blocks of a prompt that need not be computed at most: the last token always is, for its logits."""
    return (tokens - 1) // worker.block_tokens if worker.block_bytes else 0


def coming_blocks(state: State, match: PrefixMatch) -> Mapping[str, int]:
    """Blocks of the prompt, from the first on, that workers will have of prompts before it, as far as the policy counts
    them.
    """
    return match.coming if rules_of(state).coming_counted else {}


class CopiesRate(NamedTuple):
    """The price of copying blocks, as a share of the time that computing them takes."""

    part: int
    whole: int


FREE_COPIES = CopiesRate(0, 1)


def copies_rate(state: State) -> CopiesRate:
    """The rate for blocks that another node holds and this one will; free under a policy that does not price copies.

    In a full pool a copy displaces another block, which may have to be computed when it is asked for again: as often as
    displaced blocks were, for all requests that wait then (`displaced`), or as often as blocks are reused on average
    (`reuse`).
    """
    counters = state.counters
    if not rules_of(state).copies_priced:
        return FREE_COPIES
    if state.policy.copies_price == "displaced":
        return CopiesRate(*state.displaced.rate(state.loads.prompts_permille()))
    if not counters.prompt_tokens:
        return FREE_COPIES
    return CopiesRate(counters.cached_local_tokens + counters.cached_fetched_tokens, counters.prompt_tokens)


def copies_ns(rate: CopiesRate, cost: CostProfile, block_tokens: int, blocks: int) -> int:
    """Price of copies of `blocks` blocks, none or more, at a worker of this cost."""
    return blocks * (cost.prefill_per_token_ps * block_tokens // 1_000) * rate.part // rate.whole


def prefill_fits(state: State, worker: WorkerRecord, request: RequestArrived) -> bool:
    """True when the worker's context and cache, and its node's pool, hold the prompt."""
    return request.prompt_tokens <= min(tokens_max(worker), state.pool_tokens(worker))
