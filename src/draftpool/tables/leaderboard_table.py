"""The leaderboard: every selector on every stream, replayed exactly and priced by measured costs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.analysis.tidy import read_meta, read_tidy
from draftpool.tables.common import note
from draftpool.tables.writer import interval_text, write_all

COLUMNS = {
    "mat": ("MAT", 2),
    "speedup": ("speed-up, modelled", 2),
    "speedup_free": ("... evaluation free", 2),
    "regret": ("regret (rounds/query)", 2),
    "regret_switching": ("... to best switching", 2),
    "best_arm_rate": ("best-arm rate", 2),
    "switches": ("switches/query", 1),
    "evaluated": ("rounds evaluated", 2),
}


def write(stats: Path, out: Path) -> None:
    """Write one row per stream and selector, lowest regret first; reads leaderboard, prediction and meta."""
    meta, rows = read_meta(stats), read_tidy(stats, "leaderboard")
    rows = rows[rows["scope"] == "all"]
    live = {}
    if (stats / "selectors.csv").exists():
        speeds = read_tidy(stats, "selectors")
        speeds = speeds[
            (speeds["metric"] == "speedup")
            & (speeds["scope"] == "all")
            & (speeds["dtype"] == meta["timed_dtype"])
        ]
        live = {(row["stream"], row["selector"]): interval_text(row) for _, row in speeds.iterrows()}
    table = []
    for stream in rows["stream"].unique():
        own = rows[rows["stream"] == stream]
        order = own[own["metric"] == "regret"].sort_values("value", kind="stable")["selector"]
        for selector in order:
            values = own[own["selector"] == selector].set_index("metric")
            row = {"stream": stream, "selector": selector}
            for metric, (head, digits) in COLUMNS.items():
                row[head] = interval_text(values.loc[metric], digits) if metric in values.index else None
            row["speed-up, live"] = live.get((stream, selector))
            table.append(row | {"n": int(values["n"].iloc[0])})
    text = (
        "Seeds are averaged within a prompt. MAT: tokens per target call. Speed-ups over plain decoding; modelled: "
        "from rounds and measured costs. Regret: against the query's best fixed drafter, and against the best "
        "switching sequence."
    )
    write_all(pd.DataFrame(table), out, note(meta, text))
