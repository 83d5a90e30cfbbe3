"""HedgeSpec's choices against one scalar reference: learner, loss, estimator, fixed share, evaluation, carry-over."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_worlds import World, feedback_of, play, random_world
from test_selectors_hedgespec import naive_weights

from draftpool.errors import DraftpoolError
from draftpool.selectors.base import Completed, Feedback, make_selector


class Naive:
    """One episode in plain Python."""

    def __init__(self, cfg: dict, world: World, s: int):
        self.cfg, self.world, self.s, self.n = cfg, world, s, world.shape[2]
        self.regret, self.losses, self.received = [0.0] * self.n, [0.0] * self.n, 0
        self.shared = [1 / self.n] * self.n
        self.known, self.used = False, set()
        self.played: list[list[float]] = []

    def weights(self) -> list[float]:
        if self.cfg.get("share"):
            return self.shared
        if self.cfg.get("learner") == "hedge":
            eta = math.sqrt(8 * math.log(self.n) / max(self.received, 1))
            raw = [math.exp(-eta * (loss - min(self.losses))) for loss in self.losses]
            return [w / sum(raw) for w in raw]
        return naive_weights(self.regret)

    def gamma(self, r: int, arm: int) -> list[float]:
        accepted = self.world.accepted[r, self.s, arm]
        chances = [
            0.9 if slot < accepted else 0.2 + 0.1 * (accepted % 3) for slot in range(self.world.k_pool)
        ]
        return [chance if slot < self.world.k[arm] else 0.0 for slot, chance in enumerate(chances)]

    def length(self, r: int) -> list[float]:
        k = self.world.k_pool
        if self.cfg.get("estimator") != "soft":
            return [1 - (a + 1) / (k + 1) for a in self.world.accepted[r, self.s]]
        out = []
        for arm in range(self.n):
            # Theorem 3 as printed: sum over k of k (1 - gamma_k) prod_{j<k} gamma_j, gamma_{K+1} = 0.
            gamma = [*self.gamma(r, arm), 0.0]
            expected = sum((j + 1) * (1 - gamma[j]) * math.prod(gamma[:j]) for j in range(k + 1))
            out.append(1 - expected / (k + 1))
        return out

    def token(self, r: int) -> list[float]:
        if self.cfg.get("estimator") == "soft":
            return [1 - self.gamma(r, arm)[0] for arm in range(self.n)]
        return [1.0 - (a >= 1) for a in self.world.accepted[r, self.s]]

    def add(self, r: int, loss: list[float]) -> None:
        self.received += 1
        mixed = sum(w * f for w, f in zip(self.played[r], loss, strict=True))
        self.regret = [g + mixed - f for g, f in zip(self.regret, loss, strict=True)]
        self.losses = [g + f for g, f in zip(self.losses, loss, strict=True)]
        eta = math.sqrt(8 * math.log(self.n) / self.received)
        raw = [w * math.exp(-eta * f) for w, f in zip(self.shared, loss, strict=True)]
        share = self.cfg.get("share", 0.0)
        self.shared = [(1 - share) * w / sum(raw) + share / self.n for w in raw]

    def arms(self) -> list[int]:
        arms, kind = [], self.cfg.get("loss", "length")
        for t in range(self.world.shape[0]):
            if not self.world.active[t, self.s]:
                break
            offered = self.world.available[t, self.s]
            weights = [w if o else 0.0 for w, o in zip(self.weights(), offered, strict=True)]
            if sum(weights) == 0:
                weights = [float(o) for o in offered]
            weights = [w / sum(weights) for w in weights]
            self.played.append(weights)
            reached, draw = 0.0, self.world.draws[t, self.s, 0]
            for arm in (i for i in range(self.n) if weights[i] > 0):
                reached += weights[arm]
                if draw < reached:
                    break
            arms.append(arm)
            if kind == "token" or (kind == "hybrid" and not self.known):
                self.add(t, self.token(t))
                self.used.add(t)
            for r in (r for e, r in self.world.arrivals[t] if e == self.s):
                if kind == "length":
                    self.add(r, self.length(r))
                if kind == "hybrid":
                    self.known = True
                    if r not in self.used:
                        mix = self.cfg.get("mix", 0.5)
                        pairs = zip(self.length(r), self.token(r), strict=True)
                        self.add(r, [mix * a + (1 - mix) * b for a, b in pairs])
        return arms


CHOICES = [
    {"learner": learner, "loss": loss, "estimator": estimator}
    for learner, loss, estimator in product(
        ("normal_hedge", "hedge"), ("length", "token", "hybrid"), ("indicator", "soft")
    )
] + [{"learner": "hedge", "share": 0.1}, {"loss": "hybrid", "mix": 0.2}]


@pytest.mark.parametrize("cfg", CHOICES, ids=lambda cfg: "-".join(map(str, cfg.values())))
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 5), rounds=st.integers(1, 20))
def test_equals_the_scalar_reference(cfg, seed, n, rounds):
    world = random_world(seed, rounds, episodes=4, arms=n)
    arms, _ = play(make_selector({"kind": "hedgespec"} | cfg, [str(i) for i in range(n)]), world)
    for s in range(4):
        expected = Naive(cfg, world, s).arms()
        assert arms[: len(expected), s].tolist() == expected


def test_hedge_meets_its_textbook_bound():
    """Anytime rate sqrt(8 ln N / t): regret at most sqrt(2 T ln N) + sqrt(ln N / 8) (Cesa-Bianchi and Lugosi)."""
    rounds, n = 1500, 6
    rng = np.random.default_rng(0)
    patterns = [rng.random((rounds, n)), (np.arange(rounds)[:, None] + np.arange(n)) % n / (n - 1)]
    trap = rng.random((rounds, n))
    trap[:, :2] = (np.arange(rounds)[:, None] + np.arange(2)) % 2
    for losses in [*patterns, trap]:
        selector = make_selector({"kind": "hedgespec", "learner": "hedge"}, [str(i) for i in range(n)])
        selector.reset(n, np.full(n, 4), 1)
        paid, zero, flag = 0.0, np.zeros(1), np.ones(1, dtype=bool)
        for t in range(rounds):
            paid += float(selector.weights()[0] @ losses[t])
            arms, _ = selector.select(t, np.ones((1, n), bool), rng.random((1, n + 1)))
            done = Completed(np.zeros(1, int), np.array([t]), losses[t][None])
            selector.update(arms, Feedback(arms, arms, arms, zero, zero, flag, done))
        bound = math.sqrt(2 * rounds * math.log(n)) + math.sqrt(math.log(n) / 8)
        assert paid - losses.sum(axis=0).min() <= bound


def test_d36_fixed_share_follows_a_drift_that_hedge_misses():
    """The best arm swaps half way; with a share of the weight handed round the new one is found in time."""
    losses = np.empty((300, 2))
    losses[:150], losses[150:] = [0.2, 0.8], [0.8, 0.2]
    late = {}
    for share in (0.0, 0.02):
        cfg = {"kind": "hedgespec", "learner": "hedge", "share": share}
        selector = make_selector(cfg, ["a", "b"])
        selector.reset(2, np.array([4, 4]), 200)
        rng, flags, zeros = np.random.default_rng(1), np.ones(200, dtype=bool), np.zeros(200)
        chosen = []
        for t in range(300):
            arms, _ = selector.select(t, np.ones((200, 2), bool), rng.random((200, 3)))
            done = Completed(np.arange(200), np.full(200, t), np.tile(losses[t], (200, 1)))
            selector.update(arms, Feedback(arms, arms, arms, zeros, zeros, flags, done))
            chosen.append(arms)
        late[share] = (np.array(chosen)[200:260] == 1).mean()
    assert late[0.02] > 0.85 and late[0.02] > late[0.0] + 0.2


def evaluated(cfg: dict, accepted: np.ndarray) -> np.ndarray:
    """Rounds [T] in which one episode asks for an evaluation; arm 1 loses 0.6, arm 0 nothing."""
    selector = make_selector({"kind": "hedgespec"} | cfg, ["a", "b"])
    selector.reset(2, np.array([4, 4]), 1)
    asked, zero, flag = [], np.zeros(1), np.ones(1, dtype=bool)
    for t, length in enumerate(accepted):
        arms, _ = selector.select(t, np.ones((1, 2), bool), np.full((1, 3), 0.3))
        asked.append(bool(selector.evaluates(t)[0]))
        done = Completed(np.zeros(1, int), np.array([t]), np.array([[0.0, 0.6]])) if asked[-1] else None
        one = np.array([int(length)])
        selector.update(arms, Feedback(one, one, one, zero, zero, flag, done))
    return np.array(asked)


def test_every_mth_round_is_evaluated():
    assert np.flatnonzero(evaluated({"evaluate": "every", "every": 3}, np.full(10, 2))).tolist() == [
        0,
        3,
        6,
        9,
    ]
    assert evaluated({}, np.full(10, 2)).all()


def test_skipping_starts_when_converged_and_stops_when_acceptance_drops():
    """H9: always for 8 rounds, then every m-th; all rounds again while the last ones are 20 % below the mean."""
    asked = evaluated({"evaluate": "skip", "every": 4}, np.array([3] * 40 + [0] * 12))
    assert asked[:8].all()
    assert np.flatnonzero(asked[24:41]).tolist() == [0, 4, 8, 12, 16]
    assert asked[44:].all()


def test_carry_over_keeps_what_was_learnt():
    world = random_world(3, rounds=30, episodes=5, arms=3, always_available=True)
    for carry in (False, True):
        selector = make_selector({"kind": "hedgespec", "carry": carry}, list("abc"))
        assert selector.carries is carry
        play(selector, world)
        before = selector.regret.copy()
        selector.resume()
        np.testing.assert_array_equal(selector.regret, before if carry else 0 * before)
        # Rounds count anew: a loss of round 3 is refused before round 3 was played.
        selector.select(0, world.available[0], world.draws[0])
        late = Completed(np.array([0]), np.array([3]), np.array([[0.1, 0.2, 0.3]]))
        feedback = feedback_of(world, 0, np.zeros(5, int))
        with pytest.raises(DraftpoolError, match="loss of round 3 after 1 rounds"):
            selector.update(np.zeros(5, int), Feedback(**{**feedback.__dict__, "completed": late}))


def test_soft_estimators_need_probabilities():
    world = random_world(3, rounds=1, episodes=1, arms=2, always_available=True)
    selector = make_selector({"kind": "hedgespec", "estimator": "soft"}, ["a", "b"])
    selector.reset(2, world.k, 1)
    selector.select(0, world.available[0], world.draws[0])
    done = Completed(np.array([0]), np.array([0]), np.array([[0.1, 0.2]]))
    feedback = Feedback(**{**feedback_of(world, 0, np.zeros(1, int)).__dict__, "completed": done})
    with pytest.raises(DraftpoolError, match="use estimator: indicator"):
        selector.update(np.zeros(1, int), feedback)
