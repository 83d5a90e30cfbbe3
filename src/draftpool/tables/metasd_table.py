"""Like the tables of MetaSD: speed-up of every method on every domain of a stream."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.analysis.tidy import main_stream, read_meta, read_tidy
from draftpool.tables.common import note, with_counts
from draftpool.tables.writer import interval_text, write_all


def write(stats: Path, out: Path) -> None:
    """Write a row per selector, MAT and regret beside speed-up; reads selectors, regret (if any), meta."""
    meta, rows = read_meta(stats), read_tidy(stats, "selectors")
    stream = main_stream(rows)
    rows = rows[rows["stream"] == stream]
    speed = rows[(rows["metric"] == "speedup") & (rows["dtype"] == meta["timed_dtype"])]
    mat = rows[(rows["metric"] == "mat") & (rows["dtype"] == meta["exact_dtype"]) & (rows["scope"] == "all")]
    heads = with_counts(speed, [*meta["domains"], "all"])
    total = speed[speed["scope"] == "all"].sort_values("value", ascending=False)
    regret = _regret(stats, stream)
    table = []
    for selector in total["selector"]:
        own = speed[speed["selector"] == selector].set_index("scope")
        row = {"method": selector}
        row |= {
            head: interval_text(own.loc[scope]) if scope in own.index else None
            for scope, head in heads.items()
        }
        row["MAT"] = interval_text(mat.set_index("selector").loc[selector])
        if regret is not None:
            row["regret (rounds/query)"] = interval_text(regret.loc[selector])
        table.append(row)
    text = (
        f"Domains and all: speed-up over plain decoding ({meta['timed_dtype']}, {stream} stream), ratio of "
        f"total decode time per token. MAT and regret: {meta['exact_dtype']}; regret against the best fixed "
        "drafter of the pool for each query."
    )
    write_all(pd.DataFrame(table), out, note(meta, text))


def _regret(stats: Path, stream: str) -> pd.DataFrame | None:
    if not (Path(stats) / "regret.csv").is_file():
        return None
    rows = read_tidy(stats, "regret")
    chosen = (rows["stream"] == stream) & (rows["scope"] == "all") & (rows["reference"] == "best_fixed")
    return rows[chosen].set_index("selector")
