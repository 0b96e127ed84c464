"""`halfmoon size --from-log`: the recorded arrivals served by every split of as many workers, and by the fewest.

The simulated cluster is that of a what-if (`whatif.recorded`): its nodes' sizes, and costs as learned by the end of the
log. Only the number of workers of each role differs; a worker keeps its role, also where it changed in the record.
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.replay.whatif import Recorded
from halfmoon.conductor.simulation.capacity import HELD_MIN
from halfmoon.conductor.simulation.options import RunOptions
from halfmoon.conductor.simulation.report import Objectives
from halfmoon.conductor.simulation.simulate import simulate


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A split of workers, and how the recorded arrivals would have fared with it."""

    prefill: int
    decode: int
    #: Share of the requests that hold both objectives.
    held: float
    #: p90 of finished requests.
    ttft_ms: float
    tbt_ms: float
    #: The larger of both, in thousandths of its objective.
    strain_permille: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """The least is best: the most that hold, then the most slack, then the fewest prefill workers."""
        return -self.held, self.strain_permille, self.prefill


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The proposal. `fewest`: None where not even `workers_max` of each pool hold for HELD_MIN of the requests."""

    requests: int
    speed: float
    slo: Objectives
    recorded: tuple[int, int]
    #: Every split of the workers, the one with the fewest prefill workers first.
    splits: list[Split]
    best: Split
    fewest: Split | None
    caveats: list[str]


def split_of(run: Recorded, prefill: int, decode: int, slo: Objectives, speed: float) -> Split:
    """One simulation, `speed` times as fast as recorded. Raises ConfigurationImpossible."""
    report = simulate(
        run.arrivals,
        msgspec.structs.replace(run.cluster, prefill=prefill, decode=decode),
        msgspec.structs.replace(run.policy, elastic="off", ttft_slo_ns=slo.ttft_ns, tbt_slo_ns=slo.tbt_ns),
        run.profile,
        RunOptions(seed=run.policy.seed, speed=speed, slo=slo),
    )
    if not report.complete:
        # Half a run is no measure of the whole.
        raise KeyboardInterrupt
    strain = max(report.service.ttft_ms.p90 / slo.ttft_ns, report.service.tbt_ms.p90 / slo.tbt_ns)
    return Split(
        prefill=prefill,
        decode=decode,
        held=report.service.effective_capacity,
        ttft_ms=report.service.ttft_ms.p90,
        tbt_ms=report.service.tbt_ms.p90,
        strain_permille=round(strain * 1e9),
    )


def described(sizes: Sizes, name: str) -> str:
    """For a person."""
    slo, best = sizes.slo, sizes.best
    prefill, decode = sizes.recorded
    lines = [
        f"{name}: {sizes.requests} requests, recorded with {prefill} prefill + {decode} decode; simulated at speed "
        f"{sizes.speed:g}, TTFT <= {slo.ttft_ns / 1e9:g} s and TBT <= {slo.tbt_ns / 1e6:g} ms",
        "",
        "  prefill  decode     held  p90 TTFT ms  p90 TBT ms",
    ]
    for one in sizes.splits:
        mark = ">" if one == best else " "
        was = "  as recorded" if (one.prefill, one.decode) == sizes.recorded else ""
        lines.append(
            f"{mark} {one.prefill:>7}  {one.decode:>6}  {one.held:>7.1%}  {one.ttft_ms:>11.1f}  {one.tbt_ms:>10.1f}"
            + was
        )
    workers = best.prefill + best.decode
    lines += ["", f"of {workers} workers: {best.prefill} prefill + {best.decode} decode"]
    if sizes.fewest is None:
        lines.append(f"fewest: no number that was tried holds for {HELD_MIN:.0%} of the requests")
    else:
        few = sizes.fewest
        lines.append(
            f"fewest: {few.prefill} prefill + {few.decode} decode hold for {few.held:.1%} of the requests"
        )
    return "\n".join([*lines, *(f"note: {caveat}" for caveat in sizes.caveats)])
