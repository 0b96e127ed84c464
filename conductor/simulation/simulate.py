"""`simulate`: arrivals, a cluster, a policy and a profile in; a report out. The same in, the same out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import msgspec

from halfmoon.conductor.simulation.cluster_shape import ClusterShape
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import Objectives, SimulationReport, summarise
from halfmoon.conductor.simulation.trace import Arrival, faster
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.policy import Policy

#: How many times load is looked at during the arrivals.
SAMPLES = 600
#: Not more often than this.
SAMPLE_NS_MIN = 100_000_000
#: Worlds of this process that are still there: each is one circle of references, which stays until it is collected.
_worlds: WeakSet[World] = WeakSet()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Else every collection would look at every block in every pool, and there may be millions. It would find nothing:
    no request leaves a circle of references behind, only the world itself does.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _collect_worlds_before(world: World) -> None:
    """A sweep of simulations has the memory of one."""
    if _worlds:
        gc.collect()
    _worlds.add(world)


def simulate(
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
) -> SimulationReport:
    """Serving under the core, disaggregated or mixed: `arrivals` (by time) `speed` times as fast.

    `seed` draws the `random` policy's choices and, with `noise_percent`, how much computations differ from the profile;
    `cost_times` see Clock.
    `slo` is what is counted (default: the policy's). `outcomes` is filled with what became of each request. Raises
    ConfigurationImpossible.
    """
    began = time.perf_counter()
    slo = slo or Objectives(ttft_ns=policy.ttft_slo_ns, tbt_ns=policy.tbt_slo_ns)
    world = World(
        cluster,
        msgspec.structs.replace(policy, seed=seed),
        profile,
        seed=seed,
        noise_percent=noise_percent,
        cost_times=cost_times,
        outcomes=outcomes,
    )
    _collect_worlds_before(world)
    paced = faster(arrivals, speed)
    sample_ns = max((paced[-1].at_ns - paced[0].at_ns) // SAMPLES, SAMPLE_NS_MIN) if paced else 1
    with _collector_paused():
        complete = world.run(paced, sample_ns=sample_ns, progress=progress)
    end_ns = world.clock.now_ns
    prefill_ns, decode_ns = world.computed_ns()
    report = SimulationReport(
        system="halfmoon",
        policy=policy.plugin or policy.name,
        admission=policy.admission,
        profile=profile.name,
        prefill=cluster.prefill,
        decode=cluster.decode,
        mixed=cluster.mixed,
        speed=speed,
        seed=seed,
        complete=complete,
        slo=slo,
        prefill_gpu_s=round(prefill_ns / 1e9, 6),
        decode_gpu_s=round(decode_ns / 1e9, 6),
        bytes_moved=world.context.network.bytes_moved,
        bytes_fetched=world.context.fetched_bytes,
        bytes_pushed=world.context.pushed_bytes,
        failed_fetches=world.context.failed_fetches,
        events=world.events,
        digest=world.digest(),
        role_changes=world.role_changes,
        moves=world.core.state.counters.moves,
        moved_tokens=world.core.state.counters.moved_tokens,
        load=world.samples,
    )
    summarise(report, world.outcomes, end_ns)
    computing = cluster.prefill + cluster.mixed
    report.prefill_busy = round(report.prefill_gpu_s / max(report.duration_s, 1e-3) / computing, 6)
    report.wall_s = round(time.perf_counter() - began, 3)
    return report
