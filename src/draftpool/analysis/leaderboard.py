"""The leaderboard of replayed selectors: every metric of every selector, with intervals over prompts."""

from __future__ import annotations

import numpy as np
import pandas as pd

from draftpool.analysis.bootstrap import (
    Resampling,
    holm,
    mean_interval,
    ratio_interval,
    ratio_of_ratios_interval,
    wilcoxon_p,
)
from draftpool.analysis.regret import FIXED
from draftpool.data.streams import HELD_OUT
from draftpool.selectors.base import PLAIN

KEYS = ["stream", "prompt_id", "domain"]


def best_arm_rates(arms: pd.DataFrame, queries: pd.DataFrame) -> pd.DataFrame:
    """Share of a query's rounds on its best fixed arm, per selector and query: columns of KEYS, selector, rate."""
    rounds = arms.groupby([*KEYS, "selector", "arm"], observed=True)["rounds"].mean().reset_index()
    total = rounds.groupby([*KEYS, "selector"], observed=True)["rounds"].transform("sum")
    best = queries[[*KEYS, "selector", "best_arm"]]
    merged = rounds.assign(rate=rounds["rounds"] / total).merge(best, on=[*KEYS, "selector"])
    return merged.loc[merged["arm"] == merged["best_arm"], [*KEYS, "selector", "rate"]]


def leaderboard(
    arms: pd.DataFrame, queries: pd.DataFrame, generalist: str, resampling: Resampling
) -> pd.DataFrame:
    """One row per stream, scope (`all`; for all held-out prompts each domain too), selector and metric.

    Metrics: ``mat`` (ratio of totals), ``speedup`` (modelled plain seconds / seconds, ratio of totals),
    ``speedup_free`` (evaluation not charged), ``regret`` and ``regret_switching`` (rounds a query), ``regret_seconds``
    (seconds a query against the cheapest fixed arm, plain decoding included), ``best_arm_rate``, ``switches`` (a
    query), ``evaluated`` (share of rounds), ``converged`` (rounds until nine of ten plays are of a best fixed drafter,
    censored at the answer's end) and ``converged_share`` (queries in which they do). ``p``: Wilcoxon of the query's
    rounds against the generalist's, ``p_holm`` adjusted over the selectors of a stream and scope.
    The selector ``ensemble`` drafts with all drafters and keeps the longest draft.
    """
    rates = best_arm_rates(arms, queries)
    queries = queries.merge(rates, on=[*KEYS, "selector"], how="left")
    first = queries[queries["selector"] == PLAIN]
    ensemble = first.assign(
        selector="ensemble",
        rounds=first["greedy_rounds"],
        seconds=first["ensemble_seconds"],
        evaluation_seconds=0.0,
        evaluated=0.0,
        switches=np.nan,
        rate=np.nan,
        converged=np.nan,
        reached=np.nan,
    )
    queries = pd.concat([queries, ensemble], ignore_index=True)
    # All held-out prompts also domain by domain.
    apart = queries[queries["stream"] == HELD_OUT]
    apart = apart.iloc[: len(apart) if apart["domain"].nunique() > 1 else 0]
    scoped = pd.concat([queries.assign(scope="all"), apart.assign(scope=apart["domain"])], ignore_index=True)
    rows = []
    for (stream, scope, selector), own in scoped.groupby(["stream", "scope", "selector"], observed=True):
        own = own.sort_values("prompt_id")
        free = own["seconds"] - own["evaluation_seconds"]
        metrics = {
            "mat": (ratio_interval(own["tokens"], own["rounds"], resampling), "tokens/target call"),
            "speedup": (ratio_interval(own["plain_seconds"], own["seconds"], resampling), "x"),
            "speedup_free": (ratio_interval(own["plain_seconds"], free, resampling), "x"),
            "regret": (mean_interval(own["rounds"] - own["best_fixed"], resampling), "rounds/query"),
            "regret_switching": (
                mean_interval(own["rounds"] - own["switching_rounds"], resampling),
                "rounds/query",
            ),
            "regret_seconds": (
                mean_interval(own["seconds"] - own["best_fixed_seconds"], resampling),
                "s/query",
            ),
            "evaluated": (ratio_interval(own["evaluated"], own["rounds"], resampling), "share of rounds"),
        }
        if own["reached"].notna().all():
            metrics["converged"] = (mean_interval(own["converged"], resampling), "rounds")
            metrics["converged_share"] = (
                mean_interval(own["reached"].astype(float), resampling),
                "share of queries",
            )
        if own["switches"].notna().all():
            metrics["switches"] = (mean_interval(own["switches"], resampling), "1/query")
        if own["rate"].notna().all():
            metrics["best_arm_rate"] = (mean_interval(own["rate"], resampling), "share of rounds")
        reference = queries[(queries["stream"] == stream) & (queries["selector"] == FIXED + generalist)]
        own_rounds = own.set_index("prompt_id")["rounds"]
        paired = own_rounds - reference.set_index("prompt_id")["rounds"].loc[own_rounds.index]
        for metric, (interval, unit) in metrics.items():
            row = {"stream": stream, "scope": scope, "selector": selector, "metric": metric}
            row |= interval.row(unit)
            rows.append(row | {"p": wilcoxon_p(paired) if metric == "regret" else np.nan})
    return _with_holm(pd.DataFrame(rows))


def _with_holm(board: pd.DataFrame) -> pd.DataFrame:
    """Adjust the tests of one stream and scope for their number."""
    tested = board[board["p"].notna()]
    adjusted = tested.groupby(["stream", "scope"], observed=True)["p"].transform(lambda p: holm(p.to_numpy()))
    return board.assign(p_holm=adjusted.reindex(board.index))


def against_generalist(named: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """Total rounds of every selector over those of the generalist, minus 1, per stream: below 0 is better.

    Args:
        named: Rows per query with the generalist and the stream's best fixed drafter under these names too, and
            `switching_rounds` (the selector ``best_switching`` here).
        resampling: Of the intervals.

    Returns:
        Columns stream, selector, and the statistic; plain decoding is left out.
    """
    rows = []
    oracle = named[named["selector"] == "generalist"].assign(selector="best_switching")
    oracle = oracle.assign(rounds=oracle["switching_rounds"])
    named = pd.concat([named, oracle], ignore_index=True)
    for stream, own in named.groupby("stream", observed=True):
        wide = own.pivot(index="prompt_id", columns="selector", values="rounds")
        ones = np.ones(len(wide))
        for selector in wide.columns.drop([PLAIN, "generalist"]):
            interval = ratio_of_ratios_interval(
                wide[selector], ones, wide["generalist"], ones, resampling, minus=1.0
            )
            rows.append(
                {"stream": stream, "selector": selector} | interval.row("relative difference in rounds")
            )
    return pd.DataFrame(rows)
