"""`halfmoon size --from-log`: the recorded arrivals served by every split of as many workers, and by the fewest.

A split is so many prefill and so many decode workers; or all of them are mixed and do both.

The simulated cluster is that of a what-if (`whatif.recorded`): its nodes' sizes, and costs as learned by the end of the
log. Only the number of workers of each role differs; a worker keeps its role, also where it changed in the record.
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.replay.whatif import Recorded
from halfmoon.conductor.simulation.capacity import HELD_MIN
from halfmoon.conductor.simulation.options import RunOptions
from halfmoon.conductor.simulation.report import Objectives, Workers
from halfmoon.conductor.simulation.simulate import simulate


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A split of workers, and how the recorded arrivals would have fared with it."""

    prefill: int
    decode: int
    mixed: int = 0
    #: Share of the requests that hold both objectives.
    held: float
    #: p90 of finished requests.
    ttft_ms: float
    tbt_ms: float
    #: The larger of both, in thousandths of its objective.
    strain_permille: int

    @property
    def workers(self) -> Workers:
        return Workers(self.prefill, self.decode, self.mixed)

    @property
    def rank(self) -> tuple[float, int, Workers]:
        """The least is best: the most that hold, then the most slack, then the fewest prefill workers."""
        return -self.held, self.strain_permille, self.workers


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The proposal. `fewest…`: None where not even `workers_max` of a role hold for HELD_MIN of the requests."""

    requests: int
    speed: float
    slo: Objectives
    recorded: Workers
    #: Every split of the workers into two pools, the one with the fewest prefill workers first; then mixed ones alone,
    #: and the recorded split where it is none of these.
    splits: list[Split]
    best: Split
    fewest: Split | None
    fewest_mixed: Split | None
    caveats: list[str]


def split_of(run: Recorded, workers: Workers, slo: Objectives, speed: float) -> Split:
    """One simulation, `speed` times as fast as recorded. Raises ConfigurationImpossible."""
    report = simulate(
        run.arrivals,
        msgspec.structs.replace(run.cluster, **workers._asdict()),
        msgspec.structs.replace(run.policy, elastic="off", ttft_slo_ns=slo.ttft_ns, tbt_slo_ns=slo.tbt_ns),
        run.profile,
        RunOptions(seed=run.policy.seed, speed=speed, slo=slo),
    )
    if not report.complete:
        # Half a run is no measure of the whole.
        raise KeyboardInterrupt
    strain = max(report.service.ttft_ms.p90 / slo.ttft_ns, report.service.tbt_ms.p90 / slo.tbt_ns)
    return Split(
        **workers._asdict(),
        held=report.service.effective_capacity,
        ttft_ms=report.service.ttft_ms.p90,
        tbt_ms=report.service.tbt_ms.p90,
        strain_permille=round(strain * 1e9),
    )


def described(sizes: Sizes, name: str) -> str:
    """For a person."""
    slo, best = sizes.slo, sizes.best
    lines = [
        f"{name}: {sizes.requests} requests, recorded with {sizes.recorded}; simulated at speed "
        f"{sizes.speed:g}, TTFT <= {slo.ttft_ns / 1e9:g} s and TBT <= {slo.tbt_ns / 1e6:g} ms",
        "",
        "  prefill  decode  mixed     held  p90 TTFT ms  p90 TBT ms",
    ]
    for one in sizes.splits:
        mark = ">" if one == best else " "
        was = "  as recorded" if one.workers == sizes.recorded else ""
        lines.append(
            f"{mark} {one.prefill:>7}  {one.decode:>6}  {one.mixed:>5}  {one.held:>7.1%}  {one.ttft_ms:>11.1f}  "
            f"{one.tbt_ms:>10.1f}{was}"
        )
    lines += ["", f"of {sum(best.workers)} workers: {best.workers}"]
    for few, kind in ((sizes.fewest, "two pools"), (sizes.fewest_mixed, "mixed")):
        if few is None:
            lines.append(f"fewest, {kind}: no number that was tried holds for {HELD_MIN:.0%} of the requests")
        else:
            lines.append(f"fewest, {kind}: {few.workers} hold for {few.held:.1%} of the requests")
    return "\n".join([*lines, *(f"note: {caveat}" for caveat in sizes.caveats)])
