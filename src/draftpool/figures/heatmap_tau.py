"""Heat map of tau: drafters x domains, specialists' home cells outlined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns

from draftpool.analysis.tidy import read_drafters, read_meta, read_tidy
from draftpool.figures import style

ROLES = ["generalist", "specialist", "sweep", "untrained"]


def draw(stats: Path, out: Path) -> None:
    """Draw tau of every drafter run on every domain; reads tau, drafters, specialists (if any) and meta.

    Raises:
        DraftpoolError: If the statistics are missing.
    """
    meta, drafters, taus = read_meta(stats), read_drafters(stats), read_tidy(stats, "tau")
    taus = taus[(taus["level"] == "run") & (taus["metric"] == "tau")]
    columns = [name for name in meta["domains"] if name in set(taus["scope"])] + ["mean"]
    kinds = list(dict.fromkeys(drafters["kind"]))
    rank = drafters["role"].map(ROLES.index) + len(ROLES) * drafters["kind"].map(kinds.index)
    order = drafters.assign(rank=rank).sort_values("rank", kind="stable")
    grid = taus.pivot(index="drafter", columns="scope", values="value").loc[order["drafter"], columns]

    height = max(2.4, 1.3 + 0.21 * len(grid))
    figure, axes = style.panels(1, 2, height, width_ratios=[len(columns), 0.25])
    heat, scale = axes[0]
    sns.heatmap(
        grid,
        ax=heat,
        cbar_ax=scale,
        annot=True,
        fmt=".2f",
        annot_kws={"fontsize": 7.5},
        cmap=style.SEQUENTIAL,
        vmin=1.0,
        linewidths=0.5,
        cbar_kws={"label": "tau (tokens per target call)"},
    )
    style.readable_cells(heat)
    homes = order["home"].to_list()
    for row, home in enumerate(homes):
        if home in columns:
            style.outline(heat, columns.index(home), row)
    heat.axvline(len(columns) - 1, color="white", lw=4)
    for row in np.flatnonzero(np.diff(order["rank"])) + 1:
        heat.axhline(row, color="white", lw=4)
    heat.set_yticks(np.arange(len(grid)) + 0.5, [style.run_label(name) for name in grid.index], rotation=0)
    heat.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=0)
    heat.tick_params(length=0)
    heat.set(xlabel="domain", ylabel="")
    cells = taus[taus["scope"] != "mean"]
    outlined = "Outlined: a specialist's own domain. " if any(home in columns for home in homes) else ""
    clearly = "Clearly: the interval of the difference lies above 0." if outlined else ""
    note = (
        f"{outlined}{style.counts_text(cells['n'])} held-out prompts per cell; "
        f"{style.percent(meta['confidence'])} intervals: {style.half_width(cells)}. "
        f"{clearly}"
    )
    style.frame(figure, _message(stats, grid), note)
    style.save(figure, out)


def _message(stats: Path, grid: pd.DataFrame) -> str:
    if not (Path(stats) / "specialists.csv").is_file():
        means = grid["mean"]
        return f"Mean tau runs from {means.min():.2f} to {means.max():.2f} over {len(grid)} drafters"
    rows = read_tidy(stats, "specialists")
    home, abroad = rows[rows["scope"] == "home"], rows[rows["scope"] == "abroad"]
    better = [f"{int((side['low'] > 0).sum())} of {len(side)}" for side in (home, abroad)]
    return f"Specialists clearly beating the generalist: at home {better[0]}, abroad {better[1]}"
