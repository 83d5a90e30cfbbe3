"""Training dynamics: how sure the drafter is of each slot, and how much its objective weighs the slot."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap

from draftpool.analysis.tidy import read_drafters, read_tidy
from draftpool.figures import style
from draftpool.figures.objectives import compared_recipes, recipe_label

PER_ROW = 4


def draw(stats: Path, out: Path) -> None:
    """Draw confidence and weight share per slot and objective; reads training_dynamics and drafters.

    Raises:
        DraftpoolError: If the statistics are missing.
    """
    drafters, dynamics = read_drafters(stats), read_tidy(stats, "training_dynamics")
    chosen = compared_recipes(drafters)
    runs = drafters[drafters["recipe"].isin(chosen["recipe"])]
    merged = dynamics.merge(runs[["drafter", "recipe"]], on="drafter")
    grouped = merged.groupby(["recipe", "step", "slot"])[["confidence", "weight_share"]]
    means, lows, highs = (getattr(grouped, name)().reset_index() for name in ("mean", "min", "max"))
    for metric in ("confidence", "weight_share"):
        means[f"{metric}_low"], means[f"{metric}_high"] = lows[metric], highs[metric]
    slots = int(means["slot"].max())
    # Viridis without its yellow end, which is too pale for lines on white.
    colours = ListedColormap(mpl.colormaps["viridis"](np.linspace(0, 0.82, slots)))
    columns = min(PER_ROW, len(chosen))
    bands = -(-len(chosen) // columns)
    figure, axes = style.panels(2 * bands, columns, 3.4 * bands + 0.5, sharey="none")
    for panel in axes.flat:
        panel.set_visible(False)
    for number, (_, recipe) in enumerate(chosen.iterrows()):
        band, column = divmod(number, columns)
        for offset, metric in enumerate(("confidence", "weight_share")):
            panel = axes[2 * band + offset, column]
            _lines(panel, means[means["recipe"] == recipe["recipe"]], metric, colours)
            panel.set_ylim(0, 1.05 * means[metric].max())
            if column:
                panel.tick_params(labelleft=False)
            else:
                panel.set_ylabel(
                    "confidence in the\ntrue token" if offset == 0 else "share of the\nloss weight"
                )
            if offset == 0:
                panel.set_title(recipe_label(recipe, chosen).replace(", ", ",\n"), fontsize=8)
                panel.tick_params(labelbottom=False)
            else:
                panel.set_xlabel("training step")
    norm = BoundaryNorm(np.arange(slots + 1) + 0.5, slots)
    ticks = list(range(1, slots + 1, max(1, slots // 8)))
    figure.colorbar(
        ScalarMappable(norm, colours), ax=axes, label="draft slot", ticks=ticks, aspect=40, pad=0.01
    )
    seeds = style.counts_text(chosen["seeds"]).replace("n =", "seeds averaged:")
    style.frame(
        figure,
        _message(means, chosen),
        f"Means over the anchors of each step, then over spans of steps; {seeds}; bands: range over seeds.",
    )
    style.save(figure, out)


def _lines(panel: Axes, rows: pd.DataFrame, metric: str, colours: ListedColormap) -> None:
    panel.set_visible(True)
    for slot, line in rows.groupby("slot"):
        colour = colours.colors[int(slot) - 1]
        panel.fill_between(
            line["step"], line[f"{metric}_low"], line[f"{metric}_high"], color=colour, alpha=0.2, lw=0
        )
        panel.plot(line["step"], line[metric], color=colour, lw=1.2)


def _message(means: pd.DataFrame, chosen: pd.DataFrame) -> str:
    parts = []
    for kind in ("dpace", "dflash"):
        recipe = chosen.loc[chosen["objective"] == kind, "recipe"]
        if len(recipe):
            first = means[(means["recipe"] == recipe.iloc[0]) & (means["slot"] == 1)].sort_values("step")
            start, end = first["weight_share"].iloc[0], first["weight_share"].iloc[-1]
            parts.append(f"{style.objective_label(kind)} {start * 100:.0f} to {end * 100:.0f} %")
    return (
        "Weight on slot 1 from first to last step: " + ", ".join(parts)
        if parts
        else "Confidence and weight per slot"
    )
