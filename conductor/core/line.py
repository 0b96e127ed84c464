"""Requests without a place: those that wait for a worker, and the line of those that wait for room.

First come, first served: who comes later gets no room that the first of the line waits for. It has a *claim* to what
it needs where it will be there soonest, made once. What would end before that anyhow may use the room until then, as in
EASY backfilling; since a claim's time never moves, nobody passes the first for ever. Requests that were accepted
before, and lost their place, go first.

Source: Lifka, The ANL/IBM SP Scheduling System (1995), section 2: the first of a queue has a reservation, and others
are put before it where they do not delay it.
"""

from __future__ import annotations

from halfmoon.conductor.core.placement.rooms import RoomToCome, soonest_room
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Request, RoomClaim
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.decisions import SetTimer
from halfmoon.schemas.events import (
    DecodeFailed,
    DecodeRefused,
    KvMoved,
    KvMoveRefused,
    PolicyChanged,
    PrefillFailed,
    RequestCancelled,
    RequestFinished,
    StoreJoined,
    StoreLeft,
    StoreSuspected,
    TimerFired,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.types import INT_MAX

#: After them there may be room for a request that waits until it can borrow.
MAY_END_AN_ORDER = dict.fromkeys(
    (DecodeFailed, DecodeRefused, PrefillFailed, RequestCancelled, RequestFinished)
)
#: After them there may be room for those who wait for it, or none where it was to come; as after whatever is decided.
MAY_MAKE_ROOM = MAY_END_AN_ORDER | dict.fromkeys(
    (
        KvMoved,
        KvMoveRefused,
        PolicyChanged,
        StoreJoined,
        StoreLeft,
        StoreSuspected,
        TimerFired,
        WorkerDraining,
        WorkerJoined,
        WorkerLeft,
    )
)


def park(state: State, request: Request, wait_ns: int, out: StepOutput) -> None:
    """Let it wait for a worker, for so long."""
    request_id = request.event.request_id
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
    state.line.pop(request_id, None)
    drop_claim(state, request_id)


def arm(state: State, key: str, at_ns: int, out: StepOutput) -> None:
    """Set a timer, once; one that is set already stays."""
    if key not in state.timers:
        # A policy may name any time to wait: then it is for ever, and still a number that a message can carry.
        at_ns = min(at_ns, INT_MAX)
        state.timers[key] = at_ns
        out.append(SetTimer(key=key, at_ns=at_ns))


# --- room ---------------------------------------------------------------------------------------------------


def wait_for_room(state: State, request: Request, wait_ns: int, out: StepOutput) -> None:
    """Let it wait in the line, for so long."""
    park(state, request, wait_ns, out)
    state.line[request.event.request_id] = True
    if request.placements:
        accepted = [one for one in state.line if state.requests[one].placements]
        state.line = dict.fromkeys([*accepted, *state.line], True)


def first_in_line(state: State) -> Request | None:
    return state.requests[next(iter(state.line))] if state.line else None


def drop_claim(state: State, request_id: str) -> None:
    """Nothing is kept for it any more: it has its room, or is looked at anew."""
    if state.claim is not None and state.claim.request_id == request_id:
        state.claim = None


def keep_room(state: State, request: Request, claim: RoomClaim | None) -> None:
    """Keep for the first of the line what `claim` says, where that still holds, or else the soonest room."""
    if claim is None or not _holds(state, request, claim):
        found = soonest_room(state, request.event, state.at_ns, avoid=request.avoid)
        claim = _claim(state, request, found) if found is not None else None
    state.claim = claim


def _claim(state: State, request: Request, found: RoomToCome) -> RoomClaim:
    return RoomClaim(
        request_id=request.event.request_id,
        worker_id=found.worker_id,
        blocks=found.blocks,
        since_ns=state.at_ns,
        at_ns=found.at_ns,
    )


def _holds(state: State, request: Request, claim: RoomClaim) -> bool:
    """It is the request's, and all who are to give something are there."""
    workers = [state.workers.get(worker_id) for worker_id in (claim.worker_id, *claim.blocks)]
    there = all(worker is not None and state.takes_orders(worker) for worker in workers)
    return there and claim.request_id == request.event.request_id
