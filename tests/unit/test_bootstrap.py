"""Intervals and tests, against naive references and by coverage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from draftpool.analysis import bootstrap
from draftpool.analysis.bootstrap import Resampling

QUICK = Resampling(n_resamples=400, confidence=0.95, seed=0)


def test_the_mean_interval_is_scipys_bca():
    x = np.random.default_rng(0).exponential(size=30)
    found = bootstrap.mean_interval(x, QUICK)
    wanted = scipy_stats.bootstrap(
        (x,),
        lambda v, axis: np.mean(v, axis=axis),
        n_resamples=400,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    assert (found.value, found.n, found.method) == (pytest.approx(x.mean()), 30, "BCa")


def test_a_ratio_is_one_of_totals_with_prompts_paired():
    rng = np.random.default_rng(1)
    tokens, rounds = rng.integers(20, 60, 25), rng.integers(10, 20, 25)
    found = bootstrap.ratio_interval(tokens, rounds, QUICK)
    assert found.value == pytest.approx(tokens.sum() / rounds.sum())
    resampled = [
        tokens[i].sum() / rounds[i].sum()
        for i in (np.random.default_rng(s).integers(0, 25, 25) for s in range(2000))
    ]
    assert (found.low, found.high) == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.12)


def test_strata_are_resampled_by_themselves():
    # Two domains without spread inside, but far apart: a mean over domains has no spread at all.
    found = bootstrap.mean_of_ratios_over_strata([[1.0] * 5, [9.0] * 5], [[1.0] * 5, [1.0] * 5], QUICK)
    assert (found.value, found.low, found.high, found.n) == (5, 5, 5, 10)
    assert found.method == "percentile"


def test_paired_differences_are_tighter_than_unpaired_ones():
    rng = np.random.default_rng(2)
    tokens = np.full(40, 60.0)
    hard = rng.uniform(20, 50, 40)
    found = bootstrap.difference_over_strata([tokens], [hard - 1], [hard], QUICK)
    assert found.value == pytest.approx(tokens.sum() / (hard - 1).sum() - tokens.sum() / hard.sum())
    assert found.low > 0
    alone = bootstrap.ratio_interval(tokens, hard, QUICK)
    assert found.high - found.low < (alone.high - alone.low) / 3


@pytest.mark.parametrize(
    ("values", "low", "high", "method"),
    [([2.0, 2.0, 2.0], 2.0, 2.0, "percentile"), ([2.0], None, None, "none"), ([], None, None, "none")],
)
def test_degenerate_samples_are_flagged(values, low, high, method):
    found = bootstrap.mean_interval(values, QUICK)
    assert found.method == method
    assert (
        (np.isnan(found.low) and np.isnan(found.high))
        if low is None
        else (found.low, found.high) == (low, high)
    )


def test_intervals_are_reproducible_and_depend_on_the_seed():
    x = np.random.default_rng(0).normal(size=20)
    first, again = bootstrap.mean_interval(x, QUICK), bootstrap.mean_interval(x, QUICK)
    other = bootstrap.mean_interval(x, Resampling(400, 0.95, 1))
    assert first == again
    assert first.low != other.low


def test_coverage_of_the_bca_interval_on_skewed_data():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        found = bootstrap.mean_interval(rng.exponential(size=40), Resampling(300, 0.9, 0))
        inside += found.low <= 1.0 <= found.high
    assert 0.82 <= inside / 200 <= 0.96


def test_the_median_ratio_covers_a_known_overhead():
    rng = np.random.default_rng(0)
    found = bootstrap.median_ratio_interval(1.02 * rng.normal(1, 0.01, 400), rng.normal(1, 0.01, 400), QUICK)
    assert found.low < 0.02 < found.high
    assert found.high - found.low < 0.01
    assert (found.n, found.method) == (800, "percentile")


def test_a_proportion_gets_wilsons_interval():
    found = bootstrap.proportion_interval(0, 50, 0.95)
    z = scipy_stats.norm.ppf(0.975)
    assert (found.value, found.low) == (0, pytest.approx(0, abs=1e-12))
    assert found.high == pytest.approx(z**2 / (50 + z**2))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_equals_its_definition(p):
    adjusted = bootstrap.holm(p)
    order = np.argsort(p, kind="stable")
    running = 0.0
    for rank, i in enumerate(order):
        running = max(running, (len(p) - rank) * p[i])
        assert adjusted[i] == pytest.approx(min(1.0, running))


def test_wilcoxon_is_scipys_and_one_for_no_difference():
    x = np.random.default_rng(0).normal(0.5, 1, 30)
    assert bootstrap.wilcoxon_p(x) == pytest.approx(scipy_stats.wilcoxon(x).pvalue)
    assert bootstrap.wilcoxon_p(np.zeros(5)) == 1.0
