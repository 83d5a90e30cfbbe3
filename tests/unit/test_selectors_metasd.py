"""MetaSD-UCB against a scalar reference and on bandits with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_worlds import World, bernoulli_world, play, random_world

from draftpool.selectors.base import make_selector


def naive_ucb(world: World, s: int, reward: str, beta: float) -> tuple[list[int], list[float]]:
    """Episode s in plain Python, written from the formula."""
    rounds, _, n = world.shape
    history: list[list[float]] = [[] for _ in range(n)]
    order = world.draws[0, s, 1:]
    previous, arms, propensities = None, [], []
    for t in range(rounds):
        if not world.active[t, s]:
            break
        offered = [i for i in range(n) if world.available[t, s, i]]
        untried = [i for i in offered if not history[i]]
        if untried:
            arm, propensity = min(untried, key=lambda i: order[i]), 1 / len(untried)
        else:
            index = {
                i: sum(history[i]) / len(history[i]) + beta * math.sqrt(2 * math.log(t) / len(history[i]))
                for i in offered
            }
            tied = [i for i in offered if index[i] == max(index.values())]
            if previous in tied:
                arm, propensity = previous, 1.0
            else:
                arm, propensity = min(tied, key=lambda i: world.draws[t, s, 1 + i]), 1 / len(tied)
        bd = world.reward_bd[t, s, arm]
        be = world.accepted[t, s, arm] / world.k_pool
        history[arm].append(be if reward == "be" else (0.0 if math.isnan(bd) else bd))
        previous = arm
        arms.append(arm)
        propensities.append(propensity)
    return arms, propensities


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 6),
    rounds=st.integers(1, 30),
    reward=st.sampled_from(["bd", "be"]),
    beta=st.sampled_from([0.05, 0.25, 1.0]),
)
def test_equals_the_scalar_reference(seed, n, rounds, reward, beta):
    world = random_world(seed, rounds, episodes=7, arms=n)
    selector = make_selector(
        {"kind": "metasd_ucb", "reward": reward, "beta": beta}, [str(i) for i in range(n)]
    )
    arms, propensity = play(selector, world)
    for s in range(7):
        expected, expected_propensity = naive_ucb(world, s, reward, beta)
        assert arms[: len(expected), s].tolist() == expected
        np.testing.assert_allclose(propensity[: len(expected), s], expected_propensity, rtol=1e-15)


def play_means(means: np.ndarray, episodes: int, beta: float, seed: int = 0) -> np.ndarray:
    """Arms [T, S] played by UCB on Bernoulli rewards."""
    cfg = {"kind": "metasd_ucb", "reward": "be", "beta": beta}
    return play(make_selector(cfg, list("abc")[: means.shape[1]]), bernoulli_world(means, episodes, seed))[0]


def test_d34_regret_grows_slower_than_the_horizon():
    """Every arm has its own bonus: wrong arms fade and four times the horizon costs less than three times."""
    arm_means = np.array([0.3, 0.5, 0.8])
    arms = play_means(np.tile(arm_means, (2000, 1)), episodes=150, beta=1.0)
    regret = (arm_means.max() - arm_means[arms]).cumsum(axis=0).mean(axis=1)
    assert regret[1999] < 3 * regret[499]
    wrong = (arms != 2).mean(axis=1)
    assert wrong[-200:].mean() < 0.06
    assert wrong[-200:].mean() < 0.35 * wrong[:200].mean()
    # A bonus shared by all arms is greedy: it keeps the arm that was lucky first in some episodes for good.
    assert ((arms[-200:] == 2).mean(axis=0) > 0.5).all()


def test_d36_an_arm_that_looked_bad_is_tried_again():
    """Best arm swaps at T/2: regret to the best fixed and to the best switching sequence are told apart."""
    means = np.empty((2000, 2))
    means[:1000], means[1000:] = [0.8, 0.3], [0.1, 0.8]
    arms = play_means(means, episodes=60, beta=1.0)
    earned = np.take_along_axis(means[:, None, :].repeat(60, axis=1), arms[..., None], axis=2)[..., 0]
    to_fixed = means.sum(axis=0).max() - earned.sum(axis=0)
    to_switching = means.max(axis=1).sum() - earned.sum(axis=0)
    np.testing.assert_allclose(to_switching - to_fixed, means.max(axis=1).sum() - means.sum(axis=0).max())
    assert (to_switching > to_fixed).all() and (to_switching > 0).all()
    assert (arms[:1000] == 1).sum(axis=0).min() > 1
    assert (arms[800:1000] == 0).mean() > 0.8
    assert (arms[1800:] == 1).mean() > 0.9
    # Staying with the early favourite would cost this much; UCB must recover most of the second half.
    assert to_switching.mean() < 0.6 * 1000 * 0.7


def test_beta_widens_exploration():
    arm_means = np.tile([0.3, 0.5, 0.8], (300, 1))
    wrong = [(play_means(arm_means, 100, beta)[100:] != 2).mean() for beta in (1.0, 4.0)]
    assert wrong[0] < wrong[1]


def test_warm_up_order_is_random_and_complete():
    arms = play_means(np.full((3, 3), 0.5), episodes=3000, beta=0.25)
    assert (np.sort(arms, axis=0) == np.arange(3)[:, None]).all()
    orders, counts = np.unique(arms, axis=1, return_counts=True)
    assert orders.shape[1] == 6
    np.testing.assert_allclose(counts / 3000, 1 / 6, atol=0.03)


@pytest.mark.parametrize("reward", ["bd", "be"])
def test_best_arm_wins_on_constant_rewards(reward):
    world = random_world(0, rounds=80, episodes=5, arms=3, always_available=True)
    world.active[:] = True
    world.k[:] = 4
    world.accepted[:] = [1, 3, 2]
    world.reward_bd[:] = [0.3, 0.5, 0.9]
    arms, _ = play(make_selector({"kind": "metasd_ucb", "reward": reward}, list("abc")), world)
    assert (arms[40:] == (1 if reward == "be" else 2)).mean() > 0.75
