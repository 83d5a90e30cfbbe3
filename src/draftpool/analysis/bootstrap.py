"""Intervals and tests over prompts.

Prompts are the units: callers average seeds and repeats within a prompt first. A *stratum* is a set of
prompts that is resampled by itself (a domain), so that every resample holds as many prompts of each domain as
the study does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats as scipy_stats

# Gathers [batch, n] floats per stratum: 64 MB at most, whatever the number of prompts.
_MAX_GATHERED = 8_000_000


@dataclass(frozen=True)
class Resampling:
    """How intervals are drawn: number of resamples, confidence level and the seed of the resampling."""

    n_resamples: int = 2000
    confidence: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class Interval:
    """A statistic with its bootstrap interval.

    ``method`` is ``BCa``; ``percentile`` where BCa is undefined (a jackknife without spread) or was not asked
    for; ``none`` (low and high are NaN) where fewer than two prompts, or non-finite resamples, leave nothing
    to say.
    """

    value: float
    low: float
    high: float
    n: int
    method: str

    def scaled(self, factor: float) -> Interval:
        """Return the interval of ``factor`` (> 0) times the statistic."""
        return Interval(self.value * factor, self.low * factor, self.high * factor, self.n, self.method)

    def exponent(self, base: float) -> Interval:
        """Return the interval of a, where ``base`` ** a (``base`` > 1) is the statistic; NaN if it is not positive."""
        ends = [
            math.log(end) / math.log(base) if end > 0.0 else math.nan
            for end in (self.value, self.low, self.high)
        ]
        return Interval(ends[0], ends[1], ends[2], self.n, self.method)

    def row(self, unit: str) -> dict[str, object]:
        """Return the columns that every tidy table of this package uses for a statistic."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "n": self.n,
            "unit": unit,
            "method": self.method,
        }


def point(value: float, n: int) -> Interval:
    """Return a count or a total that has no sampling interval."""
    return Interval(float(value), float("nan"), float("nan"), int(n), "none")


def bootstrap_interval(
    statistic: Callable[..., np.ndarray], sizes: Sequence[int], resampling: Resampling, method: str = "BCa"
) -> Interval:
    """Bootstrap a statistic of resampled rows.

    Args:
        statistic: Takes one integer array ``[..., n_s]`` of row numbers per stratum and returns ``[...]``.
        sizes: Number of rows of each stratum; strata are resampled independently, single rows stay as they
            are.
        resampling: Number of resamples, confidence and seed.
        method: ``BCa`` (falls back to ``percentile`` where degenerate) or ``percentile``.
    """
    moving = [s for s, size in enumerate(sizes) if size > 1]

    def of_moving(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        full = [np.zeros(1, dtype=int)] * len(sizes)
        for s, sample in zip(moving, samples, strict=True):
            full[s] = np.moveaxis(sample, axis, -1)
        return statistic(*full)

    value = (
        float(statistic(*(np.arange(size) for size in sizes))) if min(sizes, default=0) > 0 else float("nan")
    )
    if not moving or not np.isfinite(value):
        return Interval(value, float("nan"), float("nan"), int(sum(sizes)), "none")
    data = tuple(np.arange(sizes[s]) for s in moving)
    batch = max(1, min(resampling.n_resamples, _MAX_GATHERED // max(len(rows) for rows in data)))
    for attempt in dict.fromkeys((method, "percentile")):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = scipy_stats.bootstrap(
                data,
                of_moving,
                n_resamples=resampling.n_resamples,
                batch=batch,
                vectorized=True,
                axis=-1,
                confidence_level=resampling.confidence,
                method=attempt,
                rng=np.random.default_rng(resampling.seed),
            ).confidence_interval
        if np.isfinite(found.low) and np.isfinite(found.high):
            return Interval(value, float(found.low), float(found.high), int(sum(sizes)), attempt)
    return Interval(value, float("nan"), float("nan"), int(sum(sizes)), "none")


def mean_interval(values: ArrayLike, resampling: Resampling) -> Interval:
    """Interval of the mean of one value per prompt, [n]; also that of paired differences."""
    x = np.asarray(values, dtype=float)
    return bootstrap_interval(lambda i: x[i].mean(-1), [len(x)], resampling)


def ratio_interval(numerator: ArrayLike, denominator: ArrayLike, resampling: Resampling) -> Interval:
    """Interval of sum(numerator) / sum(denominator), prompts paired, both [n]."""
    a, b = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    return bootstrap_interval(lambda i: _ratio(a, b, i), [len(a)], resampling)


def ratio_of_ratios_interval(
    a: ArrayLike, b: ArrayLike, c: ArrayLike, d: ArrayLike, resampling: Resampling, minus: float = 0.0
) -> Interval:
    """Interval of (sum a / sum b) / (sum c / sum d) - ``minus``, paired, all [n]: a speed-up or gain."""
    a, b, c, d = (np.asarray(x, dtype=float) for x in (a, b, c, d))
    return bootstrap_interval(lambda i: _ratio(a, b, i) / _ratio(c, d, i) - minus, [len(a)], resampling)


def mean_of_ratios_over_strata(
    numerators: Sequence[ArrayLike], denominators: Sequence[ArrayLike], resampling: Resampling
) -> Interval:
    """Interval of the mean over strata (domains) of sum(numerator) / sum(denominator), arrays per stratum."""
    a, b = _floats(numerators), _floats(denominators)
    return bootstrap_interval(lambda *rows: _mean_ratio(a, b, rows), [len(x) for x in a], resampling)


def difference_over_strata(
    numerators: Sequence[ArrayLike],
    denominators: Sequence[ArrayLike],
    other_denominators: Sequence[ArrayLike],
    resampling: Resampling,
) -> Interval:
    """Interval of the difference of two means over strata of ratios that share numerators, prompts paired."""
    a, b, c = _floats(numerators), _floats(denominators), _floats(other_denominators)

    def statistic(*rows: np.ndarray) -> np.ndarray:
        return _mean_ratio(a, b, rows) - _mean_ratio(a, c, rows)

    return bootstrap_interval(statistic, [len(x) for x in a], resampling)


def median_ratio_interval(numerator: ArrayLike, denominator: ArrayLike, resampling: Resampling) -> Interval:
    """Percentile interval of median(numerator) / median(denominator) - 1 of two independent samples.

    Percentile, since the jackknife behind BCa is inconsistent for a median.
    """
    a, b = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    statistic = lambda i, j: np.median(a[i], -1) / np.median(b[j], -1) - 1  # noqa: E731
    return bootstrap_interval(statistic, [len(a), len(b)], resampling, method="percentile")


def proportion_interval(successes: int, trials: int, confidence: float) -> Interval:
    """Wilson interval of a proportion of independent trials."""
    if trials == 0:
        return point(float("nan"), 0)
    found = scipy_stats.binomtest(int(successes), int(trials)).proportion_ci(confidence, method="wilson")
    return Interval(successes / trials, float(found.low), float(found.high), int(trials), "wilson")


def wilcoxon_p(differences: ArrayLike) -> float:
    """Two-sided p value of the Wilcoxon signed-rank test on paired differences, [n]; 1 when all are zero."""
    x = np.asarray(differences, dtype=float)
    if not np.any(x):
        return 1.0
    return float(scipy_stats.wilcoxon(x).pvalue)


def holm(p_values: ArrayLike) -> np.ndarray:
    """Return Holm's step-down adjusted p values, [n] -> [n]."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return adjusted


def _floats(arrays: Sequence[ArrayLike]) -> list[np.ndarray]:
    return [np.asarray(x, dtype=float) for x in arrays]


def _ratio(a: np.ndarray, b: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return a[rows].sum(-1) / b[rows].sum(-1)


def _mean_ratio(a: list[np.ndarray], b: list[np.ndarray], rows: Sequence[np.ndarray]) -> np.ndarray:
    return sum(_ratio(x, y, i) for x, y, i in zip(a, b, rows, strict=True)) / len(a)
