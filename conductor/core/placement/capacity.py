"""Capacity: the longest requests that workers could hold, were they empty, and the refusal of a longer one."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.conductor.core.placement.candidates import prefill_fits
from halfmoon.conductor.core.placement.decode_candidates import decode_fits
from halfmoon.conductor.core.placement.parts import pools_of, splitting
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import tokens_max
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import RequestArrived


def nowhere_to_hold(state: State) -> str:
    """Why attention workers can hold no KV for any decode worker; "": they can for one, or it keeps its own."""
    why = ""
    for worker in state.loads.decode.workers:
        why = nowhere_to_hold_for(state, worker)
        if not why:
            break
    return why


def nowhere_to_hold_for(state: State, worker: WorkerRecord) -> str:
    """Why attention workers can hold no KV for the decode worker, however little; "": they can, or it keeps its own."""
    if not worker.cache_elsewhere or longest_elsewhere(state, worker):
        return ""
    if not state.loads.attention.workers:
        return "decode workers keep no KV, and no attention worker is ready"
    return "decode workers keep no KV, and the attention workers that are ready have not all KV heads"


def too_long(state: State, request: RequestArrived) -> str:
    message = f"{request.prompt_tokens} prompt tokens and {request.max_tokens} more fit no worker"
    if state.policy.pools_bound:  # a log of before has the message of before
        prompt_tokens, tokens = capacity(state)
        message += f": the cluster holds prompts of up to {prompt_tokens}, {tokens} with the answer"
    return message


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
    """Tokens of the longest request that a decode worker, or the holders of its KV, could take."""
    if worker.cache_elsewhere:
        return min(tokens_max(worker), longest_elsewhere(state, worker))
    return tokens_max(worker)


def longest_elsewhere(state: State, worker: WorkerRecord) -> int:
    """Tokens of the longest request that attention workers could hold for the decode worker, were they empty."""
    holders = state.loads.attention.workers
    unsplit = max(
        (
            min(max(one.kv_blocks for one in pool) for pool in pools)
            for pools in pools_of(holders, worker.layout)
        ),
        default=0,
    )
    split = splitting(holders, worker.layout)
    longest = max(unsplit, longest_in_parts(split)) if len(split) > 1 else unsplit
    return longest * worker.block_tokens


def longest_with_loans(state: State) -> int:
    """Tokens of the longest request, prompt and answer together, that the lenders could hold, were they empty."""
    lenders = [one for one in state.loads.decode.workers if one.lends and one.layout.segment_tokens]
    if len(lenders) < 2:
        return 0
    first = lenders[0]
    alike = [worker for worker in lenders if worker.layout == first.layout]
    longest = longest_in_parts(alike) * first.block_tokens
    return min(longest, max(worker.context_tokens_max for worker in alike))


def longest_in_parts(holders: Sequence[WorkerRecord]) -> int:
    """Blocks of the longest request that these could hold together, were they empty. Their layout is one."""
    each = holders[0].layout.segment_blocks
    # All but one of them hold whole segments; that is best the one that would waste the most of its room.
    over = max(one.kv_blocks % each for one in holders)
    return over + sum(one.kv_blocks - one.kv_blocks % each for one in holders)


def why_not(state: State, worker: WorkerRecord, request: RequestArrived) -> str:
    """Why a worker is not among the candidates for a request."""
    if worker.draining:
        return "draining"
    if not state.takes_orders(worker):
        return "its node's store agent is away"
    return (
        "it failed this request before" if fits(state, worker, request) else "the request is too long for it"
    )


def fits(state: State, worker: WorkerRecord, request: RequestArrived) -> bool:
    """Whether the worker, and its node's pool, could hold its part of the request, were they empty."""
    # A mixed worker too: it decodes the prompts that it computes.
    if worker.batch is not None:
        return decode_fits(state, worker, request)
    # A worker that only holds parts of others' sequences has no half of a request, so none is too long for it.
    return worker.prompts is None or prefill_fits(state, worker, request)
