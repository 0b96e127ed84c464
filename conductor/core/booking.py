"""Bookings: an order is given with all that it reserves, and frees it when its halves are over or it is taken back.

Load is reserved in the state the moment an order is given, and freed when its half is answered, cancelled or lost.

*Stages* are the workers that compute an order's first layers for the worker with the last ones. Each is booked for the
predicted time of the whole prompt, until it reports the end of its part or the prefill half ends. A worker that dies
takes the order with it; the request is placed once more, then on one worker.
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.admission import Placement
from halfmoon.conductor.core.corrections import load_changed, price_prompt, turn_begins
from halfmoon.conductor.core.loans import book_loans, end_loans
from halfmoon.conductor.core.objectives import tbt_objective_ns
from halfmoon.conductor.core.placement.measures import Candidate
from halfmoon.conductor.core.placement.policies import rules_of
from halfmoon.conductor.core.placement.replication import copy_of_hot_prefix
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import (
    DecodeHalf,
    Order,
    PrefillHalf,
    PromptDuty,
    Request,
    WorkerRecord,
)
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import (
    CancelOrder,
    ReleaseOrder,
    StartDecode,
    StartMixed,
    StartPrefill,
    StartStage,
)
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.types import INT_MAX

#: The first orders of a worker's queue: one computes, and three are prepared meanwhile (`PrefillState.prepared_max`).
NEVER_PASSED = 4

# --- given --------------------------------------------------------------------------------------------------


def give_order(state: State, request: Request, placement: Placement, out: StepOutput) -> None:
    """Give both halves of a placement, and reserve their time and room."""
    state.orders_now += 1
    order_id = f"{state.seq}-{state.orders_now}"
    now_ns = state.at_ns
    event, prefill, decode = request.event, placement.prefill, placement.decode
    waited_ns = now_ns - request.arrived_ns
    predicted = placement.predicted
    if waited_ns:
        predicted = msgspec.structs.replace(
            predicted, queue_ns=predicted.queue_ns + waited_ns, ttft_ns=predicted.ttft_ns + waited_ns
        )
    request.placements += 1
    request.order_id = order_id
    state.counters.placed += 1
    if not placement.mixed:
        state.round_robin["prefill"] = prefill.worker_id
        if decode.worker_id:
            state.round_robin["decode"] = decode.worker_id
    elif state.policy.mixed_by_policy:
        state.round_robin["mixed"] = prefill.worker_id
    order = Order(
        order_id=order_id,
        request_id=event.request_id,
        prefill_id=prefill.worker_id,
        prefill_node_id=prefill.node_id,
        decode_id=decode.worker_id,
        decode_node_id=decode.node_id,
        placed_ns=now_ns,
        placed_seq=state.seq,
        predicted=predicted,
        prefill=PrefillHalf(
            end_ns=now_ns + prefill.ttft_ns,
            until_ns=_until_ns(request, placement),
            reserved_ns=prefill.ttft_ns - prefill.queue_ns,
            pending_blocks=prefill.uncached_blocks,
            prompt_blocks=prefill.uncached_blocks + prefill.cached_blocks,
            fetch_node_id=prefill.fetches[0].node_id if prefill.fetches else "",
            fetch_sharing=prefill.fetch_sharing,
            fetch_ssd=prefill.from_ssd,
            stages=prefill.stages,
            similar=prefill.reference is not None,
        ),
        decode=DecodeHalf(
            lasts_ns=placement.decode_ns,
            reserved_blocks=decode.blocks,
            context_tokens=event.prompt_tokens + placement.answer_tokens,
            loans=decode.loans,
            cache=decode.cache,
            cache_blocks=decode.cache_blocks,
        ),
        weight_version=state.weight_version,
    )
    price_prompt(state, order, prefill)
    passed = [] if prefill.coming_blocks else passed_by(state, order)
    if passed:
        saved_ns = sum(state.orders[order_id].prefill.reserved_ns for order_id in passed)
        order.prefill.end_ns -= saved_ns
        order.predicted = msgspec.structs.replace(
            predicted, queue_ns=predicted.queue_ns - saved_ns, ttft_ns=predicted.ttft_ns - saved_ns
        )
    _reserve(state, order, now_ns + prefill.transfer_ns, passed)
    _give(state, request, order, prefill, out, passed)
    copy = copy_of_hot_prefix(state, event, prefill)
    if copy is not None:
        out.append(copy)


def _until_ns(request: Request, placement: Placement) -> int:
    """When the first token is later than what was accepted."""
    # A request that was accepted before is placed wherever it is soonest, and nothing is refused under `none`.
    if placement.limits is None:
        return INT_MAX
    return min(INT_MAX, request.arrived_ns + placement.limits.ttft_ns)


def _give(
    state: State, request: Request, order: Order, prefill: Candidate, out: StepOutput, passed: list[str]
) -> None:
    """To the two workers of an order, or to the one that does all."""
    event = request.event
    if order.mixed:
        out.append(
            StartMixed(
                order_id=order.order_id,
                request_id=event.request_id,
                frontend_id=event.frontend_id,
                worker_id=order.prefill_id,
                prompt_tokens=event.prompt_tokens,
                max_tokens=event.max_tokens,
                local_blocks=prefill.local_blocks,
                fetches=prefill.fetches,
                placement=request.placements,
                predicted=order.predicted,
                weight_version=order.weight_version,
            )
        )
        return
    out.append(
        StartPrefill(
            order_id=order.order_id,
            request_id=event.request_id,
            frontend_id=event.frontend_id,
            worker_id=order.prefill_id,
            decode_worker_id=order.answerer_id,
            decode_node_id=order.decode_node_id or order.prefill_node_id,
            prompt_tokens=event.prompt_tokens,
            local_blocks=prefill.local_blocks,
            fetches=prefill.fetches,
            predicted=order.predicted,
            stages=order.prefill.stages,
            chunk_tokens=prefill.chunk_tokens,
            reference=prefill.reference,
            before=passed[0] if passed else "",
            weight_version=order.weight_version,
        )
    )
    give_stages(order, event.prompt_tokens, out)
    if order.decode_id:
        out.append(start_decode(state, request, order))


def start_decode(state: State, request: Request, order: Order) -> StartDecode:
    """The decode half of an order."""
    event = request.event
    return StartDecode(
        order_id=order.order_id,
        request_id=event.request_id,
        frontend_id=event.frontend_id,
        worker_id=order.decode_id,
        prefill_worker_id=order.prefill_id,
        prompt_tokens=event.prompt_tokens,
        max_tokens=event.max_tokens,
        tbt_slo_ns=_tbt_slo_ns(state, event, order),
        placement=request.placements,
        predicted=order.predicted,
        prefill_node_id=order.prefill_node_id if state.policy.sources_named else "",
        loans=order.decode.loans,
        cache=order.decode.cache,
        resumes=order.decode.resumes,
        weight_version=order.weight_version,
    )


def _tbt_slo_ns(state: State, event: RequestArrived, order: Order) -> int:
    """The time between tokens to which the order's decode worker holds it; 0: none."""
    # Under `none` everything is queued: nothing is refused, nor is it after its prefill.
    if state.policy.admission == "none":
        return 0
    worker = state.workers[order.decode_id]
    idle = len(worker.orders) == 1  # this one
    return tbt_objective_ns(
        state, event, worker, order.decode.context_tokens, order.decode.loans, order.decode.cache, idle=idle
    )


def give_stages(order: Order, prompt_tokens: int, out: StepOutput) -> None:
    for stage in order.prefill.stages[:-1]:
        out.append(
            StartStage(
                order_id=order.order_id,
                request_id=order.request_id,
                worker_id=stage.worker_id,
                prefill_worker_id=order.prefill_id,
                prompt_tokens=prompt_tokens,
                stage=stage,
            )
        )


# --- reserved -----------------------------------------------------------------------------------------------


def passed_by(state: State, order: Order) -> list[str]:
    """The last orders in its worker's queue, in their order, that are computed after it though they came before.

    A prompt may be passed by those that come within `passing_durations` times its own duration, if they take so much
    less that they would have to wait for nobody who came so much later themselves: the order is that of arrival plus so
    many durations. None is passed that the worker prepares already, and none beyond its objective. A prompt of several
    workers passes none and is passed by none: their parts have their turns in one order everywhere.
    """
    duty = state.workers[order.prefill_id].prompts
    assert duty is not None, order
    passed: list[str] = []
    if len(duty.orders) <= NEVER_PASSED or order.mixed or order.prefill.stages:
        return passed
    durations = state.policy.passing_durations if rules_of(state).passes else 0
    if not durations:
        return passed
    last_ns = order.placed_ns + durations * order.prefill.reserved_ns
    for order_id, _ in zip(reversed(duty.orders), range(len(duty.orders) - NEVER_PASSED), strict=False):
        other = state.orders[order_id]
        half = other.prefill
        if half.stages or other.placed_ns + durations * half.reserved_ns <= last_ns:
            break
        if half.end_ns + order.prefill.reserved_ns > half.until_ns:
            break
        passed.append(order_id)
    return passed[::-1]


def _reserve(state: State, order: Order, fetched_ns: int, passed: list[str]) -> None:
    """Book the order on both workers, and until `fetched_ns` on the node that it fetches from."""
    state.orders[order.order_id] = order
    duty = join_prefills(state, state.workers[order.prefill_id], order)
    for order_id in passed:
        duty.orders[order_id] = duty.orders.pop(order_id)
        half = state.orders[order_id].prefill
        half.end_ns += order.prefill.reserved_ns
    duty.pending_blocks += order.prefill.pending_blocks
    duty.prompt_blocks += order.prefill.prompt_blocks
    if order.decode_id:
        book_decode(state, state.workers[order.decode_id], order)
    book_loans(state, order)
    book_stages(state, order)
    if order.prefill.fetch_node_id:
        state.leaving.setdefault(order.prefill.fetch_node_id, {})[order.order_id] = fetched_ns
    if state.policy.coming_blocks:
        state.coming.add(order, state.requests[order.request_id].event.block_keys)
    load_changed(state, order.prefill_id, order.decode_id)


def join_prefills(state: State, worker: WorkerRecord, order: Order) -> PromptDuty:
    """The order waits at `worker` for its turn; that begins at once where none is before it."""
    duty = worker.prompts
    assert duty is not None, (worker, order)
    if not duty.orders:
        duty.head_since_ns = order.placed_ns
        duty.head_neighbours = duty.neighbours
    duty.orders[order.order_id] = order.prefill.reserved_ns
    duty.reserved_ns += order.prefill.reserved_ns
    state.loads.changed(worker)
    return duty


def book_decode(state: State, worker: WorkerRecord, order: Order) -> None:
    """Reserve the decode half's time and room."""
    duty = worker.batch
    assert duty is not None, (worker, order)
    duty.orders[order.order_id] = order.decode.reserved_blocks
    worker.reserved_blocks += order.decode.reserved_blocks
    duty.context_tokens += order.decode.context_tokens
    state.loads.changed(worker)


def book_stages(state: State, order: Order) -> None:
    """On every worker but the last, which has the order's prefill half."""
    for stage in order.prefill.stages[:-1]:
        worker = state.workers[stage.worker_id]
        assert not worker.orders, ("a stage of one that is busy", order, worker)
        order.prefill.staged.append(stage.worker_id)
        join_prefills(state, worker, order)
    load_changed(state, *order.prefill.staged)


# --- freed --------------------------------------------------------------------------------------------------


def free_prefill(state: State, order: Order) -> None:
    """Free the reservations of the prefill half: it is over, one way or another."""
    if order.phase == "decode":
        return
    order.phase = "decode"
    if state.policy.coming_blocks:
        state.coming.remove(order.order_id)
    free_stages(state, order)
    leaving = state.leaving.get(order.prefill.fetch_node_id)
    if leaving is not None:
        del leaving[order.order_id]
        if not leaving:
            del state.leaving[order.prefill.fetch_node_id]
    worker = state.workers.get(order.prefill_id)
    duty = worker.prompts if worker is not None else None
    if worker is None or duty is None or order.order_id not in duty.orders:
        return
    duty.pending_blocks -= order.prefill.pending_blocks
    duty.prompt_blocks -= order.prefill.prompt_blocks
    leave_prefills(state, worker, order)
    load_changed(state, order.prefill_id, order.decode_id)


def leave_prefills(state: State, worker: WorkerRecord, order: Order) -> None:
    """The order computes no more at `worker`, or waits there no more; the next one's turn begins."""
    duty = worker.prompts
    assert duty is not None, (worker, order)
    was_head = next(iter(duty.orders)) == order.order_id
    if was_head:
        duty.head_since_ns = state.at_ns
    del duty.orders[order.order_id]
    duty.reserved_ns -= order.prefill.reserved_ns
    state.loads.changed(worker)
    if was_head and duty.orders:
        turn_begins(state, worker)


def free_decode(state: State, order: Order) -> None:
    worker = state.workers.get(order.decode_id)
    duty = worker.batch if worker is not None else None
    if worker is None or duty is None or order.order_id not in duty.orders:
        return
    del duty.orders[order.order_id]
    worker.reserved_blocks -= order.decode.reserved_blocks
    duty.context_tokens -= order.decode.context_tokens
    state.loads.changed(worker)
    load_changed(state, order.decode_id)


def free_stages(state: State, order: Order) -> None:
    """The prefill half is over, and all stages with it."""
    for worker_id in list(order.prefill.staged):
        free_stage(state, order, worker_id)


def free_stage(state: State, order: Order, worker_id: str) -> None:
    """The worker's part is over; the one with the last part ends the order."""
    order.prefill.staged.remove(worker_id)
    worker = state.workers.get(worker_id)
    # It may have died, or have started again.
    if worker is None or order.order_id not in worker.orders:
        return
    leave_prefills(state, worker, order)
    load_changed(state, worker_id)


# --- taken back ---------------------------------------------------------------------------------------------


def withdraw(state: State, order: Order, out: StepOutput, *, prefill_runs: bool, decode_runs: bool) -> None:
    """Take an order back: free its reservations, cancel the halves that still run, release its slots in stores."""
    if order.mixed:  # one worker, which has let go of it where either half has failed
        prefill_runs = decode_runs = prefill_runs and decode_runs
    prefill_runs = prefill_runs and order.phase == "prefill" and not order.mixed
    cancel_stages(state, order, out)
    free_prefill(state, order)
    free_decode(state, order)
    end_loans(state, order, out)
    del state.orders[order.order_id]
    request = state.requests[order.request_id]
    request.order_id = ""
    halves = ((order.prefill_id, prefill_runs), (order.decode_id, decode_runs))
    for worker_id, runs in halves:
        if runs and worker_id in state.workers:
            out.append(CancelOrder(order_id=order.order_id, request_id=order.request_id, worker_id=worker_id))
    release_nodes(state, order, out)


def release_nodes(state: State, order: Order, out: StepOutput) -> None:
    """Have the stores drop the order's holds."""
    nodes = dict.fromkeys((order.prefill_node_id, order.decode_node_id, order.prefill.fetch_node_id))
    out.extend(
        ReleaseOrder(order_id=order.order_id, node_id=node_id) for node_id in nodes if node_id in state.stores
    )


def cancel_stages(state: State, order: Order, out: StepOutput) -> None:
    """Those that compute yet; call it before they are freed."""
    out.extend(
        CancelOrder(order_id=order.order_id, request_id=order.request_id, worker_id=worker_id)
        for worker_id in order.prefill.staged
        if worker_id in state.workers
    )
