"""Stopping-time regret: rounds beyond those of a reference, per query, over tokens and over a stream.

Papers' definition (MetaSD Theorem 2, BanditSpec section 5.1): Reg = E[rounds of the selector] - E[rounds of
i*], where i* is the fixed drafter of the pool with the fewest mean rounds over repeats of the prompt. All
inputs here are float32 rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from draftpool.analysis.bootstrap import Resampling, mean_interval
from draftpool.analysis.metrics import SEQUENCE_KEY
from draftpool.errors import DraftpoolError

FIXED = "fixed:"


def fixed_cost(sequences: pd.DataFrame, pool: list[str], column: str) -> pd.DataFrame:
    """Rounds or wall time of the pool's fixed drafters: index stream, prompt_id, repeat; a column per arm.

    Raises:
        DraftpoolError: If a drafter of the pool was not decoded alone on every prompt.
    """
    rows = sequences[sequences["selector"].isin([FIXED + name for name in pool])]
    wide = rows.pivot_table(
        index=["stream", "prompt_id", "repeat"],
        columns="selector",
        values=column,
        aggfunc="mean",
        observed=True,
    )
    wanted = sequences[["stream", "prompt_id", "repeat"]].drop_duplicates()
    wide = wide.reindex(
        index=pd.MultiIndex.from_frame(wanted), columns=[FIXED + name for name in pool]
    ).sort_index()
    if wide.isna().any(axis=None):
        arm = wide.columns[wide.isna().any()][0]
        raise DraftpoolError(
            "regret needs every fixed drafter of the pool on every prompt", arm, "decode it on this stream"
        )
    return wide


def best_fixed(cost: pd.DataFrame) -> pd.DataFrame:
    """Best fixed arm per query in hindsight: index (stream, prompt_id), columns arm, cost, pathwise.

    ``cost`` is min over arms of the mean over repeats (the papers' i*); ``pathwise`` the mean over repeats of
    the minimum.
    """
    means = cost.groupby(["stream", "prompt_id"], observed=True).mean()
    pathwise = cost.min(axis=1).groupby(["stream", "prompt_id"], observed=True).mean()
    return pd.DataFrame({"arm": means.idxmin(axis=1), "cost": means.min(axis=1), "pathwise": pathwise})


def query_regret(
    sequences: pd.DataFrame, pool: list[str], best_switching: pd.DataFrame, column: str = "rounds"
) -> pd.DataFrame:
    """Regret of every selector on every query, seeds and repeats averaged.

    Args:
        sequences: Sequence rows of one dtype.
        pool: Names of the drafters that the selectors choose from.
        best_switching: Columns stream, prompt_id, rounds (of the best switching sequence); may be empty.
        column: ``rounds``, or ``wall_time`` for regret in seconds.

    Returns:
        Columns stream, selector, prompt_id, domain, prompt_index, cost, best_fixed, pathwise, switching: the
        cost of the selector and its excess over each reference (NaN where a reference is unknown).
    """
    keys = ["stream", "selector", "prompt_id", "domain"]
    means = (
        sequences.groupby(keys, observed=True)
        .agg(cost=(column, "mean"), prompt_index=("prompt_index", "min"))
        .reset_index()
    )
    reference = (
        best_fixed(fixed_cost(sequences, pool, column)).rename(columns={"cost": "reference"}).reset_index()
    )
    means = means.merge(reference.drop(columns="arm"), on=["stream", "prompt_id"])
    switching = best_switching[["stream", "prompt_id", "rounds"]].rename(columns={"rounds": "switched"})
    means = means.merge(switching, on=["stream", "prompt_id"], how="left")
    return means.assign(
        best_fixed=means["cost"] - means["reference"],
        pathwise=means["cost"] - means["pathwise"],
        switching=means["cost"] - means["switched"],
    ).drop(columns=["reference", "switched"])


def cumulative_regret(queries: pd.DataFrame, resampling: Resampling, points: int = 16) -> pd.DataFrame:
    """Sum of regret over the queries of a stream, in its order, against the selector's rounds so far.

    Returns:
        Columns stream, selector, queries, rounds, value, low, high, n, unit, method. The interval at q
        queries is q times that of the mean over the first q.
    """
    rows = []
    for (stream, selector), group in queries.groupby(["stream", "selector"], observed=True):
        group = group.sort_values("prompt_index")
        rounds = group["cost"].cumsum().to_numpy()
        for q in np.unique(np.linspace(1, len(group), min(points, len(group))).round().astype(int)):
            total = mean_interval(group["best_fixed"].iloc[:q], resampling).scaled(q)
            head = {"stream": stream, "selector": selector, "queries": int(q), "rounds": float(rounds[q - 1])}
            rows.append({**head, **total.row("rounds")})
    return pd.DataFrame(rows)


def rounds_to_commit(steps: pd.DataFrame, tokens: np.ndarray) -> pd.DataFrame:
    """Rounds used until n tokens (after the prefill token) are committed, n in ``tokens``, per sequence.

    Returns:
        Columns of the sequence key, n, rounds; only the n that the sequence reaches.
    """
    steps = steps.sort_values([*SEQUENCE_KEY, "round"], kind="stable")
    grouped = steps.groupby(SEQUENCE_KEY, observed=True)
    total = grouped["n_committed"].cumsum()
    before = total - steps["n_committed"]
    # Round r is the one that reaches n when (committed before r) < n <= (committed after r).
    first = np.searchsorted(tokens, before.to_numpy(), side="right")
    last = np.searchsorted(tokens, total.to_numpy(), side="right")
    reached = np.repeat(np.arange(len(steps)), last - first)
    starts = np.repeat(first - np.concatenate([[0], np.cumsum(last - first)[:-1]]), last - first)
    found = steps[[*SEQUENCE_KEY, "round"]].iloc[reached].reset_index(drop=True)
    return found.assign(n=tokens[starts + np.arange(len(reached))], rounds=found["round"] + 1).drop(
        columns="round"
    )


def regret_curves(
    steps: pd.DataFrame, sequences: pd.DataFrame, pool: list[str], resampling: Resampling, points: int = 16
) -> pd.DataFrame:
    """Rounds used to commit n tokens minus those of the query's best fixed arm, averaged over queries.

    The best fixed arm is the query's i* (fewest mean rounds for the whole answer), the same one for all n.

    Returns:
        Columns stream, selector, tokens, value, low, high, n (queries that long), unit, method. n is cut
        where fewer than half of the stream's queries are long enough.
    """
    longest = (
        int(
            sequences.groupby(["stream", "prompt_id"], observed=True)["n_tokens"]
            .mean()
            .groupby("stream")
            .median()
            .max()
        )
        - 1
    )
    grid = np.unique(np.linspace(1, max(longest, 1), min(points, max(longest, 1))).round().astype(int))
    used = (
        rounds_to_commit(steps, grid)
        .groupby(["stream", "selector", "prompt_id", "n"], observed=True)["rounds"]
        .mean()
        .reset_index()
    )
    arm = best_fixed(fixed_cost(sequences, pool, "rounds"))["arm"].rename("selector").reset_index()
    reference = used.merge(arm, on=["stream", "selector", "prompt_id"]).rename(
        columns={"rounds": "reference"}
    )
    used = used.merge(reference.drop(columns="selector"), on=["stream", "prompt_id", "n"])
    used["excess"] = used["rounds"] - used["reference"]
    queries = used.groupby("stream", observed=True)["prompt_id"].nunique()
    rows = []
    for (stream, selector, n), group in used.groupby(["stream", "selector", "n"], observed=True):
        if 2 * len(group) < queries[stream]:
            continue
        head = {"stream": stream, "selector": selector, "tokens": int(n)}
        rows.append({**head, **mean_interval(group["excess"], resampling).row("rounds")})
    return pd.DataFrame(rows)
