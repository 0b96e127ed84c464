"""Placements that an operator pauses, so that the weights of a fleet can be changed while nothing is computed."""

from __future__ import annotations

from halfmoon.conductor.core.booking import withdraw
from halfmoon.conductor.core.orders import place, place_parked
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.weights import PlacementsPaused


def placements_paused(state: State, event: PlacementsPaused, out: StepOutput) -> None:
    """From now on every request waits, or none does any more."""
    state.paused = event.paused
    if not state.paused:
        place_parked(state, out)
    elif event.abort:
        _take_back_all(state, out)


def _take_back_all(state: State, out: StepOutput) -> None:
    orders = list(state.orders.values())
    for order in orders:
        withdraw(state, order, out, prefill_runs=True, decode_runs=True)
    for order in orders:
        request = state.requests[order.request_id]
        # No worker has failed it, so this placement does not bring it nearer to its last one.
        request.placements = max(1, request.placements - 1)
        place(state, request, "placements were paused", out)
