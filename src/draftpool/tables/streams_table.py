"""Selectors x streams: target calls against the generalist, with intervals, and the headroom of each stream."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.analysis.tidy import of_main_pool, read_meta, read_tidy
from draftpool.tables.common import note
from draftpool.tables.writer import interval_text, write_all


def write(stats: Path, out: Path) -> None:
    """Write one row per selector, one column per stream; reads streams and meta."""
    meta, rows = read_meta(stats), read_tidy(stats, "streams")
    rows = of_main_pool(rows, meta)
    rows = rows.assign(**{name: 100 * rows[name] for name in ("value", "low", "high")})
    counts = rows.groupby("stream")["n"].first()
    table = []
    for selector, own in rows.groupby("selector", sort=True):
        cells = own.set_index("stream")
        row = {"selector": selector}
        for stream, n in counts.items():
            known = stream in cells.index
            row[f"{stream} (n = {n})"] = interval_text(cells.loc[stream], 1) if known else None
        table.append(row)
    text = (
        "Target calls over those of the generalist, minus 1, in per cent: below 0 is better. Seeds are averaged within "
        "a prompt; a session is one query. `best_switching` is a bound, `best_fixed_stream` the best single drafter "
        "of each stream in hindsight."
    )
    write_all(pd.DataFrame(table), out, note(meta, text))
