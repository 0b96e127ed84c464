"""Plots that compare several simulations, as PNG files. Matplotlib is imported by the first: most who import an
experiment draw nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def curves(
    path: Path,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    level: float | None = None,
    dashed: str = "",
) -> Path:
    """Named lines through (x, y), on one pair of axes; `level` is drawn across, the line `dashed` so."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    from halfmoon.conductor.simulation.plots import SIZE, save

    figure, axis = plt.subplots(figsize=SIZE)
    for name, points in lines.items():
        style = "--" if name == dashed else "-"
        axis.plot([x for x, _ in points], [y for _, y in points], style, marker="o", markersize=4, label=name)
    if log_x:
        axis.set_xscale("log")
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axis.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
        axis.minorticks_off()
    if log_y:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        heights = [y for points in lines.values() for _, y in points]
        if max(heights) > 30 * min(heights):
            axis.yaxis.set_minor_formatter(NullFormatter())
        else:
            axis.yaxis.set_minor_formatter("{x:g}")
    else:
        highest = max((y for points in lines.values() for _, y in points), default=1.0)
        axis.set_ylim(0, 1.3 * highest)
    if level is not None:
        axis.axhline(level, color="grey", linestyle="--", linewidth=1)
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axis.grid(alpha=0.3)
    if len(lines) > 3:
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        axis.legend(frameon=False, loc="best")
    return save(figure, path)


def bars(
    path: Path,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    ylabel: str,
    title: str,
    level: float,
) -> Path:
    """Groups of bars, one group for each name, with a line across at `level`."""
    import matplotlib.pyplot as plt

    from halfmoon.conductor.simulation.plots import SIZE, save

    figure, axis = plt.subplots(figsize=(max(SIZE[0], 1.0 * len(names)), SIZE[1]))
    width = 0.8 / len(series)
    for place, (label, heights) in enumerate(series.items()):
        left = [at + (place - (len(series) - 1) / 2) * width for at in range(len(names))]
        axis.bar(left, heights, width, label=label)
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.axhline(level, color="grey", linestyle="--", linewidth=1)
    axis.set(ylabel=ylabel, title=title, ylim=(0, 1.25 * max(map(max, series.values()))))
    axis.legend(frameon=False, loc="upper left", ncols=len(series))
    return save(figure, path)
