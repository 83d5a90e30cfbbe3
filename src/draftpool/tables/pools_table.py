"""Pools of other kinds of drafters, like the tables of MetaSD and BanditSpec: every arm and learner by domain."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.analysis.tidy import read_meta, read_tidy, stream_of_pool
from draftpool.tables.common import note
from draftpool.tables.writer import interval_text, write_all


def write(stats: Path, out: Path) -> None:
    """Write a row per pool and method, fastest first; reads leaderboard, gap and meta."""
    meta, board, gap = read_meta(stats), read_tidy(stats, "leaderboard"), read_tidy(stats, "gap")
    table = []
    for pool in meta["pools"]:
        stream = stream_of_pool(pool["name"])
        own = board[board["stream"] == stream]
        closed = gap[(gap["pool"] == pool["name"]) & (gap["stream"] == stream) & (gap["metric"] == "closed")]
        closed = closed.set_index("selector")
        if own.empty:
            continue
        total = own[(own["scope"] == "all") & (own["metric"] == "speedup")]
        for selector in total.sort_values("value", ascending=False)["selector"]:
            rows = own[own["selector"] == selector].set_index(["metric", "scope"])
            row = {"pool": pool["name"], "method": selector}
            for scope in [*meta["domains"], "all"]:
                found = ("speedup", scope) in rows.index
                row[scope] = interval_text(rows.loc[("speedup", scope)]) if found else None
            row["MAT"] = interval_text(rows.loc[("mat", "all")])
            row["regret (rounds/query)"] = interval_text(rows.loc[("regret", "all")])
            known = selector in closed.index
            row["gap closed"] = interval_text(closed.loc[selector]) if known else None
            table.append(row | {"n": int(rows.loc[("mat", "all"), "n"])})
    text = (
        "All held-out answers, exact replay, seeds averaged within a prompt. Domains and all: modelled speed-up over "
        f"plain decoding ({meta['costs_dtype']} costs). Gap closed: share of the distance in tokens per second between "
        "the generalist and the best fixed arm of every query (plain decoding included)."
    )
    write_all(pd.DataFrame(table), out, note(meta, text))
