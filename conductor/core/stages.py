"""Stages of an order: the workers that compute its first layers for who has the last ones. Booked, freed, cancelled.

Each is booked for as long as the whole prompt is to take, until it says that its part is over or the prefill half ends.
A worker that dies takes the order with it; the request is placed once more, then on one worker.
"""

from __future__ import annotations

from halfmoon.conductor.core.corrections import load_changed, turn_begins
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Order, PromptDuty, WorkerRecord
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import CancelOrder, StartStage
from halfmoon.schemas.events import StageFinished


def book_stages(state: State, order: Order) -> None:
    """On every worker but the last, which has the order's prefill half."""
    for stage in order.prefill.stages[:-1]:
        worker = state.workers[stage.worker_id]
        assert not worker.orders, ("a stage of one that is busy", order, worker)
        order.prefill.staged.append(stage.worker_id)
        join_prefills(state, worker, order)
    load_changed(state, *order.prefill.staged)


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


def free_stages(state: State, order: Order) -> None:
    """The prefill half is over, and all stages with it."""
    for worker_id in list(order.prefill.staged):
        free_stage(state, order, worker_id)


def free_stage(state: State, order: Order, worker_id: str) -> None:
    order.prefill.staged.remove(worker_id)
    worker = state.workers.get(worker_id)
    # It may have died, or have started again.
    if worker is None or order.order_id not in worker.orders:
        return
    leave_prefills(state, worker, order)
    load_changed(state, worker_id)


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


def cancel_stages(state: State, order: Order, out: StepOutput) -> None:
    """Those that compute yet; call it before they are freed."""
    out.extend(
        CancelOrder(order_id=order.order_id, request_id=order.request_id, worker_id=worker_id)
        for worker_id in order.prefill.staged
        if worker_id in state.workers
    )


def stage_finished(state: State, event: StageFinished) -> None:
    """One that is over early says so for nobody's sake but its own: who has the last part ends the order."""
    order = state.orders.get(event.order_id)
    if order is not None and event.worker_id in order.prefill.staged:
        free_stage(state, order, event.worker_id)
