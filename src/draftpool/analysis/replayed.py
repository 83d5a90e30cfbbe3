"""Statistics of replay: the leaderboard of selectors, regret over tokens, and predicted against live speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from draftpool.analysis.bootstrap import (
    Resampling,
    bootstrap_interval,
    mean_interval,
    ratio_interval,
    ratio_of_ratios_interval,
)
from draftpool.analysis.leaderboard import KEYS, against_generalist, leaderboard
from draftpool.analysis.regret import FIXED
from draftpool.artefacts import read_table
from draftpool.data.streams import HELD_OUT, MAIN
from draftpool.errors import DraftpoolError
from draftpool.selectors.base import PLAIN

# The selector whose catch-up time stands for bandits.
BANDIT = "ucb_bd"


def read_replays(folders: Sequence[Path]) -> dict[str, pd.DataFrame]:
    """Tables answers, arms, curves, oracles, rewards and memory of all replay folders; pool_sizes if it is there."""
    kinds = ["answers", "arms", "curves", "oracles", "rewards", "memory"]
    if all((folder / "pool_sizes.parquet").is_file() for folder in folders):
        kinds.append("pool_sizes")
    return {
        kind: pd.concat([read_table(folder / f"{kind}.parquet") for folder in folders], ignore_index=True)
        for kind in kinds
    }


def per_query(answers: pd.DataFrame, oracles: pd.DataFrame, pool: list[str]) -> pd.DataFrame:
    """Rounds, seconds and their references per selector and query, repeats averaged.

    Returns:
        The answers' columns plus ``best_fixed`` (rounds of i*, the fixed drafter with the fewest mean rounds over
        repeats), ``best_arm`` (its name), ``best_fixed_seconds`` (of the cheapest fixed drafter or plain decoding),
        ``plain_seconds``, ``switching_rounds``, ``switching_seconds``.

    Raises:
        DraftpoolError: If a fixed drafter of the pool was not replayed.
    """
    numbers = ["tokens", "rounds", "zeros", "switches", "evaluated", "prompt_index", "converged", "reached"]
    numbers += ["seconds", "evaluation_seconds", "catch_up_seconds"]
    rows = answers.groupby([*KEYS, "selector"], observed=True)[numbers].mean().reset_index()
    wide = rows.pivot(index=KEYS, columns="selector", values="rounds")
    seconds = rows.pivot(index=KEYS, columns="selector", values="seconds")
    fixed = [FIXED + name for name in pool]
    missing = [name for name in [*fixed, PLAIN] if name not in wide or wide[name].isna().any()]
    if missing:
        raise DraftpoolError("not replayed on every prompt", missing[0], "run replay_selectors again")
    references = pd.DataFrame(
        {
            "best_fixed": wide[fixed].min(axis=1),
            "best_arm": wide[fixed].idxmin(axis=1).str.removeprefix(FIXED),
            "best_fixed_seconds": seconds[[*fixed, PLAIN]].min(axis=1),
            "plain_seconds": seconds[PLAIN],
        }
    ).reset_index()
    bounds = oracles.groupby(KEYS, observed=True)[
        ["switching_rounds", "switching_seconds", "greedy_rounds", "ensemble_seconds"]
    ].mean()
    return rows.merge(references, on=KEYS).merge(bounds.reset_index(), on=KEYS)


def _excess(curves: pd.DataFrame, queries: pd.DataFrame) -> pd.DataFrame:
    """Curves with the rounds beyond those of the query's best fixed arm at the same number of tokens, `excess`."""
    curves = curves.groupby([*KEYS, "selector", "n"], observed=True)["rounds"].mean().reset_index()
    best = queries.loc[queries["selector"] == PLAIN, [*KEYS, "best_arm"]]
    best = best.assign(selector=FIXED + best["best_arm"])
    reference = curves.merge(best, on=[*KEYS, "selector"]).rename(columns={"rounds": "reference"})
    curves = curves.merge(reference[[*KEYS, "n", "reference"]], on=[*KEYS, "n"])
    return curves.assign(excess=curves["rounds"] - curves["reference"])


def regret_growth(curves: pd.DataFrame, queries: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """How regret grows with the tokens n: the exponent a of n^a between a quarter of a stream's length and the whole,
    on the queries that are as long.

    1: like the tokens; 0: not at all; a logarithm has about 0.3 at 25 to 100 tokens.

    Returns:
        Columns stream, selector, quarter, whole (tokens), and the statistic.
    """
    curves = _excess(curves, queries)
    found = []
    for stream, own in curves.groupby("stream", observed=True):
        whole = own["n"].max()
        points = own["n"].unique()
        quarter = points[np.abs(points - whole / 4).argmin()]
        wide = own[own["n"].isin([quarter, whole])].pivot(
            index=["selector", "prompt_id"], columns="n", values="excess"
        )
        for selector, both in wide.dropna().groupby("selector", observed=True):
            if both[quarter].sum() > 0.0 and both[whole].sum() > 0.0:
                head = {"stream": stream, "selector": selector, "quarter": int(quarter), "whole": int(whole)}
                ratio = ratio_interval(both[whole], both[quarter], resampling)
                found.append(head | ratio.exponent(float(whole / quarter)).row("exponent of tokens"))
    return pd.DataFrame(found)


def regret_over_tokens(curves: pd.DataFrame, queries: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """Rounds to commit n tokens minus those of the query's best fixed arm, over n (queries that long).

    Returns:
        Columns stream, selector, tokens, value, low, high, n, unit, method; cut where fewer than half of the queries
        are long enough.
    """
    curves = _excess(curves, queries)
    n_queries = queries[queries["selector"] == PLAIN].groupby("stream").size()
    rows = []
    for (stream, selector, n), own in curves.groupby(["stream", "selector", "n"], observed=True):
        if 2 * len(own) >= n_queries[stream]:
            head = {"stream": stream, "selector": selector, "tokens": int(n)}
            rows.append(head | mean_interval(own["excess"], resampling).row("rounds"))
    return pd.DataFrame(rows)


def prediction(
    replays: dict[str, pd.DataFrame], sequences: pd.DataFrame, timed: str, resampling: Resampling
) -> pd.DataFrame:
    """Tokens per second predicted from table and costs against live decoding, per stream and selector.

    The live seeds are a sample of the replayed ones, so a learner's prediction is its mean over seeds.

    Returns:
        Columns stream, selector, live, predicted (tokens/s), speedup_live, speedup_predicted (over plain decoding, from
        which a change of the machine's speed drops out), ratio with interval (predicted / live time, over prompts), n,
        rounds_live, rounds_predicted.
    """
    live = sequences[sequences["dtype"] == timed].assign(committed=lambda rows: rows["n_tokens"] - 1)
    live = live.groupby(["stream", "selector", "prompt_id"], observed=True)[
        ["committed", "wall_time", "rounds"]
    ].mean()
    replayed = (
        replays["answers"]
        .groupby(["stream", "selector", "prompt_id"], observed=True)[["tokens", "seconds", "rounds"]]
        .mean()
    )
    both = live.join(replayed.rename(columns={"rounds": "rounds_replayed"}), how="inner").reset_index()
    rows = []
    for (stream, selector), own in both.groupby(["stream", "selector"], observed=True):
        rows.append(
            {
                "stream": stream,
                "selector": selector,
                "live": own["committed"].sum() / own["wall_time"].sum(),
                "predicted": own["tokens"].sum() / own["seconds"].sum(),
                "rounds_live": own["rounds"].sum(),
                "rounds_predicted": own["rounds_replayed"].sum(),
                **ratio_interval(own["wall_time"], own["seconds"], resampling).row("predicted / live"),
            }
        )
    found = pd.DataFrame(rows)
    if found.empty:
        return found
    plain = found[found["selector"] == PLAIN].set_index("stream")
    return found.assign(
        speedup_live=found["live"] / found["stream"].map(plain["live"]),
        speedup_predicted=found["predicted"] / found["stream"].map(plain["predicted"]),
    )


def named_queries(queries: pd.DataFrame, pool: list[str], generalist: str) -> pd.DataFrame:
    """Rows of :func:`per_query`, with the generalist and the best fixed drafters under names of their own too.

    `best_fixed_stream` needs the fewest rounds on the whole stream, `best_fixed_domain` on each of its domains
    (MetaSD's best specialist of a task), `fastest_fixed_stream` the fewest modelled seconds on the stream.
    """
    fixed = queries[queries["selector"].isin([FIXED + name for name in pool])]

    def best(over: list[str], measure: str) -> pd.DataFrame:
        totals = fixed.groupby([*over, "selector"], observed=True)[measure].sum().reset_index()
        chosen = totals.loc[totals.groupby(over, observed=True)[measure].idxmin(), [*over, "selector"]]
        return queries.merge(chosen, on=[*over, "selector"])

    return pd.concat(
        [
            queries,
            queries[queries["selector"] == FIXED + generalist].assign(selector="generalist"),
            best(["stream"], "rounds").assign(selector="best_fixed_stream"),
            best(["stream", "domain"], "rounds").assign(selector="best_fixed_domain"),
            best(["stream"], "seconds").assign(selector="fastest_fixed_stream"),
        ],
        ignore_index=True,
    )


def feedback(
    replays: dict[str, pd.DataFrame], queries: pd.DataFrame, bandit: str, resampling: Resampling
) -> pd.DataFrame:
    """What a bandit's feedback is worth, on all held-out prompts.

    Metrics: ``signal_bd`` and ``signal_be``, mean over the other arms i of Delta_i^2 / max(Var_i, Var_best) within a
    query (MetaSD, Theorem 1), and ``signal_difference`` (BD - BE); ``zero_be``, share of the best drafter's rounds that
    accept nothing; ``catch_up_share`` of the bandit's modelled seconds.
    """
    queries = queries[queries["stream"] == HELD_OUT]
    best = queries.loc[queries["selector"] == PLAIN, ["prompt_id", "best_arm"]]
    moments = replays["rewards"]
    moments = moments[moments["stream"] == HELD_OUT].merge(best, on="prompt_id")
    if moments.empty:
        return pd.DataFrame()
    top = moments[moments["arm"] == moments["best_arm"]]
    keys = ["prompt_id", "repeat"]
    pairs = moments[moments["arm"] != moments["best_arm"]].merge(top, on=keys, suffixes=("", "_best"))
    for reward in ("be", "bd"):
        spread = pairs[[f"{reward}_var", f"{reward}_var_best"]].max(axis=1)
        gap = (pairs[f"{reward}_best"] - pairs[reward]) ** 2
        pairs[f"signal_{reward}"] = np.where(spread > 0.0, gap / spread.where(spread > 0.0, 1.0), 0.0)
    signals = pairs.groupby("prompt_id", observed=True)[["signal_be", "signal_bd"]].mean()
    own = queries[queries["selector"] == FIXED + queries["best_arm"]]
    rows = {
        "signal_be": mean_interval(signals["signal_be"], resampling),
        "signal_bd": mean_interval(signals["signal_bd"], resampling),
        "signal_difference": mean_interval(signals["signal_bd"] - signals["signal_be"], resampling),
        "zero_be": ratio_interval(own["zeros"], own["rounds"], resampling),
    }
    units = {"zero_be": "share of rounds", "catch_up_share": "share of modelled time"}
    learner = queries[queries["selector"] == bandit]
    if len(learner):
        rows["catch_up_share"] = ratio_interval(learner["catch_up_seconds"], learner["seconds"], resampling)
    return pd.DataFrame(
        [
            {"metric": name, **interval.row(units.get(name, "gap^2 / variance"))}
            for name, interval in rows.items()
        ]
    )


def regret_by_size(rows: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """Regret per query to the best fixed drafter of the pool, by the pool's size; pools are averaged within a prompt.

    Metrics: ``regret`` (rounds a query) and ``relative`` (total rounds over those of the best fixed drafters, minus 1).
    """
    found = []
    for (size, selector), own in rows.groupby(["size", "selector"], observed=True):
        means = own.groupby("prompt_id", observed=True)[["rounds", "best_fixed"]].mean()
        excess = means["rounds"] - means["best_fixed"]
        head = {"size": int(size), "selector": selector, "pools": own["pool"].nunique()}
        regret = mean_interval(excess, resampling)
        relative = ratio_interval(excess, means["best_fixed"], resampling)
        found.append(head | {"metric": "regret"} | regret.row("rounds/query"))
        found.append(head | {"metric": "relative"} | relative.row("share of rounds"))
    return pd.DataFrame(found)


def size_slopes(rows: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """Least-squares slope of a prompt's regret over ln N, per selector, averaged over prompts."""
    found = []
    for selector, own in rows.groupby("selector", observed=True):
        excess = own.assign(excess=own["rounds"] - own["best_fixed"])
        wide = excess.pivot_table(index="prompt_id", columns="size", values="excess", observed=True).dropna()
        x = np.log(wide.columns.to_numpy(dtype=float))
        if len(x) < 2:
            continue
        slopes = wide.to_numpy() @ (x - x.mean()) / ((x - x.mean()) ** 2).sum()
        found.append({"selector": selector} | mean_interval(slopes, resampling).row("rounds/query per ln N"))
    return pd.DataFrame(found)


def regret_by_length(queries: pd.DataFrame, resampling: Resampling, bins: int = 3) -> pd.DataFrame:
    """Regret per query relative to the best fixed drafter's rounds, by the number of rounds that this one needs.

    Returns:
        Columns stream, selector, bin (0: shortest), rounds_low, rounds_high, statistic (excess rounds over the best
        fixed drafters' rounds). Bins are quantiles of a stream's queries.
    """
    found = []
    for stream, rows in queries.groupby("stream", observed=True):
        best = rows.groupby("prompt_id", observed=True)["best_fixed"].first()
        edges = np.unique(np.quantile(best, np.linspace(0.0, 1.0, bins + 1)))
        place = np.clip(np.searchsorted(edges, rows["best_fixed"], side="right") - 1, 0, len(edges) - 2)
        for (selector, number), own in rows.groupby(["selector", place], observed=True):
            excess = own["rounds"] - own["best_fixed"]
            head = {"stream": stream, "selector": selector, "bin": int(number)}
            head |= {"rounds_low": own["best_fixed"].min(), "rounds_high": own["best_fixed"].max()}
            interval = ratio_interval(excess, own["best_fixed"], resampling)
            found.append(head | interval.row("share of rounds"))
    return pd.DataFrame(found)


def replay_statistics(
    cfg: dict, folders: Sequence[Path], sequences: pd.DataFrame, timed: str, resampling: Resampling
) -> dict[str, pd.DataFrame]:
    """All statistics of replay: replay_queries, feedback, leaderboard, replay_curves, prediction and others.

    Args:
        cfg: `pools` (of every folder: name, arms, generalist) and `stream_pools` (of live streams).
        folders: Of replay_selectors, one a pool.
        sequences: Of live decoding.
        timed: Dtype that is timed.
        resampling: Of the intervals.

    Returns:
        Tables by name. A stream that a further pool plays beside the main one is called ``<stream>@<pool>``.
    """
    tables: dict[str, list[pd.DataFrame]] = {}
    for pool, folder in zip(cfg["pools"], folders, strict=True):
        own = sequences
        if len(sequences):
            played = [name for name, by in cfg["stream_pools"].items() if by == pool["name"]]
            own = sequences[sequences["stream"].isin(played)]
        for name, frame in _pool_statistics(pool, Path(folder), own, timed, resampling).items():
            if "stream" in frame and pool["name"] != MAIN:
                named = {
                    stream: f"{stream}@{pool['name']}"
                    for stream in frame["stream"].unique()
                    if cfg["stream_pools"].get(stream) != pool["name"]
                }
                frame = frame.replace({"stream": named})
            tables.setdefault(name, []).append(frame)
    found = {name: pd.concat(frames, ignore_index=True) for name, frames in tables.items()}
    return found | {"memory": found["memory"].drop_duplicates("drafter")}


def _pool_statistics(
    pool: dict, folder: Path, sequences: pd.DataFrame, timed: str, resampling: Resampling
) -> dict[str, pd.DataFrame]:
    """The same of one pool."""
    replays = read_replays([folder])
    drafters = [name for name in pool["arms"] if name != PLAIN]
    queries = per_query(replays["answers"], replays["oracles"], drafters)
    named = named_queries(queries, drafters, pool["generalist"])
    found = {
        "replay_queries": named,
        "streams": against_generalist(named, resampling),
        "memory": replays["memory"],
        "leaderboard": leaderboard(replays["arms"], queries, pool["generalist"], resampling),
        "gap": gap_closed(named, resampling).assign(pool=pool["name"]),
        "regret_by_length": regret_by_length(queries, resampling),
        "replay_curves": regret_over_tokens(replays["curves"], queries, resampling),
        "regret_growth": regret_growth(replays["curves"], queries, resampling),
        "replay_arms": arm_shares(replays["arms"]).assign(pool=pool["name"]),
    }
    if pool["name"] == MAIN:
        found["feedback"] = feedback(replays, queries, BANDIT, resampling)
    if "pool_sizes" in replays:
        found["regret_by_size"] = regret_by_size(replays["pool_sizes"], resampling)
        found["size_slopes"] = size_slopes(replays["pool_sizes"], resampling)
    if len(sequences):
        found["prediction"] = prediction(replays, sequences, timed, resampling)
    return found


def arm_shares(arms: pd.DataFrame) -> pd.DataFrame:
    """Share of every arm in a selector's rounds: columns stream, selector, arm, share."""
    rounds = arms.groupby(["stream", "selector", "arm"], observed=True)["rounds"].sum()
    total = rounds.groupby(["stream", "selector"], observed=True).transform("sum")
    return (rounds / total).rename("share").reset_index()


def gap_closed(named: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """How much of the generalist's distance to the best fixed arm of each query a selector closes, in modelled tokens
    per second.

    Returns:
        Columns stream, selector, metric, and the statistic: ``speed`` (tokens/s over the generalist's, minus 1; of the
        selector ``best_fixed_query`` the headroom) and ``closed`` (its share of that headroom).
    """
    found = []
    for stream, own in named.groupby("stream", observed=True):
        wide = own.pivot(index="prompt_id", columns="selector", values="seconds")
        first = own[own["selector"] == PLAIN].set_index("prompt_id").loc[wide.index]
        tokens = first["tokens"].to_numpy()
        generalist, best = wide["generalist"].to_numpy(), first["best_fixed_seconds"].to_numpy()
        found.append(
            {"stream": stream, "selector": "best_fixed_query", "metric": "speed"}
            | ratio_of_ratios_interval(tokens, best, tokens, generalist, resampling, minus=1.0).row("share")
        )
        for selector in wide.columns:
            if selector in ("generalist", PLAIN):
                continue
            seconds = wide[selector].to_numpy()
            head = {"stream": stream, "selector": selector}
            speed = ratio_of_ratios_interval(tokens, seconds, tokens, generalist, resampling, minus=1.0)
            found.append(head | {"metric": "speed"} | speed.row("share"))

            def closed(rows: np.ndarray, seconds=seconds, best=best, generalist=generalist) -> np.ndarray:
                # Tokens are the same for all, so that speeds are as the inverse of seconds.
                own, top, base = (1.0 / part[rows].sum(-1) for part in (seconds, best, generalist))
                return (own - base) / (top - base)

            if best.sum() < generalist.sum():
                share = bootstrap_interval(closed, [len(tokens)], resampling)
                found.append(head | {"metric": "closed"} | share.row("share of the gap"))
    return pd.DataFrame(found)
