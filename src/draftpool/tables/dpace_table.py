"""Like Table 1 of D-PACE: speed-up and tau of every recipe on every domain, and their mean."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.analysis.tidy import main_stream, read_meta, read_tidy, recipe_rows
from draftpool.tables.common import note, with_counts
from draftpool.tables.writer import interval_text, write_all

FIXED = "fixed:"


def write(stats: Path, out: Path) -> None:
    """Write two rows per recipe: tau (acceptance table) and, where it was decoded live, speed-up.

    tau averages training seeds within a prompt; a speed-up belongs to one run, named in the row, and its mean column is
    over all prompts of the stream. Reads tau, drafters, selectors (if any) and meta.
    """
    meta, drafters, taus = read_meta(stats), read_tidy(stats, "drafters"), read_tidy(stats, "tau")
    taus = taus[(taus["level"] == "recipe") & (taus["metric"] == "tau")]
    heads = with_counts(taus, [*meta["domains"], "mean"])
    speeds = _speedups(stats, meta)
    rows = []
    for recipe in recipe_rows(drafters)["recipe"]:
        own = taus[taus["drafter"] == recipe].set_index("scope")
        rows.append(_row(recipe, "tau", own, heads))
        for run in drafters.loc[drafters["recipe"] == recipe, "drafter"]:
            live = speeds[speeds["selector"] == FIXED + run].set_index("scope") if len(speeds) else speeds
            if len(live):
                rows.append(_row(run, "speed-up", live, heads))
    text = "tau: tokens per target call, bonus token included."
    if len(speeds):
        text += f" Speed-up over plain decoding ({meta['timed_dtype']}, {main_stream(speeds)} stream"
        text += f", n = {int(speeds['n'].max())} prompts in all): ratio of total decode time per token."
    write_all(pd.DataFrame(rows), out, note(meta, text))


def _speedups(stats: Path, meta: dict) -> pd.DataFrame:
    if not (Path(stats) / "selectors.csv").is_file():
        return pd.DataFrame()
    rows = read_tidy(stats, "selectors")
    rows = rows[(rows["stream"] == main_stream(rows)) & (rows["dtype"] == meta["timed_dtype"])]
    return rows[rows["metric"] == "speedup"].replace({"scope": {"all": "mean"}})


def _row(name: str, measure: str, values: pd.DataFrame, heads: dict[str, str]) -> dict[str, str | None]:
    cells = {
        head: interval_text(values.loc[scope]) if scope in values.index else None
        for scope, head in heads.items()
    }
    return {"drafter": name, "measure": measure, **cells}
