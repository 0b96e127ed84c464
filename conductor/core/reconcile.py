"""Reconciliation: orders that are gone without an answer, with their worker or from its memory.

A heartbeat may list the worker's open orders, and then both sides are brought to agree. An order that the core believes
to be open there and the worker does not list is lost: its answer was. An order that the worker lists and the core does
not know is cancelled once more: its cancellation was lost, or it was meant for an earlier incarnation. Two rules keep
this from taking healthy orders:

- An order counts only when the worker has obeyed a decision at least as new (`obeyed_seq`). Time would not do: a
  decision that a conductor makes late, because it was away, has the time of its cause.
- Two heartbeats must agree, at least half a period apart: those that waited for the bus together count as one.

A decode worker also lists the orders that lack their KV or first token. When two heartbeats still list one after its
prefill has ended, the KV is lost (its progress is sent once), and the request is placed again.
"""

from __future__ import annotations

from halfmoon.conductor.core.booking import withdraw
from halfmoon.conductor.core.orders import avoid, place
from halfmoon.conductor.core.resume import resume
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import CancelOrder
from halfmoon.schemas.events import WorkerHeartbeat


def lose_orders(
    state: State, worker_id: str, order_ids: list[str], reason: str, out: StepOutput, *, told: bool = False
) -> None:
    """The worker's halves of these orders are gone: withdraw all of them, then place their requests again.

    `told`: the worker is there and may have some of the orders after all, so it gets a CancelOrder for each.
    """
    requests = []
    for order_id in order_ids:
        order = state.orders[order_id]
        if not told and order.decode_id == worker_id and resume(state, order, out):
            continue
        requests.append(state.requests[order.request_id])
        withdraw(
            state,
            order,
            out,
            prefill_runs=told or order.prefill_id != worker_id,
            decode_runs=told or order.decode_id != worker_id,
        )
    for request in requests:
        place(state, request, reason, out)


def reconcile_orders(state: State, worker: WorkerRecord, event: WorkerHeartbeat, out: StepOutput) -> None:
    """Bring the core's open orders of a worker and those that its heartbeat lists to agree."""
    report = worker.report
    # No list is no statement about orders; an empty list is the statement that there are none.
    if event.orders is None:
        report.unlisted_ns, report.stray_ns, report.lacking_ns = {}, {}, {}
        return
    listed = dict.fromkeys(event.orders)
    unlisted = [
        order_id
        for order_id in worker.orders
        # The worker has not obeyed newer orders yet, so it cannot list them.
        if order_id not in listed and state.orders[order_id].placed_seq <= event.obeyed_seq
    ]
    # An order that ended a moment ago is a stray until its worker has heard of the end: so two heartbeats must name it.
    strays = [order_id for order_id in listed if _is_stray(state, worker, order_id)]
    report.unlisted_ns, lost = _confirmed_twice(state, report.unlisted_ns, unlisted)
    report.stray_ns, unknown = _confirmed_twice(state, report.stray_ns, strays)
    out.extend(CancelOrder(order_id=order_id, worker_id=worker.worker_id) for order_id in unknown)
    for order_id in lost:
        avoid(state.requests[state.orders[order_id].request_id], worker.worker_id)
    reason = f"worker {worker.worker_id} knows nothing of the order"
    lose_orders(state, worker.worker_id, lost, reason, out, told=True)
    lacking = [order_id for order_id in event.lacking if _is_overdue(state, worker, order_id)]
    report.lacking_ns, lost = _confirmed_twice(state, report.lacking_ns, lacking)
    reason = "its KV or its first token did not reach the decode worker"
    lose_orders(state, worker.worker_id, lost, reason, out, told=True)


def _is_stray(state: State, worker: WorkerRecord, order_id: str) -> bool:
    if order_id not in state.orders:
        # KV that is held of a resumed order is asked for under the new order's id.
        resumed = (state.orders[each].decode.resumes for each in worker.lent if each in state.orders)
        return order_id not in resumed
    # A decode worker may still hold something of it for a move that was given up.
    return worker.batch is not None and order_id not in worker.orders and order_id not in worker.lent


def _is_overdue(state: State, worker: WorkerRecord, order_id: str) -> bool:
    """True when its prefill ended a heartbeat ago or earlier: all of its KV must have come."""
    order = state.orders.get(order_id)
    if order is None or order.decode_id != worker.worker_id or order.phase != "decode":
        return False
    return state.at_ns - order.prefill.end_ns >= state.policy.heartbeat_ns


def _confirmed_twice(
    state: State, since_ns: dict[str, int], order_ids: list[str]
) -> tuple[dict[str, int], list[str]]:
    """Split `order_ids` into those named for the first time (since when), and those named by two heartbeats."""
    first: dict[str, int] = {}
    again = []
    for order_id in order_ids:
        named_ns = since_ns.get(order_id, state.at_ns)
        # Two heartbeats may come at once after a cut connection; they count as one.
        if state.at_ns - named_ns >= state.policy.heartbeat_ns // 2:
            again.append(order_id)
        else:
            first[order_id] = named_ns
    return first, again
