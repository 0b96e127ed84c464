"""Versions of the model's weights: the keys of a request are of the version of now, or it has none."""

# The keys come from frontends, which hear of a version by the first order of it: only they have the tokens. Until then
# their keys name blocks of the version before, and what is not known to be right must not be matched. So such a request
# is placed as one that nobody has computed, and its frontend gives the keys of the order's version with the tokens.

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.state.core_state import State
from halfmoon.schemas.events import RequestArrived


def of_these_weights(state: State, event: RequestArrived) -> RequestArrived:
    """`event`, without its keys where they are of other weights."""
    if event.weight_version == state.weight_version:
        return event
    return msgspec.structs.replace(
        event, block_keys=b"", sketch=b"", documents=[], weight_version=state.weight_version
    )
