"""The papers' systems beside halfmoon's: all that can be simulated, by name, and the options of `halfmoon simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec

from benchmarks.papers.colocated import COLOCATED, simulate_colocated
from benchmarks.papers.devices import Deployment
from benchmarks.papers.infinite_llm import Lending, simulate_infinite_llm
from benchmarks.papers.lamina import simulate_lamina
from benchmarks.papers.options import add_devices, add_lending, deployment_of, lending_of
from benchmarks.papers.report import table
from halfmoon.conductor.simulation.options import AS_RECORDED, ClusterShape, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.policy import Policy

SYSTEMS = ("halfmoon", *COLOCATED, "lamina", "infinite-llm")
__all__ = ["SYSTEMS", "add", "run_system", "simulated", "table"]


def add(parser: argparse.ArgumentParser) -> None:
    """Options of a simulation of one of them."""
    group = parser.add_argument_group("other systems, of the papers")
    group.add_argument(
        "--system",
        choices=SYSTEMS,
        default="halfmoon",
        help="colocated systems have P + D workers, lamina its --devices, infinite-llm D instances",
    )
    group.add_argument("--chunk-tokens", type=int, default=512, help="vllm-chunked: tokens of one iteration")
    add_devices(parser)
    add_lending(parser)


def simulated(
    args: argparse.Namespace,
    arrivals: Sequence[Arrival],
    cluster: ClusterShape,
    profile: Profile,
    run: RunOptions,
    outcomes: dict[str, Outcome] | None,
) -> SimulationReport:
    """As the options say, which are not those of halfmoon."""
    return run_system(
        args.system,
        arrivals,
        msgspec.structs.replace(cluster, chunk_tokens=args.chunk_tokens),
        Policy(),
        profile,
        run,
        outcomes=outcomes,
        deployment=deployment_of(args, arrivals) if args.system == "lamina" else None,
        lending=lending_of(args),
    )


def run_system(
    system: str,
    arrivals: Sequence[Arrival],
    cluster: ClusterShape,
    policy: Policy,
    profile: Profile,
    run: RunOptions = AS_RECORDED,
    *,
    outcomes: dict[str, Outcome] | None = None,
    deployment: Deployment | None = None,
    lending: Lending | None = None,
) -> SimulationReport:
    """Simulates the system of this name; see `simulate`.

    `lamina` runs on `deployment`, not on cluster and profile; `infinite-llm` on the decode workers, without prefill.
    """
    slo = run.slo or Objectives(ttft_ns=policy.ttft_slo_ns, tbt_ns=policy.tbt_slo_ns)
    if system == "lamina":
        assert deployment is not None, "lamina needs devices"
        return simulate_lamina(
            arrivals, deployment, slo=slo, speed=run.speed, progress=run.progress, outcomes=outcomes
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
            speed=run.speed,
            progress=run.progress,
            outcomes=outcomes,
        )
    if system in COLOCATED:
        return simulate_colocated(
            system,
            arrivals,
            cluster,
            profile,
            slo=slo,
            seed=run.seed,
            speed=run.speed,
            noise_percent=run.noise_percent,
            progress=run.progress,
            outcomes=outcomes,
        )
    return simulate(
        arrivals,
        cluster,
        policy,
        profile,
        msgspec.structs.replace(run, slo=slo),
        outcomes=outcomes,
    )
