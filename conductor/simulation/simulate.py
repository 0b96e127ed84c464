"""`simulate`: arrivals, a cluster, a policy and a profile in; a report out. The same in, the same out."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from halfmoon.conductor.simulation.options import AS_RECORDED, ClusterShape, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import (
    Objectives,
    RunSetting,
    SimulationReport,
    Traffic,
    device_time,
    summarise,
)
from halfmoon.conductor.simulation.trace import Arrival, faster
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.policy import Policy

#: How many times load is looked at during the arrivals.
SAMPLES = 600
#: Not more often than this.
SAMPLE_NS_MIN = 100_000_000


@contextmanager
def _memory_settled() -> Iterator[None]:
    """Else every collection would look at every block in every pool, and there may be millions."""
    gc.collect()
    # Objects that the caller has frozen stay so: there is no way back for a part of them.
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def simulate(
    arrivals: Sequence[Arrival],
    cluster: ClusterShape,
    policy: Policy,
    profile: Profile,
    run: RunOptions = AS_RECORDED,
    *,
    outcomes: dict[str, Outcome] | None = None,
) -> SimulationReport:
    """`arrivals` (by time) served by the cluster under the core. `outcomes` gets the outcome of each request. Raises
    ConfigurationImpossible.
    """
    began = time.perf_counter()
    slo = run.slo or Objectives(ttft_ns=policy.ttft_slo_ns, tbt_ns=policy.tbt_slo_ns)
    world = World(
        cluster,
        msgspec.structs.replace(policy, seed=run.seed),
        profile,
        run,
        outcomes=outcomes,
    )
    paced = faster(arrivals, run.speed)
    sample_ns = max((paced[-1].at_ns - paced[0].at_ns) // SAMPLES, SAMPLE_NS_MIN) if paced else 1
    with _memory_settled():
        complete = world.run(paced, sample_ns=sample_ns, progress=run.progress)
    end_ns = world.clock.now_ns
    prefill_ns, decode_ns = world.computed_ns()
    report = SimulationReport(
        setting=RunSetting(
            system="halfmoon",
            policy=policy.name,
            admission=policy.admission,
            profile=profile.name,
            prefill=cluster.prefill,
            decode=cluster.decode,
            mixed=cluster.mixed,
            speed=run.speed,
            seed=run.seed,
        ),
        complete=complete,
        slo=slo,
        traffic=Traffic(
            bytes_moved=world.context.network.bytes_moved,
            bytes_fetched=world.context.fetched_bytes,
            bytes_pushed=world.context.pushed_bytes,
            failed_fetches=world.context.failed_fetches,
        ),
        events=world.events,
        digest=world.digest(),
        role_changes=world.role_changes,
        load=world.samples,
    )
    summarise(report, world.outcomes, end_ns)
    report.devices = device_time(
        prefill_ns, decode_ns, report.service.duration_s, cluster.prefill + cluster.mixed
    )
    report.wall_s = round(time.perf_counter() - began, 3)
    return report
