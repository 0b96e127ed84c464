"""Every arrival teaches how much is wanted, every finished prefill what its worker takes, and heartbeats of decode
workers what their steps take: the own part by the fit, attention elsewhere by its price.

What a step waits for attention elsewhere is not the worker's own cost, and is taken off before the fit. Where all KV is
elsewhere, the parts of a step are known from what was measured, and only what they add up to is corrected. Both know
who holds what for the batch as it is now, so heartbeats teach while the batch has as many sequences as their steps had.
"""

from __future__ import annotations

from halfmoon.conductor.core.admission import Placement, Refusal
from halfmoon.conductor.core.corrections import fitted_cost, set_fitted, step_seen
from halfmoon.conductor.core.objectives import learned
from halfmoon.conductor.core.placement.prices import lent_price, row_of, step_elsewhere
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.correction import EXACT_PERMILLE
from halfmoon.conductor.core.state.cost import (
    answer_class,
    expected_tokens,
    measured_permille,
    refit_decode,
    refit_prefill,
)
from halfmoon.conductor.core.state.demand import learn_demand
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import PrefillFinished, RequestArrived, WorkerHeartbeat
from halfmoon.schemas.roles import ELASTIC_ROLES


def learn_prefill(
    state: State,
    event: PrefillFinished,
    prompt_tokens: int,
    *,
    of_request: int,
    permille: int = EXACT_PERMILLE,
) -> None:
    """From a prefill that computed `prompt_tokens` with what was cached (0: not known; then it teaches nothing), for a
    request whose own prompt has `of_request`. `permille`: its correction, which the fit does not learn too.
    """
    cached = event.cached_local_tokens + event.cached_fetched_tokens
    if of_request:
        counters = state.counters
        counters.prompt_tokens += of_request
        counters.cached_local_tokens += event.cached_local_tokens
        counters.cached_fetched_tokens += event.cached_fetched_tokens
        if (reuse := event.similar) is not None:
            counters.similar_requests += 1
            counters.similar_tokens += reuse.tokens
            counters.similar_computed_tokens += reuse.computed_tokens
    worker = state.workers.get(event.worker_id)
    # What several took together, or what a similar prompt spared, says nothing of one that is computed.
    own = event.stages < 2 and event.similar is None
    if worker is not None and worker.learns and cached < prompt_tokens and own:
        seen_ns = event.compute_ns * EXACT_PERMILLE // permille
        fit, fitted = worker.prompt_fit or worker.fit, fitted_cost(worker)
        set_fitted(state, worker, refit_prefill(fit, fitted, prompt_tokens, cached, seen_ns))
        learned(state, worker)


def learn_step(state: State, worker: WorkerRecord, event: WorkerHeartbeat) -> None:
    """From the mean step of a decode worker's heartbeat."""
    sequences, context, seen_ns = event.step_sequences, event.step_context_tokens, event.step_ns
    if worker.priced:
        orders = [state.orders[order_id] for order_id in worker.orders]
        rows = [row_of(order) for order in orders if order.running]
        steady = len(rows) == sequences
        if worker.cache_elsewhere:
            step = step_elsewhere(state, worker, rows)
            if step is not None:
                if steady:
                    expected_ns = step.ns(worker.decode_groups or step.groups)
                    known = worker.elsewhere_permille
                    worker.elsewhere_permille = measured_permille(known, expected_ns, seen_ns)
                    learned(state, worker)
                return
        elif any(row.loans for row in rows):
            if not steady:
                return
            away, waits_ns = lent_price(state, worker, context, rows)
            context, seen_ns = context - away, seen_ns - waits_ns
    seen_ns = seen_ns * EXACT_PERMILLE // step_seen(state, worker, sequences, context, seen_ns)
    set_fitted(state, worker, refit_decode(worker.fit, fitted_cost(worker), sequences, context, seen_ns))
    learned(state, worker)


def learn_arrival(state: State, event: RequestArrived, verdict: Placement | Refusal) -> None:
    """Count its demand on both pools, or on mixed workers, whether it is placed or not."""
    # A refusal without a prediction looked at no worker.
    prefill_ns = verdict.predicted.prefill_ns or state.offered.prefill_ns
    decode_refused = False
    if isinstance(verdict, Refusal):
        limits = verdict.limits
        late = limits is not None and verdict.predicted.prefill_ns > limits.ttft_ns
        if late or verdict.reason == "too_long":
            return  # no number of workers would serve it
        answer_tokens = expected_tokens(state.answers.get(answer_class(event.max_tokens)), event.max_tokens)
        decode_refused = verdict.reason in ("tbt_slo", "no_room")
    else:
        answer_tokens = verdict.answer_tokens
    if not prefill_ns and state.workers:
        prefill_ns = next(iter(state.workers.values())).cost.prefill_ns(event.prompt_tokens, 0)
    looks, mixed = state.demand.looks, state.loads.mixed.workers
    if mixed and _is_mixed_workers(state, verdict):
        looks = state.demand.mixed_looks
        # What is predicted there has the steps of others in it.
        cached = 0 if isinstance(verdict, Refusal) else verdict.prefill.cached_tokens
        costs = [worker.cost for worker in mixed]
        prefill_ns = min(prefill_ns, *(cost.prefill_ns(event.prompt_tokens, cached) for cost in costs))
    learn_demand(
        looks,
        state.at_ns,
        state.policy.elastic_window_ns,
        prefill_ns=prefill_ns,
        prompt_tokens=event.prompt_tokens,
        answer_tokens=answer_tokens,
        decode_refused=decode_refused,
    )


def _is_mixed_workers(state: State, verdict: Placement | Refusal) -> bool:
    """Some are there; a refused request is theirs where they are the only ones."""
    if not isinstance(verdict, Refusal):
        return verdict.mixed
    return not any(worker.role in ELASTIC_ROLES for worker in state.workers.values())
