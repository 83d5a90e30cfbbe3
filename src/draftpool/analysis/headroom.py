"""Oracles: what the best possible choice of drafters would gain over the generalist (DESIGN section 9)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from draftpool.analysis.bootstrap import Resampling, ratio_interval, ratio_of_ratios_interval
from draftpool.analysis.metrics import dense_committed, per_prompt, walk
from draftpool.errors import DraftpoolError
from draftpool.replay.oracles import best_switching_rounds

ORACLES = ("best_fixed_stream", "best_fixed_query", "best_switching")


def switching(table: pd.DataFrame) -> pd.DataFrame:
    """Rounds of the best switching sequence: columns prompt_id, domain, repeat, tokens, rounds.

    Args:
        table: Acceptance table of the pool; every drafter must cover every answer.

    Raises:
        DraftpoolError: If a drafter lacks an answer that another one has.
    """
    answers, committed = dense_committed(table)
    keys = ["prompt_id", "domain", "repeat"]
    order = answers.sort_values([*keys, "drafter"], kind="stable")
    n_drafters = answers["drafter"].nunique()
    per_answer = order.groupby(keys, observed=True)["drafter"].size()
    if (per_answer != n_drafters).any():
        missing = per_answer[per_answer != n_drafters].index[0]
        raise DraftpoolError(
            "not every drafter of the pool was scored here", str(missing), "score the pool again"
        )
    stacked = committed[order.index.to_numpy()].reshape(-1, n_drafters, committed.shape[1])
    firsts = order.iloc[::n_drafters][[*keys, "tokens"]].reset_index(drop=True)
    return firsts.assign(rounds=best_switching_rounds(stacked)[np.arange(len(firsts)), firsts["tokens"]])


def oracle_rounds(table: pd.DataFrame, generalist: str) -> tuple[pd.DataFrame, str]:
    """Rounds per prompt of the generalist and of the three oracles over the pool, repeats averaged.

    Returns:
        (prompts, arm): prompts has columns prompt_id, domain, tokens, generalist, best_fixed_stream,
        best_fixed_query, best_switching; arm is the best fixed drafter of the stream. The best fixed drafter
        of a query minimises the mean rounds over repeats, as in the papers.
    """
    fixed = per_prompt(walk(table))
    rounds = fixed.pivot(index=["prompt_id", "domain"], columns="drafter", values="rounds")
    if generalist not in rounds or rounds.isna().any(axis=None):
        raise DraftpoolError(
            "the generalist or an answer is missing from the acceptance table",
            generalist,
            "score the pool again",
        )
    arm = str(rounds.sum().idxmin())
    best = switching(table).groupby(["prompt_id", "domain"], observed=True)[["tokens", "rounds"]].mean()
    prompts = pd.DataFrame(
        {
            "tokens": best["tokens"],
            "generalist": rounds[generalist],
            "best_fixed_stream": rounds[arm],
            "best_fixed_query": rounds.min(axis=1),
            "best_switching": best["rounds"],
        }
    )
    return prompts.reset_index(), arm


def replay_headroom(queries: pd.DataFrame, known: set[str], resampling: Resampling) -> pd.DataFrame:
    """Headroom on replayed streams that are not known yet: rows as of `headroom`, a session being one query.

    Args:
        queries: Table replay_queries, the generalist and the stream's best fixed drafter under these names too.
        known: Streams to leave out.
        resampling: Of the intervals.
    """
    rows = []
    for stream, own in queries[~queries["stream"].isin(known)].groupby("stream", observed=True):
        generalist = own[own["selector"] == "generalist"].sort_values("prompt_id")
        fixed = own[own["selector"] == "best_fixed_stream"].sort_values("prompt_id")
        tokens, base = generalist["tokens"].to_numpy(), generalist["rounds"].to_numpy()
        oracles = {
            "generalist": base,
            "best_fixed_stream": fixed["rounds"].to_numpy(),
            "best_fixed_query": generalist["best_fixed"].to_numpy(),
            "best_switching": generalist["switching_rounds"].to_numpy(),
        }
        for oracle, rounds in oracles.items():
            head = {"stream": stream, "oracle": oracle, "arm": ""}
            tau = ratio_interval(tokens, rounds, resampling)
            rows.append({**head, "metric": "tau", **tau.row("tokens/target call")})
            if oracle != "generalist":
                gain = ratio_of_ratios_interval(tokens, rounds, tokens, base, resampling, minus=1.0)
                rows.append({**head, "metric": "headroom", **gain.row("relative gain in tau")})
    return pd.DataFrame(rows)


def headroom(table: pd.DataFrame, generalist: str, stream: str, resampling: Resampling) -> pd.DataFrame:
    """Headroom of a pool on one stream: tau of each oracle, and its relative gain over the generalist.

    Returns:
        Columns stream, oracle (generalist, best_fixed_stream, best_fixed_query, best_switching), arm, metric
        (tau | headroom), value, low, high, n, unit, method.
    """
    prompts, arm = oracle_rounds(table, generalist)
    rows = []
    for oracle in ("generalist", *ORACLES):
        named = {"generalist": generalist, "best_fixed_stream": arm}.get(oracle, "")
        tau = ratio_interval(prompts["tokens"], prompts[oracle], resampling)
        head = {"stream": stream, "oracle": oracle, "arm": named}
        rows.append({**head, "metric": "tau", **tau.row("tokens/target call")})
        if oracle == "generalist":
            continue
        tokens = prompts["tokens"]
        gain = ratio_of_ratios_interval(
            tokens, prompts[oracle], tokens, prompts["generalist"], resampling, minus=1.0
        )
        rows.append({**head, "metric": "headroom", **gain.row("relative gain in tau")})
    return pd.DataFrame(rows)
