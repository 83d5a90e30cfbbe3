"""Keyed draws: pure functions of their key."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from draftpool.draws import generator, seed_of, uniform

keys = st.lists(st.integers() | st.text(), min_size=1, max_size=4)


@given(keys, st.integers(1, 50))
def test_the_same_key_gives_the_same_numbers_however_many_are_drawn(key, size):
    first = uniform(size, *key)
    uniform(7, "something else in between")
    assert np.array_equal(first, uniform(size, *key))
    assert np.array_equal(first, uniform(100, *key)[:size])
    assert first.dtype == np.float64 and np.all((first > 0.0) & (first < 1.0))


@given(keys, keys)
def test_other_keys_give_other_numbers(one, two):
    assert np.array_equal(uniform(4, *one), uniform(4, *two)) == (one == two)
    assert (seed_of(*one) == seed_of(*two)) == (one == two)


def test_parts_of_a_key_are_kept_apart_and_typed():
    draws = [uniform(1, *key)[0] for key in (("ab", "c"), ("a", "bc"), ("abc",), ("1", 2), (1, "2"), (12,))]
    assert len(set(draws)) == len(draws)


def test_draws_of_successive_keys_are_uniform_and_uncorrelated():
    draws = np.array([uniform(2, "round", 0, index) for index in range(4000)])
    assert stats.kstest(draws[:, 0], "uniform").pvalue > 1e-3
    neighbours = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(draws))
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 4 / np.sqrt(len(draws))


def test_values_are_the_same_on_every_machine():
    assert uniform((2, 2), "example", 0).shape == (2, 2)
    assert generator("example", 0).integers(0, 1_000_000, 3).tolist() == [379006, 56946, 125635]
    assert 0 <= seed_of("example", 0) < 2**63
