"""Leaderboard of selectors on one stream: regret per query and modelled speed-up, ordered, with intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from draftpool.analysis.tidy import main_stream, read_meta, read_tidy
from draftpool.figures import style

MARKERS = {"fixed drafter": "o", "learner": "s", "oracle": "D"}


def draw(stats: Path, out: Path) -> None:
    """Draw regret (left) and modelled speed-up (right); reads leaderboard and meta."""
    meta, rows = read_meta(stats), read_tidy(stats, "leaderboard")
    rows = rows[rows["scope"] == "all"]
    stream = main_stream(rows)
    rows = rows[(rows["stream"] == stream) & (rows["selector"] != "plain")]
    regret = rows[rows["metric"] == "regret"].sort_values("value", ascending=False).set_index("selector")
    speed = rows[rows["metric"] == "speedup"].set_index("selector").reindex(regret.index)
    at = np.arange(len(regret))
    figure, axes = style.panels(1, 2, 1.5 + 0.19 * len(regret), sharey=True)
    kinds = np.array([style.family(name) for name in regret.index])
    for panel, values in zip(axes[0], (regret, speed), strict=True):
        for kind in style.FAMILIES:
            own = kinds == kind
            if own.any():
                marker = MARKERS.get(kind, "^")
                style.draw_points(panel, at[own], values[own], style.FAMILIES[kind], marker, True, label=kind)
        panel.grid(axis="y", lw=0.4)
        panel.set_ylim(-0.7, len(regret) - 0.3)
    axes[0, 0].axvline(0, color="black", lw=0.8, ls="--")
    axes[0, 1].axvline(1, color="black", lw=0.8, ls="--")
    axes[0, 0].set_yticks(at, [style.selector_label(name, meta["generalist"]) for name in regret.index])
    axes[0, 0].set_xlabel("regret (rounds per query)")
    axes[0, 1].set_xlabel(f"modelled speed-up ({meta['costs_dtype']} costs)")
    note = (
        f"Exact replay, selector seeds averaged within a prompt. Bars: {style.percent(meta['confidence'])} bootstrap "
        f"intervals over {style.counts_text(regret['n'])} prompts. Dashed: best fixed drafter, plain decoding."
    )
    style.frame(figure, _message(regret, kinds, stream, meta["generalist"]), note, axes[0, 0], columns=5)
    style.save(figure, out)


def _message(regret: pd.DataFrame, kinds: np.ndarray, stream: str, generalist: str) -> str:
    learners = regret[kinds == "learner"]
    if not len(learners):
        return f"{stream.capitalize()} stream: regret of every choice"
    best = learners["value"].idxmin()
    alone = regret.loc[f"fixed:{generalist}", "value"] if f"fixed:{generalist}" in regret.index else np.nan
    return (
        f"{stream.capitalize()} stream: best learner {style.selector_label(best, generalist)} loses "
        f"{learners['value'].min():.2f} rounds a query, the generalist {alone:.2f}"
    )
