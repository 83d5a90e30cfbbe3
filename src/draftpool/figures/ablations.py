"""Ablations: mean tau along each swept axis (alpha, block size, layers, reduction), with intervals."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from draftpool.analysis.tidy import read_meta, read_tidy, recipe_rows
from draftpool.errors import DraftpoolError
from draftpool.figures import style

AXES = {
    "alpha": "smoothing alpha",
    "block_size": "block size (tokens)",
    "n_layers": "draft layers",
    "reduction": "loss reduction",
}
SHORT = {"alpha": "Alpha", "block_size": "Block", "n_layers": "Layers", "reduction": "Reduction"}
REDUCTIONS = ["anchor_mean", "weight_mean", "sequence_sum", "published"]


def series(recipes: pd.DataFrame, axis: str) -> dict[str, pd.DataFrame]:
    """Recipes that differ along one axis only: one table per objective, in order of the axis.

    Members of the sweep are joined by every recipe with the same objective and other settings, so that the
    base of the sweep stands in the line without being trained again.
    """
    rest = [name for name in (*AXES, "steps") if name != axis]
    known = recipes[recipes["home"].isna() & recipes[axis].notna()]
    found = {}
    for key, group in known.groupby(["objective", *rest], dropna=False):
        group = group.sort_values("group", key=lambda own: own != axis, kind="stable").drop_duplicates(axis)
        if (group["group"] == axis).any() and len(group) > 1:
            found.setdefault(key[0], group.sort_values(axis))
    return found


def draw(stats: Path, out: Path) -> None:
    """Draw one panel per swept axis, one line per objective; reads tau, drafters and meta.

    Raises:
        DraftpoolError: If nothing was swept.
    """
    meta, taus = read_meta(stats), read_tidy(stats, "tau")
    recipes = recipe_rows(read_tidy(stats, "drafters"))
    taus = taus[(taus["level"] == "recipe") & (taus["metric"] == "tau") & (taus["scope"] == "mean")]
    found = {axis: series(recipes, axis) for axis in AXES}
    found = {axis: lines for axis, lines in found.items() if lines}
    if not found:
        raise DraftpoolError(
            "no axis was swept", str(stats), "name sweeps' groups alpha, block_size, n_layers or reduction"
        )
    objectives = list(dict.fromkeys(kind for lines in found.values() for kind in lines))
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    figure, axes = style.panels(
        rows, columns, 2.3 * rows + 0.7, width=style.WIDTH if columns > 1 else 4.5, sharey=True
    )
    shown = []
    for panel, (axis, lines) in zip(axes.flat, found.items(), strict=False):
        levels = sorted(
            set(pd.concat(lines.values())[axis]), key=REDUCTIONS.index if axis == "reduction" else None
        )
        for kind, members in lines.items():
            values = members.merge(taus, left_on="recipe", right_on="drafter")
            values["level"] = values[axis].map(levels.index)
            values = values.sort_values("level")
            shown.append(values)
            _line(panel, values, levels, objectives.index(kind), len(objectives), style.objective_label(kind))
        names = (
            [str(level).replace("_", "\n") for level in levels]
            if axis == "reduction"
            else [f"{level:g}" for level in levels]
        )
        panel.set_xticks(range(len(levels)), names)
        panel.set_xlim(-0.5, len(levels) - 0.5)
        panel.set(xlabel=AXES[axis], title=_highest(axis, lines, taus))
        panel.grid(axis="y", lw=0.4)
    for panel in axes.flat[len(found) :]:
        panel.set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("mean tau over domains\n(tokens per target call)")
    fullest = max(axes.flat, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    note = (
        f"Levels are evenly spaced. Bars: {style.percent(meta['confidence'])} bootstrap intervals over "
        f"{style.counts_text(pd.concat(shown)['n'])} prompts; training seeds averaged within a prompt."
    )
    lowest, highest = pd.concat(shown)["value"].min(), pd.concat(shown)["value"].max()
    style.frame(figure, f"Mean tau from {lowest:.2f} to {highest:.2f} over the swept settings", note, fullest)
    style.save(figure, out)


def _line(panel: Axes, values: pd.DataFrame, levels: list, number: int, of: int, label: str) -> None:
    at = values["level"] + (number - (of - 1) / 2) * 0.03 * len(levels)
    panel.plot(at, values["value"], color=style.COLOURS[number], lw=0.8)
    style.draw_points(panel, at, values, style.COLOURS[number], style.MARKERS[number], label=label)


def _highest(axis: str, lines: dict[str, pd.DataFrame], taus: pd.DataFrame) -> str:
    members = pd.concat(lines.values()).merge(taus, left_on="recipe", right_on="drafter")
    best = members.loc[members["value"].idxmax()]
    level = str(best[axis]).replace("_", " ") if axis == "reduction" else f"{best[axis]:g}"
    return f"{SHORT[axis]}: highest at {level}"
