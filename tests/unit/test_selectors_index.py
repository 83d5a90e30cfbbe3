"""Index policies against scalar references, each written from its formula, and on bandits with known answers."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_kinds import context_of
from selector_worlds import World, bernoulli_world, play_in, random_world

from draftpool.errors import DraftpoolError
from draftpool.selectors.base import Context, make_selector

# (round, arm, accepted / K, bd) of every round so far.
History = list[tuple[int, int, float, float]]


def discounted(cfg: dict, past: History, t: int, n: int, noise) -> list[float | None]:
    weight = [cfg["discount"] ** (t - 1 - r) for r, *_ in past]
    counts = [sum(w for w, (_, a, *_) in zip(weight, past, strict=True) if a == i) for i in range(n)]
    rounds = max(sum(counts), 1.0)
    out = []
    for i in range(n):
        if not any(a == i for _, a, *_ in past):
            out.append(None)
            continue
        total = sum(w * bd for w, (_, a, _, bd) in zip(weight, past, strict=True) if a == i)
        out.append(total / counts[i] + cfg["beta"] * math.sqrt(2 * math.log(rounds) / counts[i]))
    return out


def sliding(cfg: dict, past: History, t: int, n: int, noise) -> list[float | None]:
    recent = past[-cfg["window"] :]
    out = []
    for i in range(n):
        own = [bd for _, a, _, bd in recent if a == i]
        bonus = math.log(max(min(t, cfg["window"]), 1))
        out.append(sum(own) / len(own) + cfg["beta"] * math.sqrt(2 * bonus / len(own)) if own else None)
    return out


def literal(cfg: dict, past: History, t: int, n: int, noise) -> list[float | None]:
    out = []
    for i in range(n):
        own = [be for _, a, be, _ in past if a == i]
        m = len(own)
        if not own:
            out.append(None)
            continue
        radius = (1 + m) / m**2 * (1 + 2 * math.log(n * (t + 1) ** 2 * math.sqrt(1 + m) / 0.5))
        out.append(sum(own) / m + cfg["scale"] * math.sqrt(radius) / 2)
    return out


def released(cfg: dict, past: History, t: int, n: int, noise) -> list[float | None]:
    """After the cycle; the cycle itself is in `follow`."""
    out = []
    for i in range(n):
        own = [be for _, a, be, _ in past if a == i]
        out.append(sum(own) / len(own) + math.sqrt(6 * math.log(t) / t) if own else None)
    return out


def thompson(cfg: dict, past: History, t: int, n: int, noise) -> list[float | None]:
    out = []
    for i in range(n):
        own = [bd for _, a, _, bd in past if a == i]
        if not own:
            out.append(None)
            continue
        out.append(NormalDist(sum(own) / len(own), cfg["beta"] / math.sqrt(len(own))).inv_cdf(noise[1 + i]))
    return out


def cost(cfg: dict, past: History, t: int, n: int, noise) -> list[float | None]:
    """The world's K is in `cfg`; costs are those of `context_of`."""
    costs = [float(c) for c in np.linspace(1.0, 1.5, n)]
    best = max((k + 1) / c for k, c in zip(cfg["k"], costs, strict=True))
    out = []
    for i in range(n):
        own = [(be * cfg["k_pool"] + 1) / costs[i] / best for _, a, be, _ in past if a == i]
        bonus = cfg["beta"] * math.sqrt(2 * math.log(max(t, 1)) / len(own)) if own else 0.0
        out.append(sum(own) / len(own) + bonus if own else None)
    return out


CASES = {
    "metasd_discounted_ucb": ({"discount": 0.9, "beta": 0.3}, discounted, False),
    "metasd_sliding_ucb": ({"window": 4, "beta": 0.3}, sliding, False),
    "ucbspec": ({"scale": 0.2}, literal, True),
    "banditspec_as_released": ({}, released, True),
    "thompson": ({"beta": 0.3}, thompson, False),
    "cost_ucb": ({"beta": 0.3}, cost, False),
}


def follow(world: World, s: int, kind: str, forced: list[int] | None = None) -> list[int]:
    """Arms of episode s: untried arms first (random or pool order), then the largest index; ties stay.

    With ``forced`` arms the past is theirs, and each must have the largest index but for rounding: rewards of counts
    tie often, and sums that are added in another order decide such a tie either way.
    """
    cfg, index, pool_order = CASES[kind]
    cfg = cfg | {"k": world.k.tolist(), "k_pool": world.k_pool}
    rounds, _, n = world.shape
    past: History = []
    previous, arms = None, []
    for t in range(rounds):
        if not world.active[t, s]:
            break
        offered = [i for i in range(n) if world.available[t, s, i]]
        values = [None] * n if not past else index(cfg, past, t, n, world.draws[t, s])
        untried = [i for i in offered if values[i] is None]
        if kind == "banditspec_as_released" and t < 7:
            arm = min(offered, key=lambda i: (i - t) % n)
        elif untried:
            arm = min(untried) if pool_order else min(untried, key=lambda i: world.draws[0, s, 1 + i])
        else:
            top = max(values[i] for i in offered)
            tied = [i for i in offered if values[i] == top]
            arm = previous if previous in tied else min(tied, key=lambda i: world.draws[t, s, 1 + i])
            if forced is not None and values[forced[t]] > top - 1e-9:
                arm = forced[t]
        bd = world.reward_bd[t, s, arm]
        past.append((t, arm, world.accepted[t, s, arm] / world.k_pool, 0.0 if math.isnan(bd) else bd))
        previous = arm
        arms.append(arm)
    return arms


@pytest.mark.parametrize("kind", CASES)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 6), rounds=st.integers(1, 25))
def test_equals_the_scalar_reference(kind, seed, n, rounds):
    # Generic rewards: ties of sums that are added in another order would be decided by rounding.
    world = random_world(seed, rounds, episodes=5, arms=n)
    noise = np.random.default_rng(seed).uniform(0, 0.3, world.reward_bd.shape)
    world.reward_bd[:] = (world.reward_bd + noise) / 1.3
    names = [str(i) for i in range(n)]
    arms, _ = play_in(make_selector({"kind": kind, **CASES[kind][0]}, names), world, context_of(n, 5))
    for s in range(5):
        got = [int(arm) for arm in arms[:, s] if arm >= 0]
        ties = kind in ("ucbspec", "banditspec_as_released", "cost_ucb")
        assert got == follow(world, s, kind, got if ties else None)


def played(cfg: dict, means: np.ndarray, episodes: int = 60) -> np.ndarray:
    """Arms [T, S]."""
    n = means.shape[1]
    return play_in(make_selector(cfg, [str(i) for i in range(n)]), bernoulli_world(means, episodes, 0), None)[
        0
    ]


@pytest.mark.parametrize(
    "cfg", [{"kind": "thompson", "beta": 0.5}, {"kind": "ucbspec", "scale": 0.25}], ids=lambda c: c["kind"]
)
def test_d34_regret_grows_slower_than_the_horizon(cfg):
    means = np.array([0.3, 0.5, 0.8])
    arms = played(cfg, np.tile(means, (2000, 1)), episodes=100)
    regret = (0.8 - means[arms]).cumsum(axis=0).mean(axis=1)
    assert regret[1999] < 3 * regret[499]
    assert (arms[-200:] != 2).mean() < 0.06


def test_d34_a_bonus_shared_by_all_arms_is_greedy():
    """The released score keeps the arm that was lucky first in many episodes; UCB's own bonus does not."""
    means = np.tile([0.45, 0.5, 0.8], (1000, 1))
    wrong = {}
    for kind in ("banditspec_as_released", "ucbspec"):
        cfg = {"kind": kind} | ({"scale": 0.25} if kind == "ucbspec" else {})
        wrong[kind] = ((played(cfg, means, 300)[-100:] != 2).mean(axis=0) > 0.9).mean()
    assert wrong["banditspec_as_released"] > 0.05 > wrong["ucbspec"]


def test_literal_ucbspec_is_close_to_round_robin():
    """At the lengths and gaps of a study its radius exceeds the range of rewards (papers.md 5.3)."""
    arms = played({"kind": "ucbspec"}, np.tile([0.15, 0.2, 0.25, 0.3, 0.35], (40, 1)), 200)
    share = np.bincount(arms.ravel(), minlength=5) / arms.size
    assert share.min() > 0.14 and share.max() < 0.3


@pytest.mark.parametrize(
    "cfg",
    [{"kind": "metasd_discounted_ucb", "discount": 0.95}, {"kind": "metasd_sliding_ucb", "window": 40}],
    ids=lambda c: c["kind"],
)
def test_d36_drift_is_followed(cfg):
    """The best arm swaps: forgetting policies leave the old one sooner than UCB does."""
    means = np.empty((600, 2))
    means[:300], means[300:] = [0.8, 0.3], [0.1, 0.7]
    late = (played(cfg, means)[320:420] == 1).mean()
    remembering = (played({"kind": "metasd_ucb"}, means)[320:420] == 1).mean()
    assert late > 0.75 and late > remembering + 0.1


def test_sequential_halving_switches_seldom_and_finds_the_best():
    means = np.tile([0.1, 0.3, 0.5, 0.9], (80, 1))
    arms = played({"kind": "sequential_halving", "budget": 32}, means, 200)
    # ceil(log2 4) = 2 phases: 4 arms x 4 rounds, 2 arms x 8 rounds.
    assert (np.diff(arms[:16], axis=0) != 0).sum(axis=0).tolist() == [3] * 200
    assert all(sorted(set(column)) == [0, 1, 2, 3] for column in arms[:16].T)
    assert all(len(set(column)) <= 2 for column in arms[16:32].T)
    assert (arms[32:] == arms[32]).all()
    assert (arms[-1] == 3).mean() > 0.9


def test_thompson_propensity_is_the_probability_of_the_largest_draw():
    selector = make_selector({"kind": "thompson", "beta": 0.5}, list("abc"))
    selector.reset(3, np.array([4, 4, 4]), 40000)
    selector.count[:] = [3, 1, 8]
    selector.total[:] = [1.5, 0.8, 4.4]
    selector._order = np.zeros((40000, 3))
    draws = np.random.default_rng(0).random((40000, 4))
    arms, propensity = selector.select(12, np.ones((40000, 3), bool), draws)
    for arm in range(3):
        np.testing.assert_allclose(propensity[arms == arm], (arms == arm).mean(), atol=0.01)
    assert sum(propensity[arms == arm][0] for arm in range(3)) == pytest.approx(1.0, abs=1e-4)


def test_d39_cost_aware_ucb_takes_the_cheaper_of_two_equal_arms():
    """D-39, D-40: equal acceptance at different cost; plain decoding wins when no drafter pays."""
    world = random_world(1, rounds=80, episodes=30, arms=3, always_available=True)
    world.active[:], world.k[:] = True, [0, 4, 4]
    world.accepted[:] = [0, 2, 2]
    for costs, best in (([1.0, 1.3, 1.9], 1), ([1.0, 4.0, 6.0], 0)):
        selector = make_selector({"kind": "cost_ucb", "beta": 0.1}, ["plain", "a", "b"])
        arms, _ = play_in(selector, world, Context(costs=np.array(costs)))
        assert (arms[40:] == best).mean() > 0.85
        hedge = make_selector({"kind": "cost_hedge"}, ["plain", "a", "b"])
        world.arrivals = [[(s, t) for s in range(30)] for t in range(80)]
        arms, _ = play_in(hedge, world, Context(costs=np.array(costs)))
        assert (arms[40:] == best).mean() > 0.85


def test_d25_d38_speed_not_length_decides_between_large_and_small_drafters():
    """D-25: the more accurate drafter is slower. D-38: lengths of blocks of 5 and of 3 compare per cost only."""
    names = ["large", "small"]
    for k, accepted, costs in (([4, 4], [3, 2], [3.0, 1.2]), ([4, 2], [4, 2], [2.2, 1.0])):
        world = random_world(2, rounds=80, episodes=30, arms=2, always_available=True)
        world.active[:], world.k[:], world.accepted[:] = True, k, accepted
        tokens_per_cost = [(a + 1) / c for a, c in zip(accepted, costs, strict=True)]
        assert accepted[0] > accepted[1] and tokens_per_cost[0] < tokens_per_cost[1]
        longest, _ = play_in(
            make_selector({"kind": "metasd_ucb", "reward": "be", "beta": 0.1}, names), world, None
        )
        context = Context(costs=np.array(costs))
        fastest, _ = play_in(make_selector({"kind": "cost_ucb", "beta": 0.1}, names), world, context)
        assert (longest[40:] == 0).mean() > 0.85 and (fastest[40:] == 1).mean() > 0.85


def halving(world: World, s: int, budget: int) -> list[int]:
    """Sequential halving of one episode as the paper's pseudocode says, survivors in a fixed random order.

    With few switches: a survivor that was played last begins the next phase.
    """
    rounds, _, n = world.shape
    order = sorted(range(n), key=lambda i: world.draws[0, s, 1 + i])
    survivors, arms = list(order), []
    while len(arms) < rounds:
        quota = max(1, budget // (len(survivors) * max(1, math.ceil(math.log2(n)))))
        if len(survivors) == 1:
            arms += survivors * rounds
            break
        means = {}
        turns = sorted(survivors, key=lambda arm: (arms[-1:] != [arm], order.index(arm)))
        for arm in turns:
            times = range(len(arms), min(len(arms) + quota, rounds))
            own = [world.reward_bd[t, s, arm] for t in times]
            arms += [arm] * len(own)
            means[arm] = sum(0.0 if math.isnan(bd) else bd for bd in own) / max(len(own), 1)
        better = sorted(survivors, key=lambda arm: (-means[arm], order.index(arm)))[
            : (len(survivors) + 1) // 2
        ]
        survivors = [arm for arm in survivors if arm in better]
    return arms[:rounds]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 7), budget=st.integers(1, 40))
def test_sequential_halving_equals_its_pseudocode(seed, n, budget):
    world = random_world(seed, rounds=45, episodes=4, arms=n, always_available=True)
    world.active[:] = True
    world.reward_bd[:] += np.random.default_rng(seed).uniform(0, 0.3, world.reward_bd.shape)
    world.reward_bd[:] /= 1.3
    selector = make_selector({"kind": "sequential_halving", "budget": budget}, [str(i) for i in range(n)])
    arms, _ = play_in(selector, world, None)
    for s in range(4):
        assert arms[:, s].tolist() == halving(world, s, budget)


def test_what_a_selector_needs_must_be_given():
    for kind, message in (("cost_ucb", "costs of a round"), ("router", "no route per prompt")):
        with pytest.raises(DraftpoolError, match=message):
            make_selector({"kind": kind}, ["a", "b"]).reset(2, np.array([3, 3]), 1)
    with pytest.raises(DraftpoolError, match="leads to no arm"):
        context = Context(routes={"tfidf": np.array([2])})
        make_selector({"kind": "router"}, ["a", "b"]).reset(2, np.array([3, 3]), 1, context)


def test_router_plays_the_prompt_s_arm():
    world = random_world(3, rounds=6, episodes=4, arms=3, always_available=True)
    context = Context(routes={"hidden": np.array([0, 2, 1, 2])})
    selector = make_selector({"kind": "router", "features": "hidden"}, list("abc"))
    arms, _ = play_in(selector, world, context)
    for s, arm in enumerate([0, 2, 1, 2]):
        assert set(arms[:, s]) <= {arm, -1}
