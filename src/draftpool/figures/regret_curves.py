"""Stopping-time regret: summed over the stream's queries against rounds, and within a query over tokens."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from draftpool.analysis.tidy import main_stream, read_meta, read_tidy
from draftpool.figures import style


def draw(stats: Path, out: Path) -> None:
    """Draw cumulative regret and rounds lost over tokens; reads regret_cumulative, regret_tokens and meta.

    Raises:
        DraftpoolError: If there was no live decoding in float32.
    """
    meta = read_meta(stats)
    total, within = read_tidy(stats, "regret_cumulative"), read_tidy(stats, "regret_tokens")
    stream = main_stream(total)
    total, within = total[total["stream"] == stream], within[within["stream"] == stream]
    ends = total.sort_values("queries").groupby("selector")["value"].last().sort_values(ascending=False)
    figure, axes = style.panels(1, 2, 3.9)
    for number, selector in enumerate(ends.index):
        look = {
            "color": style.COLOURS[number % len(style.COLOURS)],
            "marker": style.MARKERS[number % len(style.MARKERS)],
        }
        label = style.selector_label(selector, meta["generalist"])
        _curve(axes[0, 0], total[total["selector"] == selector], "rounds", label, look)
        _curve(axes[0, 1], within[within["selector"] == selector], "tokens", label, look)
    axes[0, 0].set(
        xlabel="rounds used on the stream so far",
        ylabel="cumulative regret (rounds)",
        title="Summed over queries",
    )
    axes[0, 1].set(
        xlabel="tokens committed in the query",
        ylabel="rounds beyond the best fixed drafter",
        title="Within a query",
    )
    for panel in axes[0]:
        panel.axhline(0, color="black", lw=0.8, ls="--")
        panel.grid(lw=0.4)
    n = int(total["queries"].max())
    learners = [name for name in ends.index if style.family(name) == "learner"]
    message = "Rounds lost against the best fixed drafter of each query"
    if learners:
        best = learners[-1]
        message = (
            f"Lowest regret of a learner: {style.selector_label(best)}, {ends[best] / n:.2f} rounds per query"
        )
    note = (
        f"Stopping-time regret: rounds beyond those of the query's best fixed drafter. "
        f"{stream.capitalize()} stream, float32. Bands: {style.percent(meta['confidence'])} bootstrap "
        f"intervals over prompts; n = {n} queries (left), {style.counts_text(within['n'])} "
        "queries that long (right)."
    )
    style.frame(figure, message, note, axes[0, 0])
    style.save(figure, out)


def _curve(panel: Axes, rows: pd.DataFrame, x: str, label: str, look: dict) -> None:
    rows = rows.sort_values(x)
    panel.plot(rows[x], rows["value"], label=label, lw=1.3, ms=3.5, markevery=3, **look)
    panel.fill_between(
        rows[x],
        rows["low"].fillna(rows["value"]),
        rows["high"].fillna(rows["value"]),
        color=look["color"],
        alpha=0.15,
        lw=0,
    )
