"""Where decode time goes: milliseconds per token of every selector, part by part."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftpool.analysis.tidy import main_stream, read_meta, read_tidy
from draftpool.figures import style

PARTS = ("verify", "draft", "evaluate", "switch", "select", "commit")


def draw(stats: Path, out: Path) -> None:
    """Draw a stacked bar per selector, the total with its interval; reads time_split, selectors and meta.

    Raises:
        DraftpoolError: If there was no live decoding.
    """
    meta, rows = read_meta(stats), read_tidy(stats, "time_split")
    stream = main_stream(rows)
    rows = rows[(rows["stream"] == stream) & (rows["dtype"] == meta["timed_dtype"])]
    grid = rows.pivot(index="selector", columns="part", values="value")[list(PARTS)]
    grid = grid.loc[grid.sum(axis=1).sort_values(ascending=False).index]
    at = np.arange(len(grid))
    figure, axes = style.panels(1, 1, 1.4 + 0.2 * len(grid))
    plot = axes[0, 0]
    begin = np.zeros(len(grid))
    for part, colour in zip(PARTS, style.COLOURS[: len(PARTS)], strict=True):
        plot.barh(at, grid[part], left=begin, height=0.7, color=colour, label=part, lw=0)
        begin = begin + grid[part].to_numpy()
    speed = read_tidy(stats, "selectors")
    speed = speed[
        (speed["stream"] == stream)
        & (speed["dtype"] == meta["timed_dtype"])
        & (speed["metric"] == "tokens_per_s")
    ]
    speed = speed.set_index("selector").loc[grid.index]
    # Milliseconds per token are the inverse of tokens per second, so the bounds change places.
    per_token = 1000 / speed[["value", "low", "high"]].rename(columns={"low": "high", "high": "low"})
    style.draw_points(plot, at, per_token, "black", "|", horizontal=True)
    plot.set_yticks(at, [style.selector_label(name, meta["generalist"]) for name in grid.index])
    plot.set_ylim(-0.6, len(grid) - 0.4)
    plot.set_xlabel(f"decode time per token (ms, {meta['timed_dtype']})")
    share = float(rows[rows["selector"] != "plain"].groupby("part")["share"].mean()["draft"])
    note = (
        f"{stream.capitalize()} stream; lines on the totals: {style.percent(meta['confidence'])} bootstrap "
        f"intervals over {style.counts_text(rows['n'])} prompts. Switch: drafter prefill and catch-up."
    )
    style.frame(
        figure,
        f"Drafting takes {style.percent(share)} of decode time, averaged over selectors",
        note,
        plot,
        columns=6,
    )
    style.save(figure, out)
