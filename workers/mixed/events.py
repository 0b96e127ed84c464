"""Stimuli of the mixed machine, beside those of a prefill's preparation and of a decode.

    Wake ─▶ EngineIdled            RunIteration ─▶ IterationMade

After IterationMade the shell gives EngineIdled: the machine answers it with the next iteration, or with none until its
Wake.
"""

from __future__ import annotations

from halfmoon.schemas.decisions import StartMixed
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.decode.events import EngineIdled
from halfmoon.workers.machines import (
    AnnounceRequested,
    OrderCancelled,
    ResendRequested,
    WorkerEvent,
    WorkerStopped,
)
from halfmoon.workers.prefill.events import Preparing


class MixedOrdered(WorkerEvent, frozen=True, kw_only=True):
    """The conductor placed a request here; the same order may come again."""

    order: StartMixed


class IterationMade(WorkerEvent, frozen=True, kw_only=True):
    """RunIteration is done. The tokens are of its rows that draw, in their order.

    `load_ns`: the part of `step_ns` that loading took. `lost`: orders whose slots of the node's pool were not theirs
    any more when all had been loaded from them. `kept`: orders whose prompt was not computed, since this worker had
    kept it.
    """

    decoded: list[SampledToken]
    first: list[SampledToken]
    step_ns: int
    lost: list[str]
    load_ns: int = 0
    kept: frozenset[str] = frozenset()


Event = (
    MixedOrdered
    | OrderCancelled
    | AnnounceRequested
    | WorkerStopped
    | ResendRequested
    | Preparing
    | EngineIdled
    | IterationMade
)
