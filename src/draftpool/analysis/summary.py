"""The flat summary of a study: name -> {value, low, high, n, unit} (names: DESIGN section 9)."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from draftpool.analysis.bootstrap import point, proportion_interval
from draftpool.analysis.live import best_fixed_speedup
from draftpool.artefacts import read_json

Entry = dict[str, float | int | str | None]


def entry(row: dict | pd.Series) -> Entry:
    """Turn the statistic columns of a tidy row into a summary entry; what has no interval is null."""

    def number(value: float) -> float | None:
        return float(value) if math.isfinite(value) else None

    return {
        "value": number(row["value"]),
        "low": number(row["low"]),
        "high": number(row["high"]),
        "n": int(row["n"]),
        "unit": str(row["unit"]),
    }


def summarise(
    tables: dict[str, pd.DataFrame], lossless: Path | None, exact: str, timed: str, confidence: float
) -> dict[str, Entry]:
    """Collect the headline numbers.

    Args:
        tables: Tidy tables of ``compute_stats`` by name; absent or empty ones add nothing.
        lossless: Losslessness report, if there is one.
        exact: Dtype of MAT and regret.
        timed: Dtype of speed-ups.
        confidence: Of the interval of the mismatch rate.
    """
    found: dict[str, Entry] = {}
    for name, template in (
        ("tau", "tau/{drafter}/{scope}"),
        ("headroom", "headroom/{stream}/{oracle}"),
        ("selectors", "{metric}/{selector}/{stream}"),
        ("regret", "regret/{selector}/{stream}"),
        ("compare", "compare/{a}/{b}/{scope}"),
        ("specialists", "specialist/{drafter}/{scope}"),
        ("domains", "{metric}/{domain}"),
        ("overhead", "overhead/dpace_step"),
        ("times", "time/{stage}"),
    ):
        frame = _headline(name, tables.get(name, pd.DataFrame()), exact, timed)
        found |= {template.format(**row): entry(row) for row in frame.to_dict("records")}
    # The bare name is the headroom a per-query selector can hope for; best switching stands beside it.
    for key in [key for key in found if key.startswith("headroom/") and key.endswith("/best_fixed_query")]:
        found[key.removesuffix("/best_fixed_query")] = found[key]
    selectors = tables.get("selectors", pd.DataFrame())
    for stream in selectors["stream"].unique() if len(selectors) else []:
        best = best_fixed_speedup(selectors, stream, timed)
        if best is not None:
            found[f"speedup/best_fixed/{stream}"] = entry(best)
    return found | (_lossless(lossless, confidence) if lossless else {})


def _headline(name: str, frame: pd.DataFrame, exact: str, timed: str) -> pd.DataFrame:
    if frame.empty:
        return frame
    if name == "tau":
        return frame[frame["metric"] == "tau"]
    if name == "headroom":
        return frame[frame["metric"] == "headroom"]
    if name == "selectors":
        speed = (frame["metric"] == "speedup") & (frame["dtype"] == timed)
        return frame[
            (frame["scope"] == "all") & (speed | ((frame["metric"] == "mat") & (frame["dtype"] == exact)))
        ]
    if name == "regret":
        return frame[(frame["scope"] == "all") & (frame["reference"] == "best_fixed")]
    if name == "domains":
        return frame[frame["metric"] == "repetition"]
    return frame


def _lossless(file: Path, confidence: float) -> dict[str, Entry]:
    report = read_json(file)
    exact = report["float32"]
    found = {
        f"lossless/float32/{key}": entry(point(exact[key], exact["prompts"]).row(unit))
        for key, unit in _COUNTS.items()
    }
    half = report.get("bfloat16")
    if half:
        rate = proportion_interval(half["flips"], half["positions"], confidence)
        found["lossless/bfloat16/rate"] = entry(rate.row("share of positions"))
    return found


_COUNTS = {
    "mismatches": "prompts",
    "tokens": "tokens",
    "drafted": "tokens",
    "accepted": "tokens",
    "rejected": "tokens",
}
