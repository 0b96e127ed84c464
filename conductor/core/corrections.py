"""Corrections of predictions by measurements: when they are learned, and what they change.

A worker's `cost` is the fitted profile times its corrections; so every prediction by it is corrected. Prefills have a
correction for each number of neighbours on the host that compute at the time: for a prompt that begins at once those
that compute now, for a queued one all that have orders, since the prompts before it will be decoding. When the number
or the correction changes, queued prompts are priced anew. The time between tokens is a step of the batch that the
request joins, times the ratio of the longest intervals of answers to their mean. `state.correction` has the arithmetic.

Only under a policy with a `correction_window`.
"""

from __future__ import annotations

from halfmoon.conductor.core.placement.measures import Candidate
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.correction import (
    EXACT_PERMILLE,
    NEIGHBOURS_MAX,
    SeenPrefill,
    SeenSteps,
    keep,
    length_class,
    nearest_permille,
    prefills_permille,
    ratio_permille,
    scaled,
    steps_permille,
)
from halfmoon.conductor.core.state.records import Order, PromptDuty, WorkerRecord
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.events import PrefillFinished, RequestFinished
from halfmoon.schemas.roles import WorkerRole


def corrected(state: State, worker: WorkerRecord) -> bool:
    """True where predictions of this worker are corrected by measurements."""
    return state.policy.correction_window > 0 and worker.learning.enabled


def fitted_cost(worker: WorkerRecord) -> CostProfile:
    """The worker's cost as fitted, without a correction."""
    return worker.learning.fitted or worker.cost


def set_fitted(state: State, worker: WorkerRecord, fitted: CostProfile) -> None:
    """Call after a fit has learned: the worker's cost is that, corrected."""
    if corrected(state, worker):
        worker.learning.fitted = fitted
        prompts, batch = worker.prompts, worker.batch
        if prompts is not None and prompts.seen:
            prompts.permille = prefills_permille(prompts.seen, fitted)
        if batch is not None:
            batch.step_permille = steps_permille(batch.steps_seen, fitted)
        worker.cost = _cost(worker, fitted)
        _price_queue(state, worker)
    else:
        worker.learning.fitted, worker.cost = None, fitted
    state.loads.refitted(worker)


def _cost(worker: WorkerRecord, fitted: CostProfile) -> CostProfile:
    return scaled(fitted, permille_now(worker), _step_permille(worker))


def permille_now(worker: WorkerRecord) -> int:
    """The correction of prefills that is in the worker's `cost`."""
    duty = worker.prompts
    return EXACT_PERMILLE if duty is None else duty.permille.get(duty.neighbours, EXACT_PERMILLE)


def _step_permille(worker: WorkerRecord) -> int:
    return EXACT_PERMILLE if worker.batch is None else worker.batch.step_permille


def correction_of(worker: WorkerRecord) -> tuple[WorkerRole, int, int]:
    """For people: role, its correction, and the number of busy neighbours that a prefill's correction is for."""
    if worker.prompts is None:
        return worker.role, _step_permille(worker), 0
    return worker.role, permille_now(worker), worker.prompts.neighbours


def typical_cost(worker: WorkerRecord) -> CostProfile:
    """The worker's cost on the whole: `cost` is for as many busy neighbours as there are at the moment."""
    fitted, duty = worker.learning.fitted, worker.prompts
    if fitted is None or duty is None:
        return worker.cost
    measured = [duty.permille[one] for one in duty.seen if one in duty.permille]
    if not measured:
        return worker.cost
    return scaled(fitted, sum(measured) // len(measured), _step_permille(worker))


# --- learning -----------------------------------------------------------------------------------------------


def prefill_seen(state: State, order: Order, event: PrefillFinished | None) -> int:
    """Keep the measured time of a prefill; the correction that its prediction had. Call it when the prefill is over,
    before it is freed. `event` None: the answer ended before the report of the prefill came.
    """
    worker = state.workers.get(order.prefill_id)
    if worker is None or worker.prompts is None or not corrected(state, worker):
        return EXACT_PERMILLE
    permille = worker.prompts.permille.get(worker.prompts.head_neighbours, EXACT_PERMILLE)
    # The time of several stages together, or of a prompt with a reference, teaches nothing of one that is computed.
    half = order.prefill
    if order.phase == "prefill" and not (half.fetch_node_id or half.stages or half.similar):
        _keep_prefill(state, worker.prompts, order, event)
    return permille


def _keep_prefill(state: State, duty: PromptDuty, order: Order, event: PrefillFinished | None) -> None:
    prompt_tokens, cached = order.prefill.prompt_tokens, order.prefill.cached_tokens
    if event is not None:
        cached = event.cached_local_tokens + event.cached_fetched_tokens
    if order.mixed:
        # Only the worker knows the prompt's share of its iterations.
        took_ns = event.compute_ns if event is not None else 0
    else:
        is_head = next(iter(duty.orders), "") == order.order_id
        took_ns = state.at_ns - duty.head_since_ns if is_head else 0
    if took_ns > 0 and cached < prompt_tokens:
        seen = duty.seen.setdefault(duty.head_neighbours, [])
        seen.append(SeenPrefill(prompt_tokens, cached, took_ns))
        keep(seen, state.policy.correction_window)


def step_seen(state: State, worker: WorkerRecord, sequences: int, context_tokens: int, step_ns: int) -> int:
    """Keep the measured time of steps; the correction that their prediction had."""
    duty = worker.batch
    if duty is None or not corrected(state, worker):
        return EXACT_PERMILLE
    duty.steps_seen.append(SeenSteps(sequences, context_tokens, step_ns))
    keep(duty.steps_seen, state.policy.correction_window)
    return duty.step_permille


def answer_seen(state: State, order: Order, event: RequestFinished) -> None:
    """Keep the ratio of an answer's longest intervals to its mean one."""
    worker = state.workers.get(order.decode_id)
    if worker is None or worker.batch is None or not corrects_tbt(state, worker):
        return
    if event.tbt_ns <= 0 or event.completion_tokens < 2:
        return
    mean_ns = event.decode_ns // (event.completion_tokens - 1)
    seen = worker.batch.answers_seen.setdefault(length_class(event.completion_tokens), [])
    seen.append(ratio_permille(mean_ns, event.tbt_ns))
    keep(seen, state.policy.correction_window)


def corrects_tbt(state: State, worker: WorkerRecord) -> bool:
    """The time between tokens is corrected where a step has no other price than its batch's."""
    decodes_only = worker.batch is not None and worker.prompts is None
    return corrected(state, worker) and decodes_only and not worker.priced


def tbt_permille(worker: WorkerRecord, answer_tokens: int) -> int:
    """The correction of the time between tokens, for an answer of `answer_tokens`."""
    seen = worker.batch.answers_seen if worker.batch is not None else {}
    return nearest_permille(seen, length_class(answer_tokens))


# --- neighbours ---------------------------------------------------------------------------------------------


def beside(state: State, worker: WorkerRecord) -> int:
    """How many neighbours of the worker have orders."""
    return min(sum(bool(one.orders) for one in _others(state, worker)), NEIGHBOURS_MAX)


def computing_beside(state: State, worker: WorkerRecord) -> int:
    """How many neighbours of the worker compute now."""
    return min(sum(_computes(state, one) for one in _others(state, worker)), NEIGHBOURS_MAX)


def turn_begins(state: State, worker: WorkerRecord) -> None:
    """Call when another order is the first of a worker's prefills: the one that runs."""
    if worker.prompts is not None and corrected(state, worker):
        worker.prompts.head_neighbours = computing_beside(state, worker)
        _price_queue(state, worker)


def load_changed(state: State, *worker_ids: str) -> None:
    """Call after orders of these workers came, went, or went on to their other half."""
    if not state.policy.correction_window:
        return
    hosts = dict.fromkeys(state.host(state.workers[one]) for one in worker_ids if one in state.workers)
    for host in hosts:
        for worker in state.loads.on_host.get(host, ()):
            if worker.prompts is not None and corrected(state, worker):
                _look_around(state, worker, worker.prompts)


def _look_around(state: State, worker: WorkerRecord, duty: PromptDuty) -> None:
    neighbours = beside(state, worker) if duty.orders else computing_beside(state, worker)
    if neighbours != duty.neighbours:
        before = permille_now(worker)
        duty.neighbours = neighbours
        if permille_now(worker) != before:
            worker.cost = _cost(worker, fitted_cost(worker))
            _price_queue(state, worker)
            state.loads.refitted(worker)


def _others(state: State, worker: WorkerRecord) -> list[WorkerRecord]:
    host = state.host(worker)
    return [one for one in state.loads.on_host.get(host, ()) if one is not worker]


def _computes(state: State, worker: WorkerRecord) -> bool:
    if worker.prompts is not None:
        return bool(worker.orders)
    if worker.batch is not None:
        # Those of its orders whose prompt is computed yet wait for it.
        return any(state.orders[order_id].phase == "decode" for order_id in worker.batch.orders)
    return bool(worker.lent)


def price_prompt(state: State, order: Order, prefill: Candidate) -> None:
    """Note the inputs of the price of the order's prefill, for when it is priced anew."""
    worker = state.workers[order.prefill_id]
    if corrected(state, worker):
        half = order.prefill
        half.prompt_tokens = state.requests[order.request_id].event.prompt_tokens
        half.cached_tokens = prefill.cached_tokens
        compute_ns = worker.cost.prefill_ns(half.prompt_tokens, half.cached_tokens)
        half.beside_ns = max(0, half.reserved_ns - compute_ns)


def _price_queue(state: State, worker: WorkerRecord) -> None:
    """Reserve prefill time anew, and predict each prefill's end, by the costs of now."""
    duty = worker.prompts
    if duty is None:
        return
    fitted, end_ns = fitted_cost(worker), duty.head_since_ns
    permille = duty.permille.get(duty.head_neighbours, EXACT_PERMILLE)
    for order_id in duty.orders:
        half = state.orders[order_id].prefill
        # A prompt placed before there were corrections, computed by several workers, or with a reference stays as it
        # was priced.
        if half.prompt_tokens and not half.stages and not half.similar:
            compute_ns = fitted.prefill_ns(half.prompt_tokens, half.cached_tokens)
            reserved_ns = compute_ns * permille // EXACT_PERMILLE + half.beside_ns
            duty.reserved_ns += reserved_ns - half.reserved_ns
            half.reserved_ns = duty.orders[order_id] = reserved_ns
        end_ns += half.reserved_ns
        half.end_ns = end_ns
        permille = permille_now(worker)
    state.loads.changed(worker)
