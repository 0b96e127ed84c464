"""Options of a simulation, beside its cluster and its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from halfmoon.conductor.simulation.report import Objectives


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`seed` draws the `random` policy's choices and, with `noise_percent`, how much computations differ from the
    profile.
    """

    seed: int = 0
    #: Arrivals come this many times as fast.
    speed: float = 1.0
    #: Arrivals that follow another come after its answer, not at their time.
    closed_loop: bool = False
    noise_percent: int = 0
    #: See `Clock`.
    cost_times: Sequence[tuple[int, float]] = ()
    #: Objectives by which answers count; None: the policy's.
    slo: Objectives | None = None
    #: Called now and then with the number of requests that have ended. KeyboardInterrupt ends the run.
    progress: Callable[[int], None] | None = None


#: As fast as the arrivals came, at the profile's costs.
AS_RECORDED = RunOptions()
