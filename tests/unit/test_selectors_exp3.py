"""EXP3 against a scalar reference, and its estimator by enumeration."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_worlds import World, feedback_of, play, random_world

from draftpool.selectors.base import make_selector


def naive_exp3(world: World, s: int) -> tuple[list[int], list[float]]:
    """Episode s in plain Python, written from the formula with Y = accepted + 1 and t from 1."""
    rounds, _, n = world.shape
    length = world.k_pool
    losses = [0.0] * n
    arms, propensities = [], []
    for t in range(1, rounds + 1):
        if not world.active[t - 1, s]:
            break
        eta = math.sqrt(math.log(n) / (t * n))
        offered = [i for i in range(n) if world.available[t - 1, s, i]]
        weights = {i: math.exp(-eta * losses[i]) for i in offered}
        total = sum(weights.values())
        draw, reached = world.draws[t - 1, s, 0], 0.0
        for arm in offered:
            reached += weights[arm] / total
            if draw < reached:
                break
        emitted = world.accepted[t - 1, s, arm] + 1
        losses[arm] += (length + 1 - emitted) / (length * (weights[arm] / total))
        arms.append(arm)
        propensities.append(weights[arm] / total)
    return arms, propensities


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 6), rounds=st.integers(1, 30))
def test_equals_the_scalar_reference(seed, n, rounds):
    world = random_world(seed, rounds, episodes=7, arms=n)
    arms, propensity = play(make_selector({"kind": "exp3"}, [str(i) for i in range(n)]), world)
    for s in range(7):
        expected, expected_propensity = naive_exp3(world, s)
        assert arms[: len(expected), s].tolist() == expected
        np.testing.assert_allclose(propensity[: len(expected), s], expected_propensity, rtol=1e-9)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 5), past=st.integers(0, 8))
def test_estimator_is_unbiased(seed, n, past):
    """After a common past, play each arm once: the expectation over arms is the true loss of every arm."""
    world = random_world(seed, past + 1, episodes=1, arms=n, always_available=True)
    world.active[:] = True
    copies = World(
        world.k,
        world.accepted.repeat(n, axis=1),
        world.reward_bd.repeat(n, axis=1),
        world.available.repeat(n, axis=1),
        world.draws.repeat(n, axis=1),
        world.active.repeat(n, axis=1),
    )
    selector = make_selector({"kind": "exp3"}, [str(i) for i in range(n)])
    selector.reset(n, world.k, n)
    for t in range(past):
        arms, _ = selector.select(t, copies.available[t], copies.draws[t])
        selector.update(arms, feedback_of(copies, t, arms))
    before = selector.estimated_loss.copy()
    copies.draws[past, :, 0] = _draws_for_every_arm(selector, past, copies)
    arms, propensity = selector.select(past, copies.available[past], copies.draws[past])
    assert arms.tolist() == list(range(n))
    np.testing.assert_allclose(propensity.sum(), 1.0, rtol=1e-12)
    selector.update(arms, feedback_of(copies, past, arms))
    estimate = selector.estimated_loss - before
    true_loss = 1 - world.accepted[past, 0] / world.k_pool
    np.testing.assert_allclose(propensity @ estimate, true_loss, rtol=1e-9, atol=1e-12)


def _draws_for_every_arm(selector, t: int, world: World) -> np.ndarray:
    """Draws that make episode i choose arm i, found from the choices of a fine grid."""
    n = world.shape[2]
    low = np.zeros(n)
    high = np.ones(n)
    for _ in range(60):
        middle = (low + high) / 2
        draws = world.draws[t].copy()
        draws[:, 0] = middle
        arms, _ = selector.select(t, world.available[t], draws)
        low = np.where(arms < np.arange(n), middle, low)
        high = np.where(arms > np.arange(n), middle, high)
        if (arms == np.arange(n)).all():
            break
    return middle


def test_follows_the_better_arm():
    """Losses 0.25 and 1: over 400 rounds the better arm takes most of the play, the other never dies out."""
    world = random_world(0, rounds=400, episodes=200, arms=2, always_available=True)
    world.active[:] = True
    world.k[:] = 4
    world.accepted[:] = [3, 0]
    arms, propensity = play(make_selector({"kind": "exp3"}, ["a", "b"]), world)
    assert (arms[-100:] == 0).mean() > 0.9
    assert (propensity > 0).all()


def test_regret_stays_within_the_published_bound():
    """BanditSpec Theorem 5.3 on [0, 1] losses: at most 2 sqrt(T N ln N), on losses that swap half-way."""
    rounds, n = 600, 3
    world = random_world(1, rounds, episodes=300, arms=n, always_available=True)
    world.active[:] = True
    world.k[:] = 4
    world.accepted[:300] = [4, 1, 2]
    world.accepted[300:] = [0, 1, 3]
    arms, _ = play(make_selector({"kind": "exp3"}, list("abc")), world)
    loss = 1 - world.accepted / 4
    played = np.take_along_axis(loss, arms[..., None], axis=2)[..., 0].sum(axis=0).mean()
    regret = played - loss[:, 0].sum(axis=0).min()
    assert regret <= 2 * math.sqrt(rounds * n * math.log(n))
