"""HedgeSpec: NormalHedge's equation and bound, delayed losses against a scalar reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from selector_worlds import World, play, random_world

from draftpool.selectors.base import Completed, Feedback, make_selector
from draftpool.selectors.normal_hedge import normal_hedge_scale, normal_hedge_weights

regrets = st.lists(st.floats(-50, 50), min_size=1, max_size=8)


def naive_weights(regret: list[float]) -> list[float]:
    """NormalHedge by the textbook, with another root finder; rounding noise of 1e-12 is no regret."""
    positive = [r if r > 1e-12 else 0.0 for r in regret]
    n, largest = len(positive), max(positive)
    if largest == 0:
        return [1 / n] * n
    scaled = [r / largest for r in positive]
    c = brentq(
        lambda c: sum(math.exp(x * x / (2 * c)) for x in scaled) / n - math.e,
        1 / (2 * (1 + math.log(n))) * (1 - 1e-9),
        0.5 * (1 + 1e-9),
        xtol=1e-15,
        rtol=1e-14,
    )
    weights = [x / c * math.exp(x * x / (2 * c)) for x in scaled]
    return [w / sum(weights) for w in weights]


def naive_hedgespec(world: World, s: int) -> list[int]:
    """Episode s in plain Python: the weights of each round are kept until its loss arrives."""
    rounds, _, n = world.shape
    regret = [0.0] * n
    played, arms = [], []
    for t in range(rounds):
        if not world.active[t, s]:
            break
        weights = [w if world.available[t, s, i] else 0.0 for i, w in enumerate(naive_weights(regret))]
        if sum(weights) == 0:
            weights = [float(a) for a in world.available[t, s]]
        weights = [w / sum(weights) for w in weights]
        played.append(weights)
        draw, reached = world.draws[t, s, 0], 0.0
        for arm in (i for i in range(n) if weights[i] > 0):
            reached += weights[arm]
            if draw < reached:
                break
        arms.append(arm)
        for r in (r for e, r in world.arrivals[t] if e == s):
            loss = [1 - (a + 1) / (world.k_pool + 1) for a in world.accepted[r, s]]
            mixed = sum(w * f for w, f in zip(played[r], loss, strict=True))
            regret = [total + mixed - f for total, f in zip(regret, loss, strict=True)]
    return arms


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 6), rounds=st.integers(1, 40))
def test_delayed_losses_equal_the_scalar_reference(seed, n, rounds):
    """Losses arrive late, out of order or never; episodes end at different times."""
    world = random_world(seed, rounds, episodes=7, arms=n)
    arms, _ = play(make_selector({"kind": "hedgespec"}, [str(i) for i in range(n)]), world)
    for s in range(7):
        expected = naive_hedgespec(world, s)
        assert arms[: len(expected), s].tolist() == expected


@settings(deadline=None, max_examples=200)
@given(regret=regrets, scale=st.sampled_from([1e-9, 1.0, 1e6]))
def test_potential_equation_is_solved(regret, scale):
    values = np.array([regret]) * scale
    c = normal_hedge_scale(values)[0]
    weights = normal_hedge_weights(values)[0]
    positive = np.where(values[0] > 1e-12, values[0], 0.0)
    if not positive.any():
        assert np.isnan(c)
        np.testing.assert_allclose(weights, 1 / len(regret))
        return
    assert abs(np.exp(positive**2 / (2 * c)).mean() - math.e) < 1e-10
    raw = positive / c * np.exp(positive**2 / (2 * c))
    np.testing.assert_allclose(weights, raw / raw.sum(), rtol=1e-9, atol=1e-300)
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(weights, naive_weights(list(values[0])), rtol=1e-8, atol=1e-12)


def hedge_regret(losses: np.ndarray, episodes: int = 1) -> np.ndarray:
    """Expected regret to every arm [S, N] of NormalHedge on immediate losses [T, S, N]."""
    rounds, n = losses.shape[0], losses.shape[2]
    selector = make_selector({"kind": "hedgespec"}, [str(i) for i in range(n)])
    selector.reset(n, np.full(n, 4), episodes)
    rng = np.random.default_rng(0)
    zeros = np.zeros(episodes)
    expected = np.zeros((episodes, n))
    for t in range(rounds):
        weights = normal_hedge_weights(selector.regret)
        expected += (weights * losses[t]).sum(axis=1, keepdims=True) - losses[t]
        arms, _ = selector.select(t, np.ones((episodes, n), bool), rng.random((episodes, n + 1)))
        completed = Completed(np.arange(episodes), np.full(episodes, t), losses[t])
        flags = np.ones(episodes, dtype=bool)
        selector.update(arms, Feedback(arms, arms, arms, zeros, zeros, flags, completed))
    np.testing.assert_allclose(selector.regret, expected, atol=1e-9)
    return selector.regret


@pytest.mark.parametrize("pattern", ["iid", "swap", "alternate", "follow_the_leader_trap"])
@pytest.mark.parametrize("n", [2, 16])
def test_regret_stays_within_the_bound(pattern, n):
    """Chaudhuri et al. 2009, Theorem 1, epsilon = 1/N, delta = 1/2 (general knowledge); its leading term."""
    rounds, episodes = 800, 4
    rng = np.random.default_rng(n)
    losses = rng.random((rounds, episodes, n))
    if pattern == "swap":
        losses[: rounds // 2, :, 0] *= 0.3
        losses[rounds // 2 :, :, 1] *= 0.1
    if pattern == "alternate":
        losses[:] = (np.arange(rounds)[:, None, None] + np.arange(n)) % n / max(1, n - 1)
    if pattern == "follow_the_leader_trap":
        losses[:, :, :2] = (np.arange(rounds)[:, None, None] + np.arange(2)) % 2
        losses[0, :, :2] = [0.5, 0.0]
    regret = hedge_regret(losses, episodes).max()
    delta, log_n = 0.5, math.log(n)
    inner = 3 * (1 + 50 * delta) * rounds + 16 * log_n**2 / delta * (10.2 / delta**2 + log_n)
    assert regret <= math.sqrt((1 + log_n) * inner)
    assert regret <= math.sqrt(3 * (1 + log_n) * rounds)


def test_best_fixed_arm_takes_the_play():
    losses = np.broadcast_to(np.array([0.6, 0.2, 0.5]), (300, 1, 3)).copy()
    regret = hedge_regret(losses)
    assert regret.argmax() == 1
    assert normal_hedge_weights(regret)[0, 1] > 0.999


def test_unavailable_arms_get_nothing_even_when_all_weight_was_theirs():
    selector = make_selector({"kind": "hedgespec"}, list("abc"))
    selector.reset(3, np.array([4, 4, 4]), 400)
    selector.regret[:] = [5.0, -1.0, -2.0]
    rng = np.random.default_rng(0)
    available = np.tile([False, True, True], (400, 1))
    arms, propensity = selector.select(0, available, rng.random((400, 4)))
    assert set(arms) == {1, 2}
    np.testing.assert_array_equal(propensity, 0.5)
    arms, propensity = selector.select(1, np.ones((400, 3), bool), rng.random((400, 4)))
    assert set(arms) == {0}
    np.testing.assert_array_equal(propensity, 1.0)


def test_rounding_noise_decides_nothing():
    weights = normal_hedge_weights(np.array([[1e-16, 0.0, -3e-17], [-1.0, 0.0, -2.0]]))
    np.testing.assert_array_equal(weights, 1 / 3)


def test_history_outlives_its_first_allocation():
    """A loss that arrives a hundred rounds late meets the weights of its own round."""
    selector = make_selector({"kind": "hedgespec"}, ["a", "b"])
    selector.reset(2, np.array([4, 4]), 1)
    available, draws, one = np.ones((1, 2), bool), np.full((1, 3), 0.4), np.ones(1, dtype=np.int64)
    flags, zeros = np.ones(1, dtype=bool), np.zeros(1)
    for t in range(120):
        arms, _ = selector.select(t, available, draws)
        # Round 3's loss is held back; all others say that arm b is better.
        known = [t] if t != 3 else []
        known += [3] if t == 119 else []
        completed = Completed(0 * np.array(known), np.array(known, int), np.tile([0.8, 0.2], (len(known), 1)))
        before = selector.regret.copy()
        selector.update(arms, Feedback(one, one, one, zeros, zeros, flags, completed))
        if t == 2:
            then = normal_hedge_weights(selector.regret)[0]
        if t == 118:
            now = normal_hedge_weights(selector.regret)[0]
    gain = selector.regret - before
    losses = np.array([0.8, 0.2])
    np.testing.assert_allclose(gain[0], (then + now) @ losses - 2 * losses, atol=1e-12)
