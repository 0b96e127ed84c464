"""Requests without an order: new, parked, or with their order lost. `booking` gives orders and takes them back."""

# A request has two lives. Before its first placement it may be refused, because its client has seen nothing. After
# that it is placed whatever it costs (`choose_again`), waits for a worker, or fails for good; a client may have tokens
# by then, and a refusal would break an answer that has begun. One refusal is left: the decode worker's check before
# the first token (`reject_placed`).
#
# Two rules bound all of this. A request that takes its worker down with it would take down the next ones, so it gets
# `placements_max` placements, and avoids workers that failed it. A parked request has a timer, so none waits for ever.
#
# Turned down:
# - Refusing at once while a pool has no worker: a cluster that starts or restarts its only worker would answer 503
#   for seconds in which a short wait serves everybody. So a new request waits up to a bound, and no longer than its
#   first token may take.
# - A queue of placed requests in the core: workers queue their own orders, and the core predicts the wait (`queue_ns`).
#   Parked requests are only those that no worker can take.
#
# In doubt: parked requests are tried oldest first and each is costed anew, so a worker that joins an empty pool makes
# one long step. New requests are parked up to `queued_max_per_worker` only, which keeps it bounded.

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.admission import Placement, Refusal
from halfmoon.conductor.core.booking import give_order, withdraw
from halfmoon.conductor.core.choice import choose, choose_again
from halfmoon.conductor.core.explanation import explain, explain_arrival
from halfmoon.conductor.core.objectives import slo_ns
from halfmoon.conductor.core.placement.costed import Costed, cost_request
from halfmoon.conductor.core.state.core_state import FINISHED_MAX, State
from halfmoon.conductor.core.state.records import Request
from halfmoon.conductor.core.step_learning import learn_arrival, learn_offered_of
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import (
    EngineRefusal,
    FailRequest,
    RejectReason,
    RejectRequest,
    SetTimer,
)
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.types import INT_MAX


def accept_or_reject(state: State, event: RequestArrived, out: StepOutput) -> None:
    """Place a request that was never seen, let it wait for a worker, or refuse it with a reason."""
    state.counters.arrived += 1
    request = Request(event=event, arrived_ns=state.at_ns)
    costed = _cost(state, request)
    choice = choose(costed)
    verdict = choice.verdict
    # Refused requests teach too: a pool lacks workers for the demand that is turned away.
    learn_arrival(costed, verdict)
    if out.explains(event.request_id):
        out.notes.append(explain_arrival(costed, choice, seq=state.seq))
    if not isinstance(verdict, Refusal):
        state.requests[event.request_id] = request
        give_order(state, request, verdict, out)
    elif choice.wait_ns:
        state.requests[event.request_id] = request
        park(state, request, choice.wait_ns, out)
    else:
        reject(state, event, verdict, out)


def _cost(state: State, request: Request, *, again: bool = False) -> Costed:
    """`again`: it was accepted before, and is placed whatever that costs."""
    return cost_request(
        state,
        request.event,
        state.at_ns,
        f"{state.seq}:{state.orders_now}",
        waited_ns=state.at_ns - request.arrived_ns,
        avoid=request.avoid if again else None,
    )


def _decide_again(state: State, request: Request, out: StepOutput, *, wait: bool) -> None:
    """Place or refuse a request that has waited since it arrived; with `wait` it may go on waiting."""
    event = request.event
    costed = _cost(state, request)
    verdict = choose(costed).verdict
    learn_offered_of(state, verdict)
    if wait and isinstance(verdict, Refusal) and verdict.reason == "no_worker":
        return
    if out.explains(event.request_id):
        out.notes.append(explain(costed, verdict, seq=state.seq, lost_reason="it waited for a worker"))
    if isinstance(verdict, Refusal):
        end(state, request)
        reject(state, event, verdict, out)
    else:
        unpark(state, request)
        give_order(state, request, verdict, out)


def end_waiting(state: State, request: Request, out: StepOutput) -> None:
    """No worker came before the timer: decide on the request now, or fail it if it was accepted before."""
    if request.placements and state.paused:
        park(state, request, state.policy.unplaced_ns_max, out)
    elif request.placements:
        fail(state, request, "no worker came in time", out)
    else:
        _decide_again(state, request, out, wait=False)


def accept_again(state: State, event: RequestArrived, out: StepOutput) -> None:
    """Place a request once more that counts as answered, though its client has not got all: never refused."""
    # The core forgets a request with its answer. `placements=1` makes this one an accepted one again.
    del state.finished[event.request_id]
    request = Request(event=event, arrived_ns=state.at_ns, placements=1)
    state.requests[event.request_id] = request
    place(state, request, "its answer was lost", out)


def place(
    state: State, request: Request, lost_reason: str, out: StepOutput, refusal: EngineRefusal | None = None
) -> None:
    """Place, park, or fail for good a request that was accepted and has no order any more: `lost_reason`, `refusal`."""
    if request.placements >= state.policy.placements_max:
        message = f"placed {request.placements} times, and each time lost; last: {lost_reason or 'no reason was given'}"
        fail(state, request, message, out, refusal)
        return
    costed = _cost(state, request, again=True)
    placement = choose_again(costed)
    _note(costed, placement, lost_reason, out)
    if placement is None:
        park(state, request, state.policy.unplaced_ns_max, out)
    else:
        give_order(state, request, placement, out)


def avoid(request: Request, worker_id: str) -> None:
    """Remember that the worker failed the request: it is taken again only when there is no other."""
    if worker_id not in request.avoid:
        request.avoid.append(worker_id)


def place_parked(state: State, out: StepOutput) -> None:
    """Place the requests that wait, oldest first, as far as possible. Call it when a worker starts to take orders."""
    for request_id in list(state.parked):
        request = state.requests[request_id]
        # Never accepted: it may still be refused, by the load of now.
        if not request.placements:
            _decide_again(state, request, out, wait=True)
            continue
        costed = _cost(state, request, again=True)
        placement = choose_again(costed)
        if placement is not None:
            _note(costed, placement, "it waited for a worker", out)
            unpark(state, request)
            give_order(state, request, placement, out)


def place_borrowers(state: State, out: StepOutput) -> None:
    """Place requests that wait for room at lenders. Call it when an order has ended, or some of its KV has moved."""
    # Without lenders only a worker that starts to take orders can help, and that calls `place_parked` itself.
    if state.parked and any(worker.lends or worker.cache_elsewhere for worker in state.workers.values()):
        place_parked(state, out)


def _note(costed: Costed, placement: Placement | None, lost_reason: str, out: StepOutput) -> None:
    if out.explains(costed.request.request_id):
        out.notes.append(explain(costed, placement, seq=costed.state.seq, lost_reason=lost_reason))


def park(state: State, request: Request, wait_ns: int, out: StepOutput) -> None:
    """Park the request for at most `wait_ns`."""
    request_id = request.event.request_id
    # The placement is in the timer's key: a timer of an earlier wait must not end this one.
    state.parked[request_id] = True
    arm(
        state,
        f"unplaced:{request_id}:{request.placements}",
        state.at_ns + wait_ns,
        out,
    )


def unpark(state: State, request: Request) -> None:
    request_id = request.event.request_id
    state.parked.pop(request_id, None)
    state.timers.pop(f"unplaced:{request_id}:{request.placements}", None)


def arm(state: State, key: str, at_ns: int, out: StepOutput) -> None:
    """Set a timer, once; one that is set already stays."""
    if key not in state.timers:
        # A policy may name any time to wait: then it is for ever, and still a number that a message can carry.
        at_ns = min(at_ns, INT_MAX)
        state.timers[key] = at_ns
        out.append(SetTimer(key=key, at_ns=at_ns))


def reject(state: State, event: RequestArrived, refusal: Refusal, out: StepOutput) -> None:
    _count_rejected(state, refusal.reason)
    remember_finished(state, event.request_id)
    ttft_slo, tbt_slo = slo_ns(state, event)
    out.append(
        RejectRequest(
            request_id=event.request_id,
            frontend_id=event.frontend_id,
            reason=refusal.reason,
            message=refusal.message,
            predicted=refusal.predicted,
            ttft_slo_ns=ttft_slo,
            tbt_slo_ns=tbt_slo,
            retry_after_ns=refusal.retry_after_ns,
        )
    )


def fail(
    state: State, request: Request, message: str, out: StepOutput, refusal: EngineRefusal | None = None
) -> None:
    """The end of a request that has no order."""
    end(state, request)
    state.counters.failed += 1
    out.append(
        FailRequest(
            request_id=request.event.request_id,
            frontend_id=request.event.frontend_id,
            message=message[:512],
            refusal=refusal,
        )
    )


def cancel(state: State, request: Request, out: StepOutput) -> None:
    """The end of a request that nobody waits for, with its order."""
    if request.order_id:
        withdraw(state, state.orders[request.order_id], out, prefill_runs=True, decode_runs=True)
    end(state, request)
    state.counters.cancelled += 1


def end(state: State, request: Request) -> None:
    """Forget a request that has no order, but for its id."""
    unpark(state, request)
    del state.requests[request.event.request_id]
    remember_finished(state, request.event.request_id)


def remember_finished(state: State, request_id: str) -> None:
    state.finished[request_id] = True
    # Oldest first: an id that comes again does so soon after its end, when an answer was lost.
    if len(state.finished) > FINISHED_MAX:
        del state.finished[next(iter(state.finished))]


def _count_rejected(state: State, reason: RejectReason) -> None:
    rejected = state.counters.rejected
    rejected[reason] = rejected.get(reason, 0) + 1


def reject_placed(
    state: State, request: Request, reason: RejectReason, message: str, tbt_ns: int, out: StepOutput
) -> None:
    """Refuse a request whose order was just withdrawn."""
    end(state, request)
    predicted = msgspec.structs.replace(Refusal(reason=reason, message="").predicted, tbt_ns=tbt_ns)
    reject(state, request.event, Refusal(reason=reason, message=message[:512], predicted=predicted), out)
