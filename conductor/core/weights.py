"""Weights that are changed in place: placements that an operator pauses for it, and the change itself."""

from __future__ import annotations

from halfmoon.conductor.core.booking import withdraw
from halfmoon.conductor.core.orders import place, place_parked
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.versions import of_these_weights
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.weights import PlacementsPaused, WeightsChanged


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


def weights_changed(state: State, event: WeightsChanged) -> None:
    """Blocks of the version before are matched no more, also for requests that are here already."""
    state.weight_version = event.weight_version
    for request in state.requests.values():
        request.event = of_these_weights(state, request.event)
    state.members_changed()  # blocks that are coming are of the version before
