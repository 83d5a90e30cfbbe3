"""Heat map of selectors x streams: target calls beyond those of the generalist, in per cent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns

from draftpool.analysis.tidy import of_main_pool, read_meta, read_tidy
from draftpool.data.streams import HELD_OUT
from draftpool.figures import style


def draw(stats: Path, out: Path) -> None:
    """Draw the relative difference in rounds of every selector on every stream; reads streams and meta."""
    meta, rows = read_meta(stats), read_tidy(stats, "streams")
    # Further pools have a generalist of their own and a figure of their own.
    rows = of_main_pool(rows[~rows["selector"].str.startswith("fixed:")], meta)
    grid = 100 * rows.pivot(index="selector", columns="stream", values="value")
    first = [name for name in (HELD_OUT, "mixed") if name in grid]
    grid = grid[first + [name for name in grid if name not in first]].sort_values(first[0])
    figure, axes = style.panels(
        1, 2, max(2.6, 1.7 + 0.19 * len(grid)), width_ratios=[len(grid.columns), 0.25]
    )
    heat, scale = axes[0]
    span = float(np.nanmax(np.abs(grid.to_numpy())))
    sns.heatmap(
        grid,
        ax=heat,
        cbar_ax=scale,
        annot=True,
        fmt="+.1f",
        annot_kws={"fontsize": 7},
        cmap="RdBu_r",
        vmin=-span,
        vmax=span,
        linewidths=0.5,
        cbar_kws={"label": "target calls against the generalist (%)"},
    )
    style.readable_cells(heat)
    heat.set_yticks(
        np.arange(len(grid)) + 0.5, [style.selector_label(name) for name in grid.index], rotation=0
    )
    counts = rows.groupby("stream")["n"].first()
    names = [f"{name.replace('_', ' ')} ({counts[name]})" for name in grid]
    heat.set_xticks(
        np.arange(len(grid.columns)) + 0.5, names, rotation=30, ha="right", rotation_mode="anchor"
    )
    heat.tick_params(length=0)
    heat.set(xlabel="", ylabel="")
    note = (
        "Exact replay, selector seeds averaged within a prompt; below 0: fewer target calls than the generalist. In "
        f"brackets: prompts or sessions. {style.percent(meta['confidence'])} intervals over them: "
        f"{style.half_width(rows, 100, 1)} percentage points."
    )
    style.frame(figure, _message(rows), note)
    style.save(figure, out)


def _message(rows: pd.DataFrame) -> str:
    found = []
    for name in ("hedgespec", "ucb_bd", "router_tfidf"):
        own = rows[rows["selector"] == name]
        if len(own):
            better = int((own["high"] < 0).sum())
            found.append(f"{style.selector_label(name)} on {better}")
    if not found:
        return "Target calls of every selector against the generalist, stream by stream"
    return f"Clearly fewer target calls than the generalist, of {rows['stream'].nunique()} streams: {', '.join(found)}"
