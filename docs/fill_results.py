"""Fill the tables of docs/results.md and docs/performance.md from `results/`.

    python docs/fill_results.py

A table stands between `<!-- fill: STUDY/NAME -->` and `<!-- end -->`; what lies between is replaced. NAME is a table of
`results/STUDY/tables/` or one of the views below. Tables of studies that are not in `results/` stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from draftpool.figures.style import run_label
from draftpool.tables.writer import interval_text, markdown

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results"
BLOCK = re.compile(r"(<!-- fill: (\w+)/(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _compare(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "compare.csv")
    return pd.DataFrame(
        {
            "a - b": rows["a"].map(run_label) + " - " + rows["b"].map(run_label),
            "scope": rows["scope"],
            "difference in tau": [interval_text(row, 3, signed=True) for _, row in rows.iterrows()],
            "n": rows["n"],
            "p (Holm)": rows["p_holm"].map("{:.4f}".format),
        }
    )


def _specialists(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "specialists.csv")
    return pd.DataFrame(
        {
            "drafter": rows["drafter"].map(run_label),
            "where": rows["scope"],
            "tau": rows["tau"].map("{:.2f}".format),
            "generalist": rows["generalist_tau"].map("{:.2f}".format),
            "difference": [interval_text(row, 3, signed=True) for _, row in rows.iterrows()],
            "n": rows["n"],
            "p (Holm)": rows["p_holm"].map("{:.4f}".format),
        }
    )


def _seeds(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "tau_seeds.csv")
    rows = rows[(rows["scope"] == "mean") & (rows["seeds"] > 1)]
    return rows.drop(columns=["scope"]).round(3)


def _repetition(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "domains.csv")
    rows = rows[rows["metric"] == "repetition"]
    percent = rows[["value", "low", "high"]] * 100
    return pd.DataFrame(
        {
            "domain": rows["domain"],
            "repeated 4-grams (%)": [interval_text(row, 1) for _, row in percent.iterrows()],
            "n": rows["n"],
        }
    )


def _times(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "times.csv")
    return pd.DataFrame(
        {"stage": rows["stage"], "jobs": rows["n"], "seconds": rows["value"].round().astype(int)}
    )


def _clipped(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "training.csv").merge(pd.read_csv(stats / "drafters.csv"), on="drafter")
    # Other sweeps change what clipping depends on.
    rows = rows[rows["group"].isna() | (rows["group"] == "objective")]
    grouped = rows.groupby("objective", sort=False).agg(
        runs=("drafter", "size"), lowest=("clipped_share", "min"), highest=("clipped_share", "max")
    )
    return grouped.round(2).reset_index()


def _feedback(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "feedback.csv")
    return pd.DataFrame(
        {
            "what": rows["metric"],
            "value": [interval_text(row, 3) for _, row in rows.iterrows()],
            "unit": rows["unit"],
            "n": rows["n"],
        }
    )


def _regret_by_size(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "regret_by_size.csv")
    rows = rows[rows["metric"] == "regret"]
    cells = rows.assign(text=[interval_text(row) for _, row in rows.iterrows()])
    wide = cells.pivot(index="selector", columns="size", values="text")
    slopes = pd.read_csv(stats / "size_slopes.csv").set_index("selector")
    wide["slope over ln N"] = [interval_text(slopes.loc[name]) for name in wide.index]
    return wide.rename(columns=lambda name: f"N = {name}" if isinstance(name, int) else name).reset_index()


def _prediction(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "prediction.csv").sort_values(["stream", "live"], ascending=[True, False])
    return pd.DataFrame(
        {
            "stream": rows["stream"],
            "selector": rows["selector"],
            "live (tokens/s)": rows["live"].round(2),
            "predicted": rows["predicted"].round(2),
            "speed-up live": rows["speedup_live"].map("{:.2f}".format),
            "predicted speed-up": rows["speedup_predicted"].map("{:.2f}".format),
            "modelled / live time": [interval_text(row) for _, row in rows.iterrows()],
            "rounds live": rows["rounds_live"].round(1),
            "rounds predicted": rows["rounds_predicted"].round(1),
            "n": rows["n"],
        }
    )


def _leaderboard(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats.parent / "tables" / "leaderboard_table.csv")
    return rows[rows["stream"] == "heldout"].drop(columns="stream")


def _streams(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats.parent / "tables" / "streams_table.csv")
    return rows[~rows["selector"].str.startswith("fixed:")]


def _tau_sets(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "tau_sets.csv")
    cells = rows.assign(text=[interval_text(row) for _, row in rows.iterrows()])
    wide = cells.pivot(index="drafter", columns="set", values="text").reset_index()
    return wide.assign(drafter=wide["drafter"].map(run_label))


def _memory(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "memory.csv")
    return pd.DataFrame(
        {
            "drafter": rows["drafter"].map(run_label),
            "weights of its own (MB)": (rows["weights"] / 1e6).map("{:.1f}".format),
            "state per 1,000 tokens (MB)": (rows["state"] * 1000 / 1e6).map("{:.2f}".format),
        }
    )


def _converged(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats / "leaderboard.csv")
    rows = rows[(rows["stream"] == "heldout") & (rows["scope"] == "all")]
    share = rows[rows["metric"] == "converged_share"].set_index("selector")
    rounds = rows[rows["metric"] == "converged"].set_index("selector")
    growth = pd.read_csv(stats / "regret_growth.csv")
    growth = growth[growth["stream"] == "heldout"].set_index("selector")
    names = [
        "hedgespec", "hedgespec_soft", "hedge", "ucb_bd", "ucb_be", "ucbspec", "thompson", "exp3", "random",
    ]  # fmt: skip
    return pd.DataFrame(
        [
            {
                "selector": name,
                "queries in which nine of ten plays come to be of a best drafter": interval_text(
                    share.loc[name]
                ),
                "rounds until then (censored)": interval_text(rounds.loc[name], 1),
                "growth of regret (exponent)": interval_text(growth.loc[name])
                if name in growth.index
                else "-",
            }
            for name in names
            if name in share.index
        ]
    )


# Learners and baselines of the table of further pools.
POOLS = ["random", "exp3", "ucb_bd", "ucb_be", "ucbspec", "ucbspec_scaled", "thompson"]
POOLS += ["hedgespec", "hedgespec_soft", "hedgespec_prefill", "hedgespec_prefill_soft", "hedgespec_skip"]
POOLS += ["router_tfidf", "cost_ucb", "cost_hedge"]


def _pools(stats: Path) -> pd.DataFrame:
    rows = pd.read_csv(stats.parent / "tables" / "pools_table.csv")
    rows = rows[
        (rows["pool"] != "main") & (rows["method"].isin(POOLS) | rows["method"].str.startswith("fixed:"))
    ]
    return rows.drop(columns="n")


def _headrooms(stats: Path) -> pd.DataFrame:
    """Headroom of every pool, in tau and in modelled tokens per second."""
    gap, tau = pd.read_csv(stats / "gap.csv"), pd.read_csv(stats / "headroom.csv")
    gap = gap[(gap["selector"] == "best_fixed_query") & gap["stream"].str.startswith("heldout")]
    tau = tau[tau["metric"] == "headroom"].set_index(["stream", "oracle"])
    percent = lambda row: interval_text(row[["value", "low", "high"]] * 100, 1)  # noqa: E731
    return pd.DataFrame(
        [
            {
                "pool": row["pool"],
                "best fixed drafter per query, tau (%)": percent(
                    tau.loc[(row["stream"], "best_fixed_query")]
                ),
                "best switching, tau (%)": percent(tau.loc[(row["stream"], "best_switching")]),
                "best fixed arm per query, tokens/s (%)": percent(row),
                "n": row["n"],
            }
            for _, row in gap.iterrows()
        ]
    )


VIEWS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "compare": _compare,
    "specialists": _specialists,
    "seeds": _seeds,
    "repetition": _repetition,
    "times": _times,
    "clipped": _clipped,
    "feedback": _feedback,
    "regret_by_size": _regret_by_size,
    "prediction": _prediction,
    "leaderboard": _leaderboard,
    "streams": _streams,
    "tau_sets": _tau_sets,
    "converged": _converged,
    "memory": _memory,
    "pools": _pools,
    "headrooms": _headrooms,
}


def _bench(name: str) -> pd.DataFrame:
    result = json.loads((RESULTS / "bench" / f"{name}.json").read_text())
    return pd.DataFrame(
        [
            {
                "what": what,
                "median": f"{row['median']:.3g}",
                "quartiles": f"{row['low']:.3g} to {row['high']:.3g}" if row["n"] > 1 else "",
                "unit": row["unit"],
            }
            for what, row in result["rows"].items()
        ]
    )


def block(study: str, name: str) -> str | None:
    """Markdown of a block, or None if its study is not in `results/`."""
    if study == "bench":
        return markdown(_bench(name), "") if (RESULTS / "bench" / f"{name}.json").exists() else None
    folder = RESULTS / study
    if not (folder / "stats").is_dir():
        return None
    if name in VIEWS:
        frame = VIEWS[name](folder / "stats").astype(object)
        return markdown(frame.where(frame.notna(), "-").astype(str), "")
    if name == "claims":
        verdicts = folder / "claims" / "claims.md"
        return verdicts.read_text() if verdicts.exists() else None
    return (folder / "tables" / f"{name}.md").read_text()


def main() -> None:
    """Fill both files."""
    for path in (DOCS / "results.md", DOCS / "performance.md"):
        text = path.read_text()

        def filled(match: re.Match) -> str:
            made = block(match[2], match[3])
            print(f"{match[2]}/{match[3]}: {'kept' if made is None else 'filled'}")
            return match[0] if made is None else f"{match[1]}\n{made}\n{match[4]}"

        path.write_text(BLOCK.sub(filled, text))


if __name__ == "__main__":
    main()
