"""Objectives and ablations: mean tau of every recipe, its spread over seeds and its paired comparisons."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.analysis.tidy import read_drafters, read_meta, read_tidy, recipe_rows
from draftpool.tables.common import note
from draftpool.tables.writer import interval_text, write_all


def write(stats: Path, out: Path) -> None:
    """Write a row per recipe but specialists; reads drafters, tau, tau_seeds, compare (if any) and meta."""
    meta, taus, spread = read_meta(stats), read_tidy(stats, "tau"), read_tidy(stats, "tau_seeds")
    recipes = recipe_rows(read_drafters(stats))
    taus = taus[
        (taus["level"] == "recipe") & (taus["metric"] == "tau") & (taus["scope"] == "mean")
    ].set_index("drafter")
    spread = spread[spread["scope"] == "mean"].set_index("recipe")
    pairs = read_tidy(stats, "compare") if (Path(stats) / "compare.csv").is_file() else None
    rows = []
    for recipe in recipes[(recipes["role"] != "specialist") & (recipes["kind"] == "block")].itertuples():
        seeds = spread.loc[recipe.recipe]
        row = {
            "recipe": recipe.recipe,
            "objective": recipe.objective,
            "alpha": None if pd.isna(recipe.alpha) else f"{recipe.alpha:g}",
            "reduction": recipe.reduction,
            "block": recipe.block_size,
            "layers": recipe.n_layers,
            "steps": recipe.steps,
            "seeds": recipe.seeds,
            "mean tau": interval_text(taus.loc[recipe.recipe], 3),
            "range over seeds": f"{seeds['min']:.3f} to {seeds['max']:.3f}" if recipe.seeds > 1 else None,
        }
        if pairs is not None:
            own = pairs[(pairs["a"] == recipe.recipe) & (pairs["scope"] == "mean")]
            row["difference"] = "; ".join(
                f"{interval_text(pair, 3, signed=True)} to {pair['b']}" for _, pair in own.iterrows()
            )
            row["p (Holm)"] = "; ".join(f"{p:.2g}" for p in own["p_holm"])
        rows.append(row)
    text = (
        f"Mean tau over domains, n = {int(taus['n'].max())} prompts, training seeds averaged within a "
        "prompt. Differences are paired by prompt; p: Wilcoxon signed-rank, Holm-adjusted over comparisons."
    )
    write_all(pd.DataFrame(rows).replace("", None), out, note(meta, text))
