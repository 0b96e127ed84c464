"""Capacity: the longest requests that workers could hold, were they empty."""

from __future__ import annotations

from halfmoon.conductor.core.placement.candidates import prefill_fits
from halfmoon.conductor.core.placement.decode_candidates import decode_fits
from halfmoon.conductor.core.placement.parts import longest_elsewhere, longest_with_loans
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import tokens_max
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import RequestArrived


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
