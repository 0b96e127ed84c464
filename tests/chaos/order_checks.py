"""Where a core's decisions place orders: on workers of the right role that stay, in no queue that is full, in no pause,
and with the weights of now.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.conductor.core.booking import NEVER_PASSED
from halfmoon.conductor.core.state.core_state import State
from halfmoon.schemas.decisions import ChangeRole, Decision, StartDecode, StartMixed, StartPrefill, StartStage
from halfmoon.schemas.events import RequestArrived, Stamped


def check_orders(state: State, stamped: Stamped, decisions: Sequence[Decision]) -> None:
    """After a step of a core."""
    new = isinstance(stamped.event, RequestArrived) and not stamped.event.answer_lost
    for decision in decisions:
        _check_role(state, decision)
        _check_weights(state, decision)
        if new and isinstance(decision, StartPrefill | StartMixed):
            orders, limit = state.workers[decision.worker_id].orders, state.policy.queued_max_per_worker
            assert len(orders) <= limit, ("I90 more than the queue takes", decision, len(orders))
        if isinstance(decision, StartPrefill) and decision.before:
            _check_passed(state, decision)


def _check_passed(state: State, order: StartPrefill) -> None:
    duty = state.workers[order.worker_id].prompts
    queue = list(duty.orders) if duty is not None else []
    place = queue.index(order.order_id)
    assert place >= NEVER_PASSED, ("I121 passes one that is prepared", order, queue)
    passed = queue[place + 1 :]
    assert order.before in passed, ("I121 passes one that does not wait there", order, queue)
    of_groups = [one for one in passed if state.orders[one].prefill.stages]
    assert not of_groups, ("I121 passes one that a group computes", order, of_groups)


def _check_weights(state: State, decision: Decision) -> None:
    """Nothing is placed while an operator has paused that; and what is, is of the weights of now, with their keys."""
    match decision:
        case StartPrefill() | StartMixed():
            assert not state.paused, ("I119 placed in a pause", decision)
            keys = state.requests[decision.request_id].event.weight_version
            assert (decision.weight_version, keys) == (state.weight_version,) * 2, (
                "I120 of other weights",
                decision,
                keys,
            )
        case _:
            pass


def _check_role(state: State, decision: Decision) -> None:
    """Orders go to workers of their role that stay, and some stay in each."""
    match decision:
        case StartPrefill() | StartDecode() | StartMixed() | StartStage():
            worker = state.workers[decision.worker_id]
            role = type(decision).__name__.removeprefix("Start").lower().replace("stage", "prefill")
            assert (worker.role, worker.change.becomes) == (role, ""), (
                "I91 placed on another role",
                decision,
                worker,
            )
        case ChangeRole():
            role = state.workers[decision.worker_id].role
            stay = [one for one in state.workers.values() if one.role == role and not one.draining]
            assert stay, ("I91 the last of its role was told to change", decision)
        case _:
            pass
