"""Reports of the papers' systems: of decode alone too, which are compared by its throughput."""

from __future__ import annotations

import msgspec

from halfmoon.cli.simulation import simulate
from halfmoon.conductor.simulation.report import SimulationReport


class PoolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Decode's throughput while requests wait for room, of systems that are compared by it."""

    #: Mean number of sequences that run.
    batch: float
    tokens_s: float
    #: Time of a step, as its sequences see it.
    step_ms: float
    dollars_hour: float = 0.0
    tokens_per_dollar: float = 0.0
    #: Room of the KVCache, all devices together.
    kv_tokens: int = 0


class DecodeReport(SimulationReport, kw_only=True):
    """Of a system without prefill."""

    pools: PoolFigures


#: What is said of a system without prefill, beside the figures of its pools.
DECODE_ROWS = ("requests", "still open", "rejected", "TTFT ms", "TBT ms", "goodput", "moved", "decisions")


def table(report: SimulationReport) -> str:
    """For a person."""
    rows = simulate.rows(report)
    if isinstance(report, DecodeReport):
        kept = [(name, text) for name, text in rows if name in DECODE_ROWS]
        return simulate.as_text(report, "decode alone", [*kept[:-2], *_pools(report.pools), *kept[-2:]])
    return simulate.as_text(
        report, f"{report.setting.prefill + report.setting.decode} colocated workers", rows
    )


def _pools(pools: PoolFigures) -> list[tuple[str, str]]:
    rows = [
        ("batch", f"{pools.batch:.1f} sequences; room for {pools.kv_tokens:,} tokens"),
        ("throughput", f"{pools.tokens_s:.1f} tokens/s, a step of {pools.step_ms:.1f} ms"),
    ]
    if pools.dollars_hour:
        rows.append(
            ("price", f"${pools.dollars_hour:.2f} an hour, {pools.tokens_per_dollar:,.0f} tokens a dollar")
        )
    return rows
