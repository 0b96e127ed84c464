"""The papers' best split, and the two tables of which a cell does not fit, once more on pools of other shapes: mixed
workers, groups of prefill workers, roles that change.
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.simulation.cluster_shape import ClusterShape
from halfmoon.conductor.simulation.experiments.runner import MS, Context, S, Section
from halfmoon.conductor.simulation.profiles import LLAMA2_A800, LLAMA3_A800, Profile
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.schemas.policy import AdmissionName, PolicyName

WORKERS = 16
SPLIT_SPEED, OVERLOAD_SPEED = 1.5, 2.0
ADMISSIONS: tuple[AdmissionName, ...] = ("late", "early", "predicted")
#: Of `random` to the papers' rule, and what late, early and predicted refused of 23,000.
PAPER_RATIO, PAPER_REFUSED = 6.40, (4183, 3771, 3589)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """All workers, and what they may do beside keeping their roles."""

    name: str
    cluster: ClusterShape
    elastic: bool = False
    prefill_group: int = 1

    @property
    def in_tables(self) -> bool:
        """`random` and the papers' rule choose among pairs: where requests go to mixed workers, neither says where."""
        return not self.cluster.mixed


EVEN = ClusterShape(prefill=8, decode=8)
SHAPES = (
    Shape(name="8 + 8", cluster=EVEN),
    Shape(name="12 + 4", cluster=ClusterShape(prefill=12, decode=4)),
    Shape(name="8 + 8, groups of 2", cluster=EVEN, prefill_group=2),
    Shape(name="8 + 8, roles that change", cluster=EVEN, elastic=True),
    Shape(name="4 + 4 + 8 mixed", cluster=ClusterShape(prefill=4, decode=4, mixed=8)),
    Shape(name="16 mixed", cluster=ClusterShape(prefill=0, decode=0, mixed=16)),
)


def shapes(context: Context) -> Section:
    """Split, random over the rule, and admissions under overload, by shape."""
    rows = [_row(context, shape) for shape in SHAPES]
    return Section(
        title="The split, and the cells that did not fit, on pools of other shapes",
        setting=f"{WORKERS} workers, conversation trace. Held: as in P:D split of 16 nodes (speed {SPLIT_SPEED:g}, "
        f"TTFT ≤ 10 s, TBT ≤ 100 ms, no refusals). Random over the rule: as in mean TTFT by policy. Refused: as in "
        f"overload "
        f"(speed {OVERLOAD_SPEED:g}, LLaMA2-70B, the papers' rule) under late, early and predicted.",
        columns=[
            "workers",
            "held",
            "mean TTFT, s",
            "p99 TBT, ms",
            f"random over the rule (paper: {PAPER_RATIO:.2f})",
            f"refused (paper: {' / '.join(f'{count:,}' for count in PAPER_REFUSED)} of 23,000)",
        ],
        rows=rows,
        why=[],
    )


def _row(context: Context, shape: Shape) -> list[str]:
    split = _run(context, shape, "halfmoon", "none", Objectives(ttft_ns=10 * S, tbt_ns=100 * MS), SPLIT_SPEED)
    cells = [
        shape.name,
        f"{split.effective_capacity:.3f}",
        f"{split.ttft_ms.mean / 1e3:.2f}",
        f"{split.tbt_ms.p99:.1f}",
    ]
    if not shape.in_tables:
        return [*cells, "–", "–"]
    wide = Objectives(ttft_ns=30 * S, tbt_ns=100 * MS)
    rule, chance = (_run(context, shape, name, "none", wide, 1.0) for name in ("mooncake", "random"))
    refused = [
        sum(_run(context, shape, "mooncake", admission, wide, OVERLOAD_SPEED, LLAMA2_A800).rejected.values())
        for admission in ADMISSIONS
    ]
    ratio = f"{chance.ttft_ms.mean / 1e3:.2f} / {rule.ttft_ms.mean / 1e3:.2f} = "
    ratio += f"{chance.ttft_ms.mean / rule.ttft_ms.mean:.2f}"
    return [*cells, ratio, " / ".join(str(count) for count in refused)]


def _run(
    context: Context,
    shape: Shape,
    policy: PolicyName,
    admission: AdmissionName,
    slo: Objectives,
    speed: float,
    profile: Profile = LLAMA3_A800,
) -> SimulationReport:
    return context.run(
        policy,
        admission,
        cluster=shape.cluster,
        slo=slo,
        speed=speed,
        elastic=shape.elastic,
        prefill_group=shape.prefill_group,
        profile=profile,
    )
