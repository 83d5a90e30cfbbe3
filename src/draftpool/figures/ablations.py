"""Ablations: mean tau along each swept axis (alpha, block size, layers, reduction, clip), with intervals."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from draftpool.analysis.tidy import read_drafters, read_meta, read_tidy, recipe_rows
from draftpool.errors import DraftpoolError
from draftpool.figures import style

AXES = {
    "alpha": "smoothing alpha",
    "block_size": "block size (tokens)",
    "n_layers": "draft layers",
    "reduction": "loss reduction",
    "clip": "gradient norm limit",
}
SHORT = {
    "alpha": "Alpha",
    "block_size": "Block",
    "n_layers": "Layers",
    "reduction": "Reduction",
    "clip": "Clip",
}
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
    drafters = read_drafters(stats)
    recipes = recipe_rows(drafters)
    taus = taus[(taus["level"] == "run") & (taus["metric"] == "tau") & (taus["scope"] == "mean")]
    found = {
        axis: {kind: on_common_seeds(line, drafters, taus) for kind, line in series(recipes, axis).items()}
        for axis in AXES
    }
    found = {axis: lines for axis, lines in found.items() if lines}
    if not found:
        raise DraftpoolError("no axis was swept", str(stats), f"name sweeps' groups {', '.join(AXES)}")
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
        for kind, values in lines.items():
            values = values.assign(level=values[axis].map(levels.index)).sort_values("level")
            shown.append(values)
            _line(panel, values, levels, objectives.index(kind), len(objectives), style.objective_label(kind))
        panel.set_xticks(range(len(levels)), [_level(axis, level).replace(" ", "\n") for level in levels])
        panel.set_xlim(-0.5, len(levels) - 0.5)
        panel.set(xlabel=AXES[axis], title=_highest(axis, lines))
        panel.grid(axis="y", lw=0.4)
    for panel in axes.flat[len(found) :]:
        panel.set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("mean tau over domains\n(tokens per target call)")
    fullest = max(axes.flat, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    note = (
        f"Levels are evenly spaced. Bars: {style.percent(meta['confidence'])} bootstrap intervals over "
        f"{style.counts_text(pd.concat(shown)['n'])} prompts; only training seeds that all settings of a line share."
    )
    lowest, highest = pd.concat(shown)["value"].min(), pd.concat(shown)["value"].max()
    style.frame(figure, f"Mean tau from {lowest:.2f} to {highest:.2f} over the swept settings", note, fullest)
    style.save(figure, out)


def _line(panel: Axes, values: pd.DataFrame, levels: list, number: int, of: int, label: str) -> None:
    at = values["level"] + (number - (of - 1) / 2) * 0.03 * len(levels)
    panel.plot(at, values["value"], color=style.COLOURS[number], lw=0.8)
    style.draw_points(panel, at, values, style.COLOURS[number], style.MARKERS[number], label=label)


def on_common_seeds(line: pd.DataFrame, drafters: pd.DataFrame, taus: pd.DataFrame) -> pd.DataFrame:
    """Add value, low, high and n to the recipes of a line, over the training seeds that all of them have.

    Seeds differ more than most settings, so a setting trained with one seed is compared with that seed of the others.
    """
    members = drafters[drafters["recipe"].isin(line["recipe"])]
    seeds = set.intersection(*(set(own) for _, own in members.groupby("recipe")["seed"]))
    runs = members[members["seed"].isin(seeds)][["recipe", "drafter"]].merge(taus, on="drafter")
    means = runs.groupby("recipe", as_index=False).agg(
        value=("value", "mean"), low=("low", "mean"), high=("high", "mean"), n=("n", "min")
    )
    return line.merge(means, on="recipe")


def _level(axis: str, level: object) -> str:
    if axis == "reduction":
        return str(level).replace("_", " ")
    return "none" if level == float("inf") else f"{level:g}"


def _highest(axis: str, lines: dict[str, pd.DataFrame]) -> str:
    members = pd.concat(lines.values(), ignore_index=True)
    return f"{SHORT[axis]}: highest at {_level(axis, members.loc[members['value'].idxmax()][axis])}"
