"""Pools of other kinds of drafters: modelled speed-up of every arm and of learners, a panel per pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from draftpool.analysis.tidy import read_meta, read_tidy, stream_of_pool
from draftpool.figures import style

LEARNERS = ["random", "exp3", "ucb_bd", "ucbspec", "hedgespec", "cost_ucb", "cost_hedge"]
MARKERS = {"fixed drafter": "o", "learner": "s"}


def draw(stats: Path, out: Path) -> None:
    """Draw speed-up over plain decoding on all held-out answers; reads leaderboard, gap and meta."""
    meta = read_meta(stats)
    board, gap = read_tidy(stats, "leaderboard"), read_tidy(stats, "gap")
    board = board[(board["scope"] == "all") & (board["metric"] == "speedup")]
    chosen = {
        pool["name"]: _chosen(board[board["stream"] == stream_of_pool(pool["name"])])
        for pool in meta["pools"]
        if (board["stream"] == stream_of_pool(pool["name"])).any()
    }
    longest = max(map(len, chosen.values()))
    lines = -(-len(chosen) // 2)
    figure, axes = style.panels(lines, 2, 1.2 + lines * (0.5 + 0.17 * longest))
    for panel in axes.flat[len(chosen) :]:
        panel.set_visible(False)
    shown = [pool for pool in meta["pools"] if pool["name"] in chosen]
    for panel, pool in zip(axes.flat, shown, strict=False):
        _panel(panel, chosen[pool["name"]], pool, gap)
    note = (
        "Exact replay on all held-out answers, priced by measured costs; selector seeds averaged within a prompt. "
        f"Bars: {style.percent(meta['confidence'])} bootstrap intervals over "
        f"{style.counts_text(pd.concat(chosen.values())['n'])} prompts. Lines: plain decoding (1), the generalist "
        "(dashed), the best fixed arm of every query (dotted)."
    )
    style.frame(figure, _message(meta, gap), note, axes.flat[0], columns=4)
    style.save(figure, out)


def _chosen(rows: pd.DataFrame) -> pd.DataFrame:
    """Fixed arms, fastest first, then learners."""
    rows = rows.set_index("selector")
    fixed = rows[rows.index.str.startswith("fixed:")].sort_values("value", ascending=False)
    return pd.concat([fixed, rows.loc[[name for name in LEARNERS if name in rows.index]]])


def _panel(panel, rows: pd.DataFrame, pool: dict, gap: pd.DataFrame) -> None:
    at = np.arange(len(rows))[::-1]
    kinds = np.array([style.family(name) for name in rows.index])
    for kind in dict.fromkeys(kinds):
        own = kinds == kind
        marker = MARKERS.get(kind, "^")
        style.draw_points(panel, at[own], rows[own], style.FAMILIES[kind], marker, True, label=kind)
    generalist = rows.loc[f"fixed:{pool['generalist']}", "value"]
    headroom = gap[
        (gap["pool"] == pool["name"])
        & (gap["stream"] == stream_of_pool(pool["name"]))
        & (gap["selector"] == "best_fixed_query")
    ]
    panel.axvline(1, color="black", lw=0.8)
    panel.axvline(generalist, color="black", lw=0.8, ls="--")
    if len(headroom):
        panel.axvline(generalist * (1 + headroom["value"].iloc[0]), color="black", lw=0.8, ls=":")
    panel.set_yticks(at, [style.selector_label(name, pool["generalist"]) for name in rows.index])
    panel.set_ylim(-0.7, len(rows) - 0.3)
    panel.grid(axis="y", lw=0.4)
    panel.set_title(f"{pool['name']} pool")
    panel.set_xlabel("modelled speed-up")


def _message(meta: dict, gap: pd.DataFrame) -> str:
    parts = []
    for pool in meta["pools"]:
        own = gap[
            (gap["pool"] == pool["name"])
            & (gap["stream"] == stream_of_pool(pool["name"]))
            & (gap["metric"] == "speed")
        ].set_index("selector")["value"]
        learners = own[[name for name in LEARNERS if name in own.index and name != "random"]]
        if len(learners):
            best = learners.idxmax()
            parts.append(
                f"{pool['name']} {style.selector_label(best)} {round(100 * learners[best]):+d} % "
                f"of {round(100 * own['best_fixed_query']):+d} %"
            )
    return "Tokens per second over the generalist's, best learner and best fixed arm per query: " + "; ".join(
        parts
    )
