"""Plots of one simulation, with matplotlib, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.report import SimulationReport

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZE = (8.0, 4.5)
#: PNG files without the date and version that matplotlib would write into them: equal runs give equal files.
METADATA = {"Software": None}


def save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata=METADATA)
    plt.close(figure)
    return path


def plot_run(folder: Path, report: SimulationReport, outcomes: Mapping[str, Outcome]) -> list[Path]:
    """Distributions of TTFT and TBT, load of both pools over time, and hit rate over time."""
    finished = [outcome for outcome in outcomes.values() if outcome.end == "finished"]
    ttft_s = sorted(outcome.ttft_ns / 1e9 for outcome in finished)
    tbt_ms = sorted(outcome.tbt_ns / 1e6 for outcome in finished if outcome.output_tokens > 1)
    return [
        distributions(folder / "ttft_tbt.png", report, ttft_s, tbt_ms),
        loads(folder / "load.png", {f"{report.setting.system}, policy {report.setting.policy}": report}),
        hits(folder / "hit_rate.png", outcomes),
    ]


def distributions(
    path: Path, report: SimulationReport, ttft_s: Sequence[float], tbt_ms: Sequence[float]
) -> Path:
    """Share of requests at or below each time."""
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.0))
    limits = (report.slo.ttft_ns / 1e9, report.slo.tbt_ns / 1e6)
    for axis, values, limit, label in (
        (axes[0], ttft_s, limits[0], "time to first token, s"),
        (axes[1], tbt_ms, limits[1], "time between tokens, ms"),
    ):
        if values:
            axis.plot(values, [(place + 1) / len(values) for place in range(len(values))], color="C0")
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
        axis.axvline(limit, color="C3", linestyle="--", linewidth=1, label=f"SLO {limit:g}")
        axis.axhline(0.9, color="grey", linewidth=0.5)
        axis.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02))
        axis.legend(loc="upper left", bbox_to_anchor=(0.0, 0.88), frameon=False)
    finished = f"{report.endings.completed} of {report.endings.requests} requests finished"
    figure.suptitle(f"{report.setting.system}, policy {report.setting.policy}: {finished}")
    return save(figure, path)


def loads(path: Path, reports: Mapping[str, SimulationReport]) -> Path:
    """Predicted TTFT and TBT over their SLOs, one panel for each run, both pools in it."""
    figure, axes = plt.subplots(
        len(reports), 1, figsize=(SIZE[0], 1.2 + 2.4 * len(reports)), sharex=True, squeeze=False
    )
    for axis, (title, report) in zip(axes[:, 0], reports.items(), strict=True):
        minutes = [sample.at_ns / 60e9 for sample in report.load]
        axis.plot(minutes, [sample.prefill_load for sample in report.load], label="prefill: queue / TTFT SLO")
        axis.plot(minutes, [sample.decode_load for sample in report.load], label="decode: step / TBT SLO")
        axis.axhline(1.0, color="C3", linestyle="--", linewidth=1)
        axis.set(ylabel="load", title=title, ylim=(0, 1.35 * max(1.0, *_peaks(report))))
        axis.legend(loc="upper right", frameon=False, ncols=2)
    axes[-1, 0].set_xlabel("minutes")
    return save(figure, path)


def _peaks(report: SimulationReport) -> tuple[float, float]:
    """The highest load of each pool."""
    if not report.load:
        return 0.0, 0.0
    return max(sample.prefill_load for sample in report.load), max(
        sample.decode_load for sample in report.load
    )


def hits(path: Path, outcomes: Mapping[str, Outcome], windows: int = 60) -> Path:
    """Share of prompt tokens found on the worker's node and on others, by time of arrival."""
    computed = [outcome for outcome in outcomes.values() if outcome.compute_ns]
    figure, axis = plt.subplots(figsize=SIZE)
    if computed:
        first, last = computed[0].arrived_ns, max(outcome.arrived_ns for outcome in computed)
        width = max(1, (last - first) // windows + 1)
        sums = [[0, 0, 0] for _ in range(windows)]
        for outcome in computed:
            window = sums[(outcome.arrived_ns - first) // width]
            window[0] += outcome.prompt_tokens
            window[1] += outcome.local_tokens
            window[2] += outcome.fetched_tokens
        minutes = [(first + (place + 0.5) * width) / 60e9 for place in range(windows)]
        local = [window[1] / max(1, window[0]) for window in sums]
        fetched = [window[2] / max(1, window[0]) for window in sums]
        axis.stackplot(
            minutes, local, fetched, labels=["on the worker's node", "fetched from another"], alpha=0.8
        )
        axis.legend(loc="upper left", frameon=False)
    axis.set(xlabel="minutes", ylabel="share of prompt tokens reused", ylim=(0, 1))
    return save(figure, path)
