"""Every system that can be simulated, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfmoon.conductor.simulation.colocated import COLOCATED, simulate_colocated
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.conductor.simulation.world import ClusterShape
from halfmoon.schemas.policy import Policy

SYSTEMS = ("halfmoon", *COLOCATED)


def run_system(
    system: str,
    arrivals: Sequence[Arrival],
    cluster: ClusterShape,
    policy: Policy,
    profile: Profile,
    *,
    seed: int = 0,
    speed: float = 1.0,
    noise_percent: int = 0,
    slo: Objectives | None = None,
    progress: Callable[[int], None] | None = None,
    outcomes: dict[str, Outcome] | None = None,
) -> SimulationReport:
    """Simulates the system of this name; see `simulate`."""
    if system in COLOCATED:
        return simulate_colocated(
            system,
            arrivals,
            cluster,
            profile,
            slo=slo or Objectives(ttft_ns=policy.ttft_slo_ns, tbt_ns=policy.tbt_slo_ns),
            seed=seed,
            speed=speed,
            noise_percent=noise_percent,
            progress=progress,
            outcomes=outcomes,
        )
    return simulate(
        arrivals,
        cluster,
        policy,
        profile,
        seed=seed,
        speed=speed,
        noise_percent=noise_percent,
        slo=slo,
        progress=progress,
        outcomes=outcomes,
    )
