"""What live decoding measured: speed-up, MAT, time split, arm shares, agreement with the acceptance table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from draftpool.analysis.bootstrap import (
    Interval,
    Resampling,
    mean_interval,
    point,
    ratio_interval,
    ratio_of_ratios_interval,
)
from draftpool.analysis.metrics import SEQUENCE_KEY, check_decoding, truncate, walk
from draftpool.analysis.regret import FIXED
from draftpool.artefacts import read_table
from draftpool.selectors.base import PLAIN

CELL = ["dtype", "stream", "selector"]
PARTS = ("draft", "verify", "evaluate", "select", "switch", "commit")


def read_decodes(folders: list[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read and check the step and sequence tables of several decoding runs; both empty when there are none.

    Raises:
        DraftpoolError: See ``metrics.check_decoding``.
    """
    if not folders:
        return pd.DataFrame(), pd.DataFrame()
    steps = pd.concat([read_table(folder / "steps.parquet") for folder in folders], ignore_index=True)
    sequences = pd.concat([read_table(folder / "sequences.parquet") for folder in folders], ignore_index=True)
    check_decoding(steps, sequences)
    return steps, sequences


def timed_dtype(sequences: pd.DataFrame) -> str:
    """Dtype that speed-ups are quoted in: bfloat16 where it was decoded, which is what a user would run."""
    return "bfloat16" if (sequences["dtype"] == "bfloat16").any() else "float32"


def exact_dtype(sequences: pd.DataFrame) -> str:
    """Dtype that counts (MAT, regret, arm shares) are quoted in: float32 where it was decoded."""
    return "float32" if (sequences["dtype"] == "float32").any() else "bfloat16"


def prompt_means(sequences: pd.DataFrame) -> pd.DataFrame:
    """Average seeds and repeats within a prompt.

    Returns:
        One row per (dtype, stream, selector, prompt): decoded and plain_decoded (tokens after the prefill
        token; one counter for both sides of every ratio), rounds, wall, plain_wall, prefill (s), tokens,
        plain_tokens (prefill token included).
    """
    columns = {
        "decoded": sequences["n_tokens"] - 1,
        "plain_decoded": sequences["plain_n_tokens"] - 1,
        "tokens": sequences["n_tokens"],
        "plain_tokens": sequences["plain_n_tokens"],
        "wall": sequences["wall_time"],
        "plain_wall": sequences["plain_wall_time"],
        "prefill": sequences["t_prefill"],
    }
    frame = sequences[[*CELL, "prompt_id", "domain", "rounds"]].assign(**columns)
    return frame.groupby([*CELL, "prompt_id", "domain"], observed=True).mean(numeric_only=True).reset_index()


def selector_statistics(sequences: pd.DataFrame, domains: list[str], resampling: Resampling) -> pd.DataFrame:
    """Speed-up and MAT of every selector on every stream.

    Returns:
        Columns dtype, stream, selector, scope (a domain or ``all``), metric, value, low, high, n (prompts),
        unit, method. Metrics: speedup (ratio of totals of decode time per token, plain against selector) and
        mat; over all domains also speedup_mean_of_ratios, speedup_end_to_end (target prefill on both sides),
        mat_macro, tokens_per_s, plain_tokens_per_s.
    """
    rows = []
    for key, cell in prompt_means(sequences).groupby(CELL, observed=True):
        for scope in ("all", *domains):
            group = cell if scope == "all" else cell[cell["domain"] == scope]
            # An answer that ends at its first token has no round: it has no tau and no speed-up.
            group = group[(group["rounds"] > 0) & (group["plain_decoded"] > 0)]
            if group.empty:
                continue
            head = dict(zip(CELL, key, strict=True)) | {"scope": scope}
            found = _headline(group, resampling) + (_beside(group, resampling) if scope == "all" else [])
            rows += [{**head, "metric": name, **interval.row(unit)} for name, interval, unit in found]
    return pd.DataFrame(rows)


def _headline(group: pd.DataFrame, resampling: Resampling) -> list[tuple[str, Interval, str]]:
    ratios = (group["decoded"], group["wall"], group["plain_decoded"], group["plain_wall"])
    return [
        ("speedup", ratio_of_ratios_interval(*ratios, resampling), "x plain decoding"),
        ("mat", ratio_interval(group["decoded"], group["rounds"], resampling), "tokens/target call"),
    ]


def _beside(group: pd.DataFrame, resampling: Resampling) -> list[tuple[str, Interval, str]]:
    speed, plain_speed = group["decoded"] / group["wall"], group["plain_decoded"] / group["plain_wall"]
    whole, plain_whole = group["prefill"] + group["wall"], group["prefill"] + group["plain_wall"]
    end_to_end = ratio_of_ratios_interval(
        group["tokens"], whole, group["plain_tokens"], plain_whole, resampling
    )
    return [
        ("speedup_mean_of_ratios", mean_interval(speed / plain_speed, resampling), "x plain decoding"),
        ("speedup_end_to_end", end_to_end, "x plain decoding"),
        ("mat_macro", mean_interval(group["decoded"] / group["rounds"], resampling), "tokens/target call"),
        ("tokens_per_s", ratio_interval(group["decoded"], group["wall"], resampling), "tokens/s"),
        (
            "plain_tokens_per_s",
            ratio_interval(group["plain_decoded"], group["plain_wall"], resampling),
            "tokens/s",
        ),
    ]


def time_split(steps: pd.DataFrame, sequences: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """Where decode time goes, in ms per committed token.

    Returns:
        Columns dtype, stream, selector, part (draft, verify, evaluate, select, switch, commit), value, low, high, n,
        unit, method, share (of the wall time, which is the sum of the parts). ``switch`` holds drafter prefill and
        catch-up.
    """
    named = {f"t_{part}": part for part in PARTS}
    per_sequence = (
        steps.groupby(SEQUENCE_KEY, observed=True)[list(named)].sum().rename(columns=named).reset_index()
    )
    merged = sequences.merge(per_sequence, on=SEQUENCE_KEY, how="left").fillna(dict.fromkeys(PARTS, 0.0))
    merged["decoded"] = merged["n_tokens"] - 1
    columns = ["decoded", "wall_time", *PARTS]
    means = merged.groupby([*CELL, "prompt_id"], observed=True)[columns].mean().reset_index()
    rows = []
    for key, group in means.groupby(CELL, observed=True):
        group = group[group["decoded"] > 0]
        for part in PARTS:
            if group.empty:
                continue
            found = ratio_interval(group[part] * 1000, group["decoded"], resampling)
            share = float(group[part].sum() / group["wall_time"].sum())
            rows.append(
                {**dict(zip(CELL, key, strict=True)), "part": part, **found.row("ms/token"), "share": share}
            )
    return pd.DataFrame(rows)


def arm_shares(steps: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """Share of rounds in which a selector played each arm, by domain; fixed drafters and plain are left out.

    Returns:
        Columns dtype, stream, selector, domain (or ``all``), arm, value, low, high, n (prompts), unit,
        method. Seeds and repeats are averaged within a prompt.
    """
    learners = steps[~steps["selector"].str.startswith(FIXED) & (steps["selector"] != "plain")]
    rows = []
    for key, cell in learners.groupby(CELL, observed=True):
        # Rounds per sequence first, so that a seed with more rounds weighs as much as any other.
        played = cell.pivot_table(
            index=["domain", "prompt_id", "selector_seed", "repeat"],
            columns="arm",
            values="round",
            aggfunc="count",
            observed=True,
        ).fillna(0.0)
        played = played.groupby(["domain", "prompt_id"], observed=True).mean()
        groups = {"all": played} | {name: group for name, group in played.groupby("domain", observed=True)}
        for domain, group in groups.items():
            head = dict(zip(CELL, key, strict=True)) | {"domain": domain}
            total = group.sum(axis=1)
            rows += [
                {**head, "arm": arm, **ratio_interval(group[arm], total, resampling).row("share of rounds")}
                for arm in group.columns
            ]
    return pd.DataFrame(rows)


def mismatches(sequences: pd.DataFrame) -> pd.DataFrame:
    """Count sequences that differ from plain decoding (only half precision may), per cell.

    ``max_top2_margin`` is the largest top-2 logit margin of the target at a first mismatch: a small one is a
    rounding tie.
    """
    differs = ~sequences["matches_plain"].astype(bool)
    frame = sequences.assign(differs=differs, margin=sequences["top2_margin"].where(differs))
    grouped = frame.groupby(CELL, observed=True)
    return grouped.agg(
        n=("differs", "size"), mismatches=("differs", "sum"), max_top2_margin=("margin", "max")
    ).reset_index()


def agreement(sequences: pd.DataFrame, acceptance: pd.DataFrame) -> pd.DataFrame:
    """Compare live fixed drafters with the acceptance table, cut to the live length (D-28).

    In float32 they must agree. In half precision the text may flip at near-ties, so that only answers of the float32
    text are compared, and of those a drafter's own flips may still change a round.

    Returns:
        Columns dtype, stream, drafter, n (answers compared), other_text (half precision: answers left out), shortened
        (of the compared, answers that the live limit cut), not_compared (answers absent from the table or longer than
        it), agreeing (answers with the same rounds), max_difference_rounds, max_difference_tau.
    """
    answer = ["stream", "prompt_id", "repeat"]
    live = sequences[sequences["selector"].str.startswith(FIXED)]
    live = live.assign(drafter=live["selector"].str.removeprefix(FIXED))
    exact = sequences[(sequences["dtype"] == "float32") & (sequences["selector"] == PLAIN)]
    texts = exact.drop_duplicates(answer).set_index(answer)["sha256"].rename("exact_text")
    live = live.join(texts, on=answer)
    own = (
        acceptance[acceptance["stream"] == ""]
        .groupby(["prompt_id", "repeat"], observed=True)[["position", "left"]]
        .first()
        .sum(axis=1)
        + 1
    )
    rows = []
    for (dtype, stream, drafter), group in live.groupby(["dtype", "stream", "drafter"], observed=True):
        group = group[group["rounds"] > 0].drop_duplicates(["prompt_id", "repeat"])
        other = (
            group["sha256"] != group["exact_text"] if dtype != "float32" else pd.Series(False, group.index)
        )
        head = {"dtype": dtype, "stream": stream, "drafter": drafter, "other_text": int(other.sum())}
        group = group[~other]
        # A drafter that remembers its stream has rows of every stream, the others have one row for all.
        rows_of_stream = (acceptance["drafter"] == drafter) & acceptance["stream"].isin(["", stream])
        table = truncate(acceptance[rows_of_stream], group[["prompt_id", "repeat", "n_tokens"]])
        if table.empty:
            rows.append({**head, "n": 0, "shortened": 0, "not_compared": len(group), "agreeing": 0})
            continue
        walked = walk(table)[["prompt_id", "repeat", "tokens", "rounds"]]
        both = group.merge(walked, on=["prompt_id", "repeat"], suffixes=("", "_walk"))
        both = both.merge(own.rename("own").reset_index(), on=["prompt_id", "repeat"])
        taus = both["tokens"] / both[["rounds", "rounds_walk"]].T
        difference = (both["rounds"] - both["rounds_walk"]).abs()
        rows.append(
            {
                **head,
                "n": len(both),
                "shortened": int((both["n_tokens"] < both["own"]).sum()),
                "not_compared": len(group) - len(both),
                "agreeing": int((difference == 0).sum()),
                "max_difference_rounds": int(difference.max()),
                "max_difference_tau": float((taus.loc["rounds"] - taus.loc["rounds_walk"]).abs().max()),
            }
        )
    columns = ["dtype", "stream", "drafter", "n", "other_text", "shortened", "not_compared", "agreeing"]
    columns += ["max_difference_rounds", "max_difference_tau"]
    return pd.DataFrame(rows, columns=columns)


def best_fixed_speedup(selectors: pd.DataFrame, stream: str, dtype: str) -> pd.Series | None:
    """Row of the fixed drafter with the highest speed-up on a stream (chosen on that very stream)."""
    rows = selectors[
        (selectors["stream"] == stream)
        & (selectors["dtype"] == dtype)
        & (selectors["scope"] == "all")
        & (selectors["metric"] == "speedup")
        & selectors["selector"].str.startswith(FIXED)
    ]
    return None if rows.empty else rows.loc[rows["value"].idxmax()]


def benchmark_times(files: list[Path]) -> pd.DataFrame:
    """Sum the wall seconds of benchmark files named ``<stage>-<id>.tsv``: a row per stage, n = jobs."""
    seconds: dict[str, list[float]] = {}
    for file in files:
        table = pd.read_csv(file, sep="\t")
        seconds.setdefault(file.name.split("-")[0].removesuffix(".tsv"), []).append(float(np.sum(table["s"])))
    rows = [
        {"stage": stage, **point(sum(jobs), len(jobs)).row("s")} for stage, jobs in sorted(seconds.items())
    ]
    return pd.DataFrame(rows, columns=["stage", "value", "low", "high", "n", "unit", "method"])
