"""Every system that can be simulated, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfmoon.conductor.simulation.cluster_shape import ClusterShape
from halfmoon.conductor.simulation.devices import Deployment
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.systems.colocated import COLOCATED, simulate_colocated
from halfmoon.conductor.simulation.systems.infinite_llm import Lending, simulate_infinite_llm
from halfmoon.conductor.simulation.systems.lamina import simulate_lamina
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.policy import Policy

SYSTEMS = ("halfmoon", *COLOCATED, "lamina", "infinite-llm")


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
    cost_times: Sequence[tuple[int, float]] = (),
    slo: Objectives | None = None,
    progress: Callable[[int], None] | None = None,
    outcomes: dict[str, Outcome] | None = None,
    deployment: Deployment | None = None,
    lending: Lending | None = None,
) -> SimulationReport:
    """Simulates the system of this name; see `simulate`.

    `lamina` runs on `deployment`, not on cluster and profile; `infinite-llm` on the decode workers, without prefill.
    """
    slo = slo or Objectives(ttft_ns=policy.ttft_slo_ns, tbt_ns=policy.tbt_slo_ns)
    if system == "lamina":
        assert deployment is not None, "lamina needs devices"
        return simulate_lamina(
            arrivals, deployment, slo=slo, speed=speed, progress=progress, outcomes=outcomes
        )
    if system == "infinite-llm":
        block_tokens = cluster.block_tokens
        blocks = profile.kv_bytes // profile.layout(block_tokens).block_bytes
        return simulate_infinite_llm(
            arrivals,
            cluster.decode,
            (cluster.kv_blocks if cluster.kv_blocks >= 0 else blocks) * block_tokens,
            profile,
            lending=lending or Lending(),
            slo=slo,
            speed=speed,
            progress=progress,
            outcomes=outcomes,
        )
    if system in COLOCATED:
        return simulate_colocated(
            system,
            arrivals,
            cluster,
            profile,
            slo=slo,
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
        cost_times=cost_times,
        slo=slo,
        progress=progress,
        outcomes=outcomes,
    )
