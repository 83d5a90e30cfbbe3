"""Where a round's time goes under the profiler: operators part by part, and Python around them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftpool.analysis.tidy import read_meta, read_tidy
from draftpool.figures import style

PARTS = ("verify", "draft", "evaluate", "switch", "select", "commit")


def draw(stats: Path, out: Path) -> None:
    """Draw a stacked bar per method; reads profile and meta.

    Raises:
        DraftpoolError: If nothing was profiled.
    """
    meta, rows = read_meta(stats), read_tidy(stats, "profile")
    per_round = 1000 / rows.groupby("method")["rounds"].first()
    grid = rows.pivot(index="method", columns="part", values="operator_seconds").reindex(columns=list(PARTS))
    grid["Python"] = rows.groupby("method")["python_seconds"].sum()
    grid = grid.fillna(0.0).mul(per_round, axis=0)
    grid = grid.loc[grid.sum(axis=1).sort_values(ascending=False).index]
    at, begin = np.arange(len(grid)), np.zeros(len(grid))
    figure, axes = style.panels(1, 1, 1.5 + 0.28 * len(grid))
    plot = axes[0, 0]
    for number, part in enumerate(grid.columns):
        colour = style.GREY if part == "Python" else style.COLOURS[number]
        plot.barh(at, grid[part], left=begin, height=0.7, color=colour, label=part, lw=0)
        begin = begin + grid[part].to_numpy()
    plot.set_yticks(at, [style.selector_label(name, meta["generalist"]) for name in grid.index])
    plot.set_ylim(-0.6, len(grid) - 0.4)
    dtype = rows["dtype"].iloc[0]
    plot.set_xlabel(f"time of a round (ms, {dtype}, profiler on)")
    shares = grid["Python"] / grid.sum(axis=1)
    note = (
        "One answer per method; no intervals. Python: what is left of a part outside its operators, dispatch and the "
        "profiler's own cost included, so the timed figures are lower. Switch: drafter prefill and catch-up."
    )
    low, high = style.percent(shares.min()), style.percent(shares.max())
    title = f"Python takes {low if low == high else f'{low} to {high}'} of a profiled round"
    style.frame(figure, title, note, plot, columns=7)
    style.save(figure, out)
