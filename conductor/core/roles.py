"""Roles that change: a worker takes nothing new, finishes its orders, and joins again in another role.

No change empties a role: in every role that had workers some stay. An operator orders a change (`RoleWanted`), or the
planner, by load: a worker goes from the emptier pool to the fuller one, if the fuller one gains by it.

The planner looks once a period. The giving pool must, with a worker less, have room (`elastic_giver_percent_max`) and
be emptier than the other one was, by `elastic_gain_percent`: then the way back would not pay, and under a steady load
no worker goes back and forth. A short imbalance is left alone (`elastic_hold_ns`); after a change the planner waits
(`elastic_pause_ns`), and few workers change at once. A pool that has no worker left gets one at once.

The worker with the least outstanding work goes: the prefill worker with the shortest queue, the decode worker whose
last answer is expected to end first.

Source: Mooncake (ARXIV), section 7, names the switch of roles; the moment and the choice of the worker are ours.
"""

from __future__ import annotations

from typing import Literal

from halfmoon.conductor.core.explanation import RoleGrounds
from halfmoon.conductor.core.orders import arm
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.demand import Advice, demand_of, forget_demand
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.core.state.pool_needs import ENDLESS, PoolNeed, pool_needs
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import ChangeRole
from halfmoon.schemas.events import RoleWanted
from halfmoon.schemas.roles import ELASTIC_ROLES, WorkerRole

TIMER = "roles:plan"


def role_wanted(state: State, event: RoleWanted, out: StepOutput) -> None:
    """The worker takes nothing new from now on, and changes its role when it has finished; unless it is needed."""
    worker = state.workers.get(event.target_id)
    if worker is not None and may_change(state, worker, event.role):
        change_role(state, worker, event.role, out)


def may_change(state: State, worker: WorkerRecord, role: WorkerRole) -> bool:
    """It can take the role, does not leave already, and another one of its own role stays."""
    if role not in worker.change.may_become or role == worker.role or worker.draining:
        return False
    return others_stay(state, worker)


def others_stay(state: State, worker: WorkerRecord) -> bool:
    mates = [one for one in state.workers.values() if one.role == worker.role and one is not worker]
    return any(not one.draining for one in mates)


def change_role(
    state: State, worker: WorkerRecord, role: WorkerRole, out: StepOutput, reason: str = ""
) -> None:
    worker.draining, worker.change.becomes = True, role
    state.members_changed()
    state.demand.changed_ns, state.demand.advice = state.at_ns, None
    out.append(ChangeRole(worker_id=worker.worker_id, role=role, reason=reason))


# --- by load ----------------------------------------------------------------------------------------------


def keep_looking(state: State, out: StepOutput) -> None:
    """Set the timer while there is load. Call it when a request has arrived, or the timer has fired."""
    policy = state.policy
    if policy.elastic == "off" or TIMER in state.timers or not (state.requests or state.demand.looks):
        return
    if any(worker.change.may_become for worker in state.workers.values()):
        arm(state, TIMER, state.at_ns + policy.elastic_period_ns, out)


def plan_roles(state: State, out: StepOutput) -> None:
    """Change a role, or advise it, if the load has been so for long enough; and set the timer again."""
    demand, policy = state.demand, state.policy
    forget_demand(demand, state.at_ns, policy.elastic_window_ns)
    if policy.elastic != "off":
        needs = pool_needs(state)
        role = fuller_pool(state, needs)
        if role != demand.wants:
            demand.wants, demand.wants_since_ns = role, state.at_ns
            demand.advice = None
        if role and _is_time(state, needs[role]):
            worker = _who_goes(state, role)
            if worker is not None:
                _go(state, worker, role, needs, out)
    else:
        demand.wants, demand.advice = "", None
    keep_looking(state, out)


def fuller_pool(state: State, needs: dict[WorkerRole, PoolNeed]) -> WorkerRole | Literal[""]:
    """The role that is to get a worker of the other one; "": both are well as they are."""
    policy = state.policy
    for role, other in (ELASTIC_ROLES, ELASTIC_ROLES[::-1]):
        fuller, giver = needs[role], needs[other]
        if giver.workers < 2:
            continue
        if not fuller.workers:
            return role
        full = fuller.load() * 100 >= policy.elastic_from_percent * 1_000
        # Two pools that are too small are not made equally full: a prefill pool under overload refuses its few largest
        # prompts, while a decode pool without room refuses any.
        spare_permille = policy.elastic_giver_percent_max * 10 or ENDLESS
        # Having given it is still emptier than the other one was: so the reverse would not pay next.
        emptier = giver.load(-1) * (100 + policy.elastic_gain_percent) <= fuller.load() * 100
        if full and emptier and giver.load_having_given(fuller) <= spare_permille:
            return role
    return ""


def _is_time(state: State, need: PoolNeed) -> bool:
    policy, demand = state.policy, state.demand
    under_way = sum(worker.change.becomes != "" for worker in state.workers.values())
    if under_way >= policy.elastic_changes_max:
        return False
    if not need.workers:
        return True
    held = state.at_ns - demand.wants_since_ns >= policy.elastic_hold_ns
    return held and state.at_ns - demand.changed_ns >= policy.elastic_pause_ns


def _who_goes(state: State, role: WorkerRole) -> WorkerRecord | None:
    those = [worker for worker in state.workers.values() if may_change(state, worker, role)]
    return min(those, key=lambda worker: (*done_ns(state, worker), worker.worker_id), default=None)


def done_ns(state: State, worker: WorkerRecord) -> tuple[int, int]:
    """Whether others' requests rest on it, and the predicted time until it has finished its orders."""
    if worker.batch is None:
        return 0, queue_ns(worker, state.at_ns)
    orders = [state.orders[order_id] for order_id in worker.orders]
    last_ns = max((order.prefill.end_ns + order.decode.lasts_ns for order in orders), default=state.at_ns)
    return int(bool(worker.lent)), max(0, last_ns - state.at_ns)


def _go(
    state: State,
    worker: WorkerRecord,
    role: WorkerRole,
    needs: dict[WorkerRole, PoolNeed],
    out: StepOutput,
) -> None:
    """The change itself, or the advice of it; noted once."""
    demand, reason = state.demand, _reason(needs)
    if state.policy.elastic == "advise":
        if demand.advice is not None:
            return
        demand.advice = Advice(worker.worker_id, role, state.at_ns, reason)
    out.roles.append(_grounds(state, worker, role, needs, reason))
    if state.policy.elastic == "on":
        demand.changes += 1
        change_role(state, worker, role, out, reason)


def _reason(needs: dict[WorkerRole, PoolNeed]) -> str:
    return ", ".join(
        f"{role} needs {need.permille // 1_000}.{need.permille % 1_000 // 100} workers and has {need.workers}"
        for role, need in needs.items()
    )


def _grounds(
    state: State, worker: WorkerRecord, role: WorkerRole, needs: dict[WorkerRole, PoolNeed], reason: str
) -> RoleGrounds:
    policy = state.policy
    seen = demand_of(state.demand, state.at_ns, policy.elastic_window_ns)
    full = {name: need.load() for name, need in needs.items()}
    then = {name: need.load(1 if name == role else -1) for name, need in needs.items()}
    mates = [one for one in state.workers.values() if one is not worker and may_change(state, one, role)]
    return RoleGrounds(
        worker_id=worker.worker_id,
        role=worker.role,
        becomes=role,
        seq=state.seq,
        at_ns=state.at_ns,
        advised=policy.elastic == "advise",
        reason=reason,
        arriving={name: need.arriving for name, need in needs.items()},
        present={name: need.present for name, need in needs.items()},
        workers={name: need.workers for name, need in needs.items()},
        load_before=full,
        load_after=then,
        held_ns=state.at_ns - state.demand.wants_since_ns,
        window_ns=policy.elastic_window_ns,
        requests=seen.requests,
        prefill_ns=seen.prefill_ns,
        answer_tokens=seen.answer_tokens,
        done_ns=done_ns(state, worker)[1],
        others={one.worker_id: done_ns(state, one)[1] for one in mates},
    )
