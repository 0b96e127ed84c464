"""Learning: arrivals teach the offered load, finished prefills the speed of their worker, and heartbeats of decode
workers the time of their steps: the own part by the fit, attention elsewhere by its price.

A step's wait for attention elsewhere is not the worker's own cost, and is taken off before the fit. Where all KV is
elsewhere, the parts of a step were measured, and only their sum is corrected. Both know the holders of the batch as it
is now, so heartbeats teach while the batch has as many sequences as their steps had.
"""

from __future__ import annotations

from halfmoon.conductor.core.admission import Placement, Refusal
from halfmoon.conductor.core.corrections import fitted_cost, set_fitted, step_seen
from halfmoon.conductor.core.objectives import learned
from halfmoon.conductor.core.placement.costed import Costed
from halfmoon.conductor.core.placement.prices import lent_price, row_of, step_elsewhere
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.correction import EXACT_PERMILLE
from halfmoon.conductor.core.state.cost import measured_permille, refit_decode, refit_prefill
from halfmoon.conductor.core.state.demand import learn_demand
from halfmoon.conductor.core.state.overload import learn_busy, learn_offered, learn_refused
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import PrefillFinished, WorkerHeartbeat


def learn_offered_of(state: State, verdict: Placement | Refusal) -> None:
    """Count the predicted compute time of a request that was decided on."""
    if verdict.predicted.prefill_ns:
        learn_offered(state.offered, verdict.predicted.prefill_ns, state.at_ns)


def learn_arrival(costed: Costed, verdict: Placement | Refusal) -> None:
    """Count also the busy workers at a request's arrival, how often its text was refused, its displaced blocks, and its
    demand on both pools, whether it is placed or not.
    """
    state, event = costed.state, costed.request
    learn_offered_of(state, verdict)
    if state.policy.group_from == "spare":
        learn_busy(state.offered, state.loads.prefill.busy)
    if state.policy.overload_shared:
        learn_refused(state.offered, costed.missing_key, costed.now_ns, refused=isinstance(verdict, Refusal))
    state.displaced.ask(state.index, event.block_keys)
    decode_refused = isinstance(verdict, Refusal) and verdict.reason in ("tbt_slo", "no_room")
    if isinstance(verdict, Refusal):
        alone_ns, limits = verdict.predicted.prefill_ns, verdict.limits
        if verdict.reason == "too_long" or (limits is not None and alone_ns > limits.ttft_ns):
            return  # no number of workers would serve it
    elif verdict.mixed:
        return  # the pools have nothing to do with it
    # A refusal without a prediction looked at no worker.
    prefill_ns = verdict.predicted.prefill_ns or state.offered.prefill_ns
    some = next(iter(state.workers.values()), None)
    if not prefill_ns and some is not None:
        prefill_ns = some.cost.prefill_ns(event.prompt_tokens, 0)
    learn_demand(
        state.demand,
        state.at_ns,
        state.policy.elastic_window_ns,
        prefill_ns=prefill_ns,
        prompt_tokens=event.prompt_tokens,
        answer_tokens=costed.answer_tokens,
        prefill_refused=isinstance(verdict, Refusal) and not decode_refused,
        decode_refused=decode_refused,
    )


def learn_prefill(
    state: State,
    event: PrefillFinished,
    prompt_tokens: int,
    *,
    of_request: int,
    permille: int = EXACT_PERMILLE,
) -> None:
    """Learn from a prefill that computed `prompt_tokens`, cached ones included (0: not known; then it teaches nothing),
    for a request whose own prompt has `of_request`. `permille`: its correction, which the fit does not learn too.
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
    # The time of several stages together, or of a prompt with a reference, teaches nothing of one that is computed.
    if worker is None or worker.prompts is None or not worker.learning.enabled:
        return
    if cached < prompt_tokens and event.stages < 2 and event.similar is None:
        seen_ns = event.compute_ns * EXACT_PERMILLE // permille
        fit = worker.prompts.fit
        set_fitted(state, worker, refit_prefill(fit, fitted_cost(worker), prompt_tokens, cached, seen_ns))
        learned(state, worker)


def learn_step(state: State, worker: WorkerRecord, event: WorkerHeartbeat) -> None:
    """From the mean step of a heartbeat; nothing where the worker decodes nothing, or made no step."""
    duty = worker.batch
    if duty is None or not worker.learning.enabled or not event.steps or not event.step_sequences:
        return
    sequences, context, seen_ns = event.step_sequences, event.step_context_tokens, event.step_ns
    if worker.priced:
        orders = [state.orders[order_id] for order_id in worker.orders]
        rows = [row_of(order) for order in orders if order.decode.running]
        steady = len(rows) == sequences
        if duty.cache_elsewhere:
            step = step_elsewhere(state, worker, rows)
            if step is not None:
                if steady:
                    expected_ns = step.ns(duty.groups or step.groups)
                    known = duty.elsewhere_permille
                    duty.elsewhere_permille = measured_permille(known, expected_ns, seen_ns)
                    learned(state, worker)
                return
        elif any(row.loans for row in rows):
            if not steady:
                return
            away, waits_ns = lent_price(state, worker, context, rows)
            context, seen_ns = context - away, seen_ns - waits_ns
    seen_ns = seen_ns * EXACT_PERMILLE // step_seen(state, worker, sequences, context, seen_ns)
    set_fitted(state, worker, refit_decode(duty.fit, fitted_cost(worker), sequences, context, seen_ns))
    learned(state, worker)
