"""The papers' results again: each experiment simulates, compares with the published figure, and says why they
differ.

Nothing here depends on the machine or the time: run twice, it writes the same bytes. `SPECS` names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.papers.systems import run_system
from halfmoon.conductor.simulation.capacity import Runs
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA3_A800, Profile
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.trace import Arrival, read_trace
from halfmoon.schemas.policy import AdmissionName, Policy, PolicyName

S, MS = 1_000_000_000, 1_000_000


class Section(msgspec.Struct, kw_only=True):
    """The result of one experiment: a table, words, plots."""

    title: str
    setting: str
    columns: list[str]
    rows: list[list[str]]
    why: list[str] = []
    plots: list[str] = []


class Context:
    """The traces, and where plots go; `say` tells of progress."""

    def __init__(
        self, trace: Path, folder: Path, say: Callable[[str], None] = lambda text: None, *, synthetic: Path
    ) -> None:
        self.trace, self.synthetic, self.folder, self.say = trace, synthetic, folder, say
        self.arrivals: list[Arrival] = read_trace(trace)
        self.drawn: list[Arrival] = read_trace(synthetic)

    def run(
        self,
        policy: PolicyName = "halfmoon",
        admission: AdmissionName = "none",
        *,
        system: str = "halfmoon",
        cluster: ClusterShape | None = None,
        profile: Profile = LLAMA3_A800,
        slo: Objectives | None = None,
        speed: float = 1.0,
        seed: int = 0,
        noise_percent: int = 0,
        arrivals: Sequence[Arrival] | None = None,
        outcomes: dict[str, Outcome] | None = None,
        elastic: bool = False,
        prefill_group: int = 1,
    ) -> SimulationReport:
        slo = slo or Objectives(ttft_ns=30 * S, tbt_ns=100 * MS)
        cluster = cluster or ClusterShape(prefill=8, decode=8)
        self.say(
            f"  {system} {policy} {admission} {cluster.prefill}+{cluster.decode} speed {speed:g} seed {seed}"
        )
        report = run_system(
            system,
            self.arrivals if arrivals is None else arrivals,
            cluster,
            Policy(
                name=policy,
                admission=admission,
                ttft_slo_ns=slo.ttft_ns,
                tbt_slo_ns=slo.tbt_ns,
                elastic="on" if elastic else "off",
                prefill_group=prefill_group,
            ),
            profile,
            RunOptions(seed=seed, speed=speed, noise_percent=noise_percent, slo=slo),
            outcomes=outcomes,
        )
        if not report.complete:
            raise KeyboardInterrupt  # half a run is no result
        return report

    def runs(
        self, policy: PolicyName = "halfmoon", admission: AdmissionName = "none", **options: object
    ) -> Runs:
        """Runs of one system at many speeds, for its capacity."""

        def at(speed: float) -> dict[str, Outcome]:
            outcomes: dict[str, Outcome] = {}
            self.run(policy, admission, speed=speed, outcomes=outcomes, **options)  # type: ignore[arg-type]
            return outcomes

        return Runs(at)

    def plot(self, name: str) -> Path:
        return self.folder / f"{name}.png"


def within(ours: float, paper: float, tolerance: float) -> str:
    """True when `ours` is within a share of `paper`."""
    off = ours / paper - 1
    return f"{off:+.0%}, {'within' if abs(off) <= tolerance else 'NOT within'} ± {tolerance:.0%}"


Experiment = Callable[[Context], Section]
