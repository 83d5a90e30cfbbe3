"""What holds for every selector: parameters, availability, ranges, independent episodes; the fixed ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_kinds import KINDS, context_of, label
from selector_worlds import feedback_of, play, random_world

from draftpool.errors import DraftpoolError
from draftpool.selectors.base import Completed, Context, Feedback, make_selector

seeds = st.integers(0, 2**32 - 1)
# A router plays its route, offered or not, as a fixed drafter does.
KINDS = [cfg for cfg in KINDS if cfg["kind"] != "router"]


def names(n: int) -> list[str]:
    """Arm names."""
    return ["plain", *(f"drafter-{i}" for i in range(1, n))]


@pytest.mark.parametrize("cfg", KINDS, ids=label)
@settings(deadline=None, max_examples=25)
@given(seed=seeds, arms=st.integers(1, 6))
def test_one_episode_equals_the_same_one_among_64(cfg, seed, arms):
    world = random_world(seed, rounds=12, episodes=64, arms=arms)
    together, propensity = play(make_selector(cfg, names(arms)), world)
    for s in (0, 13, 63):
        alone, alone_propensity = play(make_selector(cfg, names(arms)), world.episode(s))
        np.testing.assert_array_equal(alone[:, 0], together[:, s])
        # Sums over arms may add in another order.
        np.testing.assert_allclose(alone_propensity[:, 0], propensity[:, s], rtol=1e-12)


@pytest.mark.parametrize("cfg", KINDS, ids=label)
@settings(deadline=None, max_examples=25)
@given(seed=seeds, arms=st.integers(1, 6))
def test_only_available_arms_with_a_sane_propensity(cfg, seed, arms):
    world = random_world(seed, rounds=12, episodes=20, arms=arms)
    chosen, propensity = play(make_selector(cfg, names(arms)), world)
    t, s = np.nonzero(chosen >= 0)
    assert world.available[t, s, chosen[t, s]].all()
    assert ((propensity[t, s] > 0) & (propensity[t, s] <= 1)).all()
    assert len(t) == world.active.sum()


@pytest.mark.parametrize("cfg", KINDS, ids=label)
def test_reset_forgets(cfg):
    world = random_world(5, rounds=15, episodes=8, arms=4)
    selector = make_selector(cfg, names(4))
    first = play(selector, world)
    play(selector, random_world(6, rounds=15, episodes=8, arms=4))
    np.testing.assert_array_equal(play(selector, world)[0], first[0])


@pytest.mark.parametrize("cfg", KINDS, ids=label)
def test_no_available_arm_raises(cfg):
    world = random_world(1, rounds=2, episodes=3, arms=3)
    selector = make_selector(cfg, names(3))
    selector.reset(3, world.k, 3, context_of(3, 3))
    available = np.ones((3, 3), dtype=bool)
    available[1] = False
    with pytest.raises(DraftpoolError, match="no arm is available in episode 1, round 0"):
        selector.select(0, available, world.draws[0])


@pytest.mark.parametrize(
    "kind", ["metasd_ucb", "exp3", "hedgespec", "thompson", "sequential_halving", "metasd_sliding_ucb"]
)
@settings(deadline=None, max_examples=25)
@given(seed=seeds)
def test_propensity_is_the_frequency_of_the_arm(kind, seed):
    """Same past, many draws: the arm chosen appears as often as its propensity says."""
    episodes = 4000
    one = random_world(seed, rounds=5, episodes=1, arms=3, always_available=True)
    one.active[:] = True
    rng = np.random.default_rng(seed)
    selector = make_selector({"kind": kind}, names(3))
    selector.reset(3, one.k, episodes)
    available = np.ones((episodes, 3), dtype=bool)
    for t in range(3):
        arms, _ = selector.select(t, available, np.repeat(one.draws[t], episodes, axis=0))
        selector.update(arms, _repeated(feedback_of(one, t, arms[:1]), episodes))
    arms, propensity = selector.select(3, available, rng.uniform(size=(episodes, 4)))
    for arm in np.unique(arms):
        expected = propensity[arms == arm][0]
        assert abs((arms == arm).mean() - expected) < 5 * np.sqrt(0.25 / episodes)


def _repeated(single: Feedback, episodes: int) -> Feedback:
    """The feedback of one episode for each of `episodes` copies of it."""
    completed = None
    if single.completed is not None:
        m = len(single.completed.round)
        completed = Completed(
            np.repeat(np.arange(episodes), m),
            np.tile(single.completed.round, episodes),
            np.tile(single.completed.loss, (episodes, 1)),
        )
    fields = ("accepted", "drafted", "committed", "reward_be", "reward_bd", "reward_bd_full", "active")
    repeated = {name: np.repeat(getattr(single, name), episodes) for name in fields}
    return Feedback(**repeated, completed=completed)


@pytest.mark.parametrize("bad", [1.5, -0.01, 250.0, np.nan, np.inf])
@pytest.mark.parametrize("reward", ["bd", "be"])
def test_d35_reward_outside_the_unit_interval_raises(reward, bad):
    world = random_world(2, rounds=1, episodes=3, arms=2)
    world.active[:] = True
    world.active[0, 2] = False
    selector = make_selector({"kind": "metasd_ucb", "reward": reward}, names(2))
    selector.reset(2, world.k, 3)
    arms = np.array([1, 1, 1])
    good = replace(
        feedback_of(world, 0, arms),
        drafted=np.full(3, 4),
        reward_bd=np.array([0.1, 0.2, bad]),
        reward_be=np.array([0.1, 0.2, bad]),
    )
    selector.update(arms, good)
    broken = replace(good, **{f"reward_{reward}": np.array([0.1, bad, 0.2])})
    message = rf"selector metasd_ucb: reward_{reward} = {bad} is not in \[0, 1\].*scale"
    with pytest.raises(DraftpoolError, match=message):
        selector.update(arms, broken)


def test_d35_losses_outside_the_unit_interval_raise():
    world = random_world(2, rounds=1, episodes=2, arms=2, always_available=True)
    world.active[:] = True
    arms = np.array([0, 1])
    exp3 = make_selector({"kind": "exp3"}, names(2))
    exp3.reset(2, np.array([0, 4]), 2)
    exp3.select(0, world.available[0], world.draws[0])
    with pytest.raises(DraftpoolError, match=r"selector exp3: loss .* = -0\.25 is not in \[0, 1\]"):
        exp3.update(arms, replace(feedback_of(world, 0, arms), accepted=np.array([0, 5])))
    hedge = make_selector({"kind": "hedgespec"}, names(2))
    hedge.reset(2, np.array([0, 4]), 2)
    hedge.select(0, world.available[0], world.draws[0])
    zero = np.zeros(1, dtype=np.int64)
    for bad in (1.2, np.nan):
        completed = Completed(zero, zero, np.array([[0.5, bad]]))
        with pytest.raises(DraftpoolError, match=rf"selector hedgespec: .* = {bad} is not in \[0, 1\]"):
            hedge.update(arms, replace(feedback_of(world, 0, arms), completed=completed))
    with pytest.raises(DraftpoolError, match="loss of round 3 after 1 rounds"):
        completed = Completed(zero, zero + 3, np.array([[0.5, 0.5]]))
        hedge.update(arms, replace(feedback_of(world, 0, arms), completed=completed))


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"kind": "metasd"}, r"unknown selector 'metasd'.*use one of: .*exp3, .*metasd_ucb"),
        ({"beta": 1.0}, "no kind"),
        ({"kind": "metasd_ucb", "betta": 1.0}, "unknown parameter 'betta'.*it takes: reward, beta"),
        ({"kind": "metasd_ucb", "beta": 0.0}, "parameter 'beta' = 0.0: .*greater than 0"),
        ({"kind": "metasd_ucb", "beta": "1e-4"}, "parameter 'beta' = '1e-4'"),
        ({"kind": "metasd_ucb", "beta": float("inf")}, "parameter 'beta' = inf"),
        ({"kind": "metasd_ucb", "reward": "tokens_per_s"}, "parameter 'reward' = 'tokens_per_s'"),
        ({"kind": "hedgespec", "learner": "ftl"}, "parameter 'learner' = 'ftl'.*normal_hedge"),
        ({"kind": "hedgespec", "share": 0.1}, "share > 0 needs learner: hedge"),
        ({"kind": "thompson", "reward": "tokens"}, "parameter 'reward' = 'tokens'"),
        ({"kind": "metasd_sliding_ucb", "window": 0}, "parameter 'window' = 0"),
        ({"kind": "exp3", "eta": 0.1}, "unknown parameter 'eta'.*it takes no parameters"),
        ({"kind": "random", "arms": ["a"]}, "unknown parameter 'arms'"),
        ({"kind": "fixed"}, "parameter 'arm' is missing"),
        ({"kind": "fixed", "arm": "c"}, "no arm is called 'c'.*the pool has: a, b"),
        ({"kind": "plain"}, "no arm is called 'plain'"),
    ],
)
def test_mistakes_in_the_configuration_are_told(cfg, message):
    with pytest.raises(DraftpoolError, match=message):
        make_selector(cfg, ["a", "b"])


def test_misuse_is_told():
    with pytest.raises(DraftpoolError, match="not unique"):
        make_selector({"kind": "random"}, ["a", "a"])
    selector = make_selector({"kind": "random"}, ["a", "b"])
    with pytest.raises(DraftpoolError, match="reset with 3 arms"):
        selector.reset(3, np.array([1, 1, 1]), 1)
    selector.reset(2, np.array([1, 1]), 4)
    with pytest.raises(DraftpoolError, match=r"pass \(4, 2\) and \(4, 3\)"):
        selector.select(0, np.ones((4, 2), dtype=bool), np.full((4, 2), 0.5))
    with pytest.raises(DraftpoolError, match="arms"):
        selector.update(
            np.zeros(3, dtype=np.int64), feedback_of(random_world(0, 1, 4, 2), 0, np.zeros(4, int))
        )
    wrong = make_selector({"kind": "random"}, ["a", "b"])
    wrong.choose = lambda t, available, draws: (np.array([1]), np.ones(1))
    wrong.reset(2, np.array([1, 1]), 1)
    with pytest.raises(DraftpoolError, match="arm 'b' is not available in round 7"):
        wrong.select(7, np.array([[True, False]]), np.full((1, 3), 0.5))


@pytest.mark.parametrize("cfg", [{"kind": "fixed", "arm": "b"}, {"kind": "router"}])
def test_selectors_of_one_arm_play_it_even_if_it_cannot_draft(cfg):
    """A drafter with too few positions then drafts nothing: a plain step, live and in replay."""
    selector = make_selector(cfg, ["a", "b"])
    selector.reset(2, np.array([1, 1]), 1, Context(routes={"tfidf": np.array([1])}))
    arms, _ = selector.select(7, np.array([[True, False]]), np.full((1, 3), 0.5))
    assert arms.tolist() == [1]


def test_fixed_and_plain_play_their_arm():
    world = random_world(3, rounds=6, episodes=4, arms=3, always_available=True)
    world.active[:] = True
    for cfg, arm in [({"kind": "fixed", "arm": "drafter-2"}, 2), ({"kind": "plain"}, 0)]:
        arms, propensity = play(make_selector(cfg, names(3)), world)
        assert (arms == arm).all()
        assert (propensity == 1).all()


def test_round_robin_passes_over_unavailable_arms():
    world = random_world(3, rounds=6, episodes=1, arms=3, always_available=True)
    world.active[:] = True
    world.available[2] = [[True, True, False]]
    arms, _ = play(make_selector({"kind": "round_robin"}, names(3)), world)
    assert arms[:, 0].tolist() == [0, 1, 0, 1, 2, 0]


def test_random_is_uniform_over_available_arms():
    world = random_world(3, rounds=1, episodes=6000, arms=4, always_available=True)
    world.active[:] = True
    world.available[..., 1] = False
    arms, propensity = play(make_selector({"kind": "random"}, names(4)), world)
    counts = np.bincount(arms[0], minlength=4) / 6000
    assert counts[1] == 0
    np.testing.assert_allclose(counts[[0, 2, 3]], 1 / 3, atol=0.03)
    np.testing.assert_allclose(propensity, 1 / 3)


@pytest.mark.parametrize("kind", ["metasd_ucb", "exp3"])
def test_d40_plain_decoding_is_an_arm_like_any_other(kind):
    """Its reward is 0 (nothing accepted), it is tried and then left to drafters that do better."""
    world = random_world(4, rounds=60, episodes=50, arms=3, always_available=True)
    world.active[:] = True
    world.k[:] = [0, 4, 4]
    world.accepted[:] = [0, 1, 3]
    world.reward_bd[:] = [np.nan, 0.4, 0.9]
    arms, _ = play(make_selector({"kind": kind}, names(3)), world)
    assert (arms == 0).any(axis=0).all()
    assert (arms[-20:] == 2).mean() > (arms[-20:] == 0).mean()
