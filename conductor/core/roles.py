"""Roles that change: a worker takes nothing new, finishes what it has, and joins again in another role.

Nobody is told who is needed where it is: in every role that had workers some stay.
"""

from __future__ import annotations

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import ChangeRole
from halfmoon.schemas.events import RoleWanted
from halfmoon.schemas.roles import WorkerRole


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
