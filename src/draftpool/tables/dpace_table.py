"""Like Table 1 of D-PACE: speed-up and tau of every recipe on every domain, and their mean."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.analysis.tidy import main_stream, read_drafters, read_meta, read_tidy, recipe_rows
from draftpool.tables.common import note
from draftpool.tables.writer import interval_text, write_all

FIXED = "fixed:"


def write(stats: Path, out: Path) -> None:
    """Write tau of every recipe (acceptance table) and speed-up of every run that was decoded live.

    tau averages training seeds within a prompt; a speed-up belongs to the run named in the row, and its mean
    column is over all prompts of the stream. Reads tau, drafters, selectors (if any) and meta.
    """
    meta, drafters, taus = read_meta(stats), read_drafters(stats), read_tidy(stats, "tau")
    taus = taus[(taus["level"] == "recipe") & (taus["metric"] == "tau")]
    scopes = [*meta["domains"], "mean"]
    speeds = _speedups(stats, meta)
    rows = []
    for recipe in recipe_rows(drafters)["recipe"]:
        own = taus[taus["drafter"] == recipe].set_index("scope")
        rows.append(_row(recipe, "tau", own, scopes))
        for run in drafters.loc[drafters["recipe"] == recipe, "drafter"]:
            live = speeds[speeds["selector"] == FIXED + run].set_index("scope") if len(speeds) else speeds
            if len(live):
                rows.append(_row(run, "speed-up", live, scopes))
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


def _row(name: str, measure: str, values: pd.DataFrame, scopes: list[str]) -> dict[str, str | None]:
    cells = {scope: interval_text(values.loc[scope]) if scope in values.index else None for scope in scopes}
    domains = values.loc[[scope for scope in values.index if scope != "mean"], "n"]
    n = f"{domains.min()}" if domains.nunique() == 1 else f"{domains.min()}-{domains.max()}"
    return {
        "drafter": name,
        "measure": measure,
        "n (domain / all)": f"{n} / {values.loc['mean', 'n']}",
        **cells,
    }
