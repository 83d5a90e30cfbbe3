"""Objectives compared at equal budget: tau per domain and mean, with intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from draftpool.analysis.tidy import read_drafters, read_meta, read_tidy, recipe_rows
from draftpool.errors import DraftpoolError
from draftpool.figures import style


def compared_recipes(drafters: pd.DataFrame) -> pd.DataFrame:
    """Recipes of an objectives figure: generalists and the sweep over objectives, D-PACE and DFlash first."""
    # Objectives of block drafters; the other kinds have one each.
    recipes = recipe_rows(drafters[drafters["kind"] == "block"])
    chosen = recipes[(recipes["role"] == "generalist") | recipes["group"].isin(["objective", "objectives"])]
    if chosen.empty:
        raise DraftpoolError(
            "no generalist and no objective sweep to compare",
            "drafters.csv",
            "do not ask for this figure here",
        )
    first = ~chosen["objective"].isin(["dpace", "dflash"])
    return chosen.assign(first=first).sort_values(["steps", "first"], kind="stable").drop(columns="first")


def recipe_label(recipe: pd.Series, chosen: pd.DataFrame) -> str:
    """Objective of a recipe; with its steps where one objective was trained for several budgets."""
    label = style.objective_label(recipe["objective"])
    same = chosen[chosen["objective"] == recipe["objective"]]
    return f"{label}, {recipe['steps']:,} steps" if same["steps"].nunique() > 1 else label


def draw(stats: Path, out: Path) -> None:
    """Draw tau of every compared recipe by domain; reads tau, drafters, compare (if any) and meta.

    Raises:
        DraftpoolError: If the statistics are missing.
    """
    meta, taus = read_meta(stats), read_tidy(stats, "tau")
    chosen = compared_recipes(read_drafters(stats))
    taus = taus[(taus["level"] == "recipe") & (taus["metric"] == "tau")].set_index("scope")
    scopes = [name for name in meta["domains"] if name in taus.index] + ["mean"]
    # The mean stands apart from the domains it sums up.
    at = np.arange(len(scopes)) + 0.35 * (np.array(scopes) == "mean")
    figure, axes = style.panels(1, 1, 3.3 + 0.17 * (len(chosen) // 3))
    plot = axes[0, 0]
    step = min(0.14, 0.8 / len(chosen))
    for number, (_, recipe) in enumerate(chosen.iterrows()):
        rows = taus[taus["drafter"] == recipe["recipe"]].reindex(scopes)
        seeds = f" ({recipe['seeds']} seed{'s' * (recipe['seeds'] > 1)})"
        style.draw_points(
            plot,
            at + (number - (len(chosen) - 1) / 2) * step,
            rows,
            style.COLOURS[number % len(style.COLOURS)],
            style.MARKERS[number % len(style.MARKERS)],
            label=recipe_label(recipe, chosen) + seeds,
        )
    plot.axvspan(at[-1] - 0.6, at[-1] + 0.6, color="#F0F0F0", zorder=0)
    plot.set_xticks(at, scopes)
    plot.set_xlim(-0.6, at[-1] + 0.6)
    plot.set_ylim(bottom=min(1.0, plot.get_ylim()[0]))
    plot.set(xlabel="domain", ylabel="tau (tokens per target call)")
    plot.grid(axis="y", lw=0.4)
    domain, mean = taus[taus.index != "mean"], taus.loc[["mean"]]
    note = (
        f"Bars: {style.percent(meta['confidence'])} bootstrap intervals over prompts; "
        f"{style.counts_text(domain['n'])} per domain, {style.counts_text(mean['n'])} for the mean. "
        f"Training seeds averaged within a prompt."
    )
    style.frame(figure, _message(stats), note, plot)
    style.save(figure, out)


def _message(stats: Path) -> str:
    if not (Path(stats) / "compare.csv").is_file():
        return "tau by training objective"
    rows = read_tidy(stats, "compare")
    row = rows[rows["scope"] == "mean"].iloc[0]
    return (
        f"Mean tau, {style.run_label(row['a'])} minus {style.run_label(row['b'])}: {row['value']:+.3f} "
        f"{style.brackets(row, '+', 3)}"
    )
