"""Does the training surrogate predict the acceptance length? Rank correlations, as in D-PACE."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
from scipy.stats import rankdata

from draftpool.analysis.bootstrap import Interval, Resampling, bootstrap_interval
from draftpool.analysis.metrics import ANSWER_KEY, walk


def surrogates(gamma: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Sum of cumulative products (S), and plain sum, of per-slot probabilities: lists [A] -> ([A], [A])."""
    lists = pa.array(gamma, from_pandas=True).cast(pa.list_(pa.float64()))
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    slot = np.arange(lengths.max(initial=0))
    # Slots outside the answer are 0: they end the cumulative product and add nothing to the sum.
    padded = np.zeros((len(lengths), len(slot)))
    padded[slot < lengths[:, None]] = lists.flatten().to_numpy(zero_copy_only=False)
    return np.cumprod(padded, axis=1).sum(axis=1), padded.sum(axis=1)


def per_prompt_surrogates(acceptance: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Surrogates beside measured lengths, per anchor and per prompt.

    Only anchors whose whole block lies inside the answer count: near its end, both sides shrink for a reason
    that has nothing to do with the drafter.

    Returns:
        (anchors, prompts): both with drafter, prompt_id, domain, product (S), sum and length; length is
        accepted + 1 at an anchor, and tau of the whole answer for a prompt (means over anchors and repeats).
    """
    whole = acceptance[acceptance["left"] > acceptance["k"]]
    product, total = surrogates(whole["gamma"])
    anchors = whole[ANSWER_KEY].assign(product=product, sum=total, length=whole["accepted"] + 1)
    keys = ["drafter", "prompt_id", "domain"]
    prompts = anchors.groupby(keys, observed=True)[["product", "sum"]].mean().reset_index()
    walked = walk(acceptance)
    tau = (
        walked.assign(length=walked["tokens"] / walked["rounds"])
        .groupby(keys, observed=True)["length"]
        .mean()
    )
    return anchors, prompts.merge(tau.reset_index(), on=keys)


def rank_correlations(acceptance: pd.DataFrame, resampling: Resampling) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Spearman correlation of each surrogate with the measured length, per drafter.

    Returns:
        (correlations, prompts): correlations has drafter, level (anchor | prompt), surrogate (product | sum
        | difference), value, low, high, n (prompts), unit, method; prompts are the points of the prompt
        level. Intervals resample prompts; ranks are taken once over the whole sample, which keeps thousands
        of resamples cheap.
    """
    anchors, prompts = per_prompt_surrogates(acceptance)
    rows = []
    for level, frame in (("anchor", anchors), ("prompt", prompts)):
        for drafter, group in frame.groupby("drafter", observed=True):
            for name, found in _spearman(group, resampling).items():
                rows.append(
                    {"drafter": drafter, "level": level, "surrogate": name, **found.row("Spearman rho")}
                )
    columns = ["drafter", "level", "surrogate", "value", "low", "high", "n", "unit", "method"]
    return pd.DataFrame(rows, columns=columns), prompts


def _spearman(group: pd.DataFrame, resampling: Resampling) -> dict[str, Interval]:
    codes, names = pd.factorize(group["prompt_id"])
    length = _centred_ranks(group["length"])
    moments = {}
    for name in ("product", "sum"):
        x = _centred_ranks(group[name])
        # Sums per prompt suffice for the correlation of any resample of prompts: [prompts, 6].
        parts = (np.ones_like(x), x, length, x * x, length * length, x * length)
        moments[name] = np.stack(
            [np.bincount(codes, weights=part, minlength=len(names)) for part in parts], axis=1
        )

    def rho(which: str, rows: np.ndarray) -> np.ndarray:
        n, x, y, xx, yy, xy = np.moveaxis(moments[which][rows].sum(axis=-2), -1, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (xy - x * y / n) / np.sqrt((xx - x * x / n) * (yy - y * y / n))

    found = {
        name: bootstrap_interval(lambda i, name=name: rho(name, i), [len(names)], resampling)
        for name in moments
    }
    found["difference"] = bootstrap_interval(
        lambda i: rho("product", i) - rho("sum", i), [len(names)], resampling
    )
    return found


def _centred_ranks(values: pd.Series) -> np.ndarray:
    # Centred on 0 and scaled to 1: large ranks would cost digits in the differences above.
    ranks = rankdata(values)
    return (ranks - ranks.mean()) / len(ranks)
