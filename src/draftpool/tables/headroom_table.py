"""Headroom: what the best choice of drafters would gain over the generalist, per stream."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.analysis.tidy import read_meta, read_tidy
from draftpool.tables.common import note
from draftpool.tables.writer import interval_text, write_all

WORDS = {
    "generalist": "generalist throughout",
    "best_fixed_stream": "best fixed drafter of the stream",
    "best_fixed_query": "best fixed drafter of each query",
    "best_switching": "best switching sequence",
}


def write(stats: Path, out: Path) -> None:
    """Write one row per stream and oracle; reads headroom and meta."""
    meta, rows = read_meta(stats), read_tidy(stats, "headroom")
    table = []
    for stream in rows["stream"].unique():
        for oracle, words in WORDS.items():
            own = rows[(rows["stream"] == stream) & (rows["oracle"] == oracle)].set_index("metric")
            gain = own.loc["headroom"] if "headroom" in own.index else None
            percent = (
                None if gain is None else interval_text(gain[["value", "low", "high"]] * 100, 1, signed=True)
            )
            arm = own["arm"].iloc[0]
            table.append(
                {
                    "stream": stream,
                    "choice": words,
                    "drafter": arm if isinstance(arm, str) else None,
                    "tau": interval_text(own.loc["tau"]),
                    "headroom (%)": percent,
                    "n": int(own["n"].iloc[0]),
                }
            )
    text = (
        "tau: tokens per target call. Headroom: relative gain in tau over the generalist; "
        "choices are made in hindsight."
    )
    write_all(pd.DataFrame(table), out, note(meta, text))
