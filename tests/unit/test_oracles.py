"""Oracles against enumeration of every sequence of drafters, and no selector beats them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_kinds import KINDS, context_of, label
from test_metrics import random_table

from draftpool.replay.answers import lay_out
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.oracles import best_switching_cost, best_switching_rounds, greedy_rounds
from draftpool.selectors.base import make_selector


def random_answers(seed: int, n: int, arms: int, k: int = 3):
    """One random answer of n tokens to commit."""
    names = "abcdefgh"[:arms]
    table = random_table(np.random.default_rng(seed), n + 1, k, names)
    gamma = [[0.5] * min(k, left) for left in table.left]
    full = [float(np.mean(slots)) for slots in gamma]
    return lay_out(table.assign(k=k, gamma=gamma, reward_bd_full=full), list(names))


def cheapest(committed: np.ndarray, left: int, costs, switch: float) -> float:
    """All sequences of arms for one answer [N, L + 1], tried one by one."""
    best = np.inf
    for sequence in itertools.product(range(len(committed)), repeat=left):
        rest, cost, previous = left, 0.0, None
        for arm in sequence:
            if rest == 0:
                break
            cost += costs[arm] + (switch if previous not in (None, arm) else 0.0)
            rest -= committed[arm, rest]
            previous = arm
        best = min(best, cost)
    return best


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 3), st.sampled_from([0.0, 0.2, 1.0, 50.0]))
def test_cost_program_equals_enumeration(seed, n, arms, switch):
    answers = random_answers(seed, n, arms)
    costs = np.random.default_rng(seed).uniform(0.5, 2.0, arms)
    committed = answers.committed_by_left()
    best = best_switching_cost(committed, costs, switch)
    for left in range(1, n + 1):
        assert best[0, left] == pytest.approx(cheapest(committed[0], left, costs, switch))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 3))
def test_rounds_program_is_the_cost_program_of_unit_costs(seed, n, arms):
    committed = random_answers(seed, n, arms).committed_by_left()
    rounds = best_switching_rounds(committed)
    np.testing.assert_allclose(rounds, best_switching_cost(committed, np.ones(arms)))
    # A prohibitive switch leaves the best fixed drafter.
    fixed = best_switching_cost(committed, np.ones(arms), 1e6)
    alone = [best_switching_rounds(committed[:, [arm]])[0] for arm in range(arms)]
    np.testing.assert_allclose(fixed[0], np.min(alone, axis=0))


def test_greedy_is_no_bound():
    """Taking the longest step loses to one fixed drafter on some tables: reach is not monotone."""
    worse = 0
    for seed in range(400):
        committed = random_answers(seed, 12, 3).committed_by_left()
        fixed = min(best_switching_rounds(committed[:, [arm]])[0, -1] for arm in range(3))
        assert best_switching_rounds(committed)[0, -1] <= min(greedy_rounds(committed)[0, -1], fixed)
        worse += greedy_rounds(committed)[0, -1] > fixed
    assert 0 < worse < 40


@pytest.mark.parametrize("cfg", KINDS, ids=label)
def test_no_selector_beats_the_oracles(cfg):
    for seed in range(5):
        answers = random_answers(seed, 40, 4)
        which, keys = np.zeros(20, int), [(s, 0, "p") for s in range(20)]
        context = context_of(4, 20)
        made = replay(make_selector(cfg, answers.arms), answers, which, EpisodeDraws(keys, 5), context)
        committed = answers.committed_by_left()
        assert (made.rounds >= best_switching_rounds(committed)[0, -1]).all()
        for switch in (0.0, 0.3):
            paid = np.where(made.arms >= 0, context.costs[made.arms], 0.0).sum(axis=0)
            switched = (made.arms[1:] != made.arms[:-1]) & (made.arms[1:] >= 0)
            paid += switch * switched.sum(axis=0)
            assert (paid >= best_switching_cost(committed, context.costs, switch)[0, -1] - 1e-9).all()


def test_d21_tokens_are_rounds_plus_accepted():
    """MetaSD's B = tau + sum of accepted, up to the bonus token for which an answer's last round has no room."""
    answers = random_answers(7, 60, 3)
    keys = [(s, 0, "p") for s in range(50)]
    made = replay(
        make_selector({"kind": "random"}, answers.arms), answers, np.zeros(50, int), EpisodeDraws(keys, 4)
    )
    played = made.arms >= 0
    total = np.where(played, made.committed, 0).sum(axis=0)
    accepted = np.where(played, made.accepted, 0).sum(axis=0)
    trimmed = (played & (made.accepted == made.committed)).sum(axis=0)
    assert (total == 60).all() and (trimmed <= 1).all() and trimmed.any()
    np.testing.assert_array_equal(made.rounds + accepted, 60 + trimmed)
