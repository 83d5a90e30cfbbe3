"""Small worlds for selector tests: what every arm would bring in every round, and a loop that plays them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from selector_kinds import context_of

from draftpool.selectors.base import Completed, Context, Feedback, FirstSlots, Selector


@dataclass
class World:
    """T rounds, S episodes, N arms; `arrivals[t]`: (episode, round) of the losses first known in round t."""

    k: np.ndarray  # int[N]
    accepted: np.ndarray  # int[T, S, N]
    reward_bd: np.ndarray  # float[T, S, N]
    available: np.ndarray  # bool[T, S, N]
    draws: np.ndarray  # float[T, S, N + 1]
    active: np.ndarray  # bool[T, S]
    arrivals: list[list[tuple[int, int]]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, S, N."""
        return self.accepted.shape

    @property
    def k_pool(self) -> int:
        """Longest draft of the pool."""
        return max(1, int(self.k.max()))

    def losses(self, rounds: np.ndarray, episode: np.ndarray) -> np.ndarray:
        """Length losses [m, N] of m rounds."""
        return 1.0 - (self.accepted[rounds, episode] + 1) / (self.k_pool + 1)

    def gamma(self, rounds: np.ndarray, episode: np.ndarray) -> np.ndarray:
        """Acceptance probabilities [m, N, K] of m rounds: high where accepted, 0 beyond an arm's draft."""
        slot = np.arange(self.k_pool)
        accepted = self.accepted[rounds, episode][..., None]
        chance = np.where(slot < accepted, 0.9, 0.2 + 0.1 * (accepted % 3))
        return np.where(slot < self.k[:, None], chance, 0.0)

    def episode(self, s: int) -> World:
        """The world of one episode alone."""
        return World(
            self.k,
            self.accepted[:, s : s + 1],
            self.reward_bd[:, s : s + 1],
            self.available[:, s : s + 1],
            self.draws[:, s : s + 1],
            self.active[:, s : s + 1],
            [[(0, r) for e, r in batch if e == s] for batch in self.arrivals],
        )


def random_world(seed: int, rounds: int, episodes: int, arms: int, always_available: bool = False) -> World:
    """Coarse rewards (so that ties happen), random availability, lengths, delays and skipped evaluations."""
    rng = np.random.default_rng(seed)
    k = rng.integers(1, 5, arms)
    k[rng.integers(arms)] = rng.integers(0, 5)
    k[rng.integers(arms)] = 4
    available = rng.random((rounds, episodes, arms)) < 0.7
    available[..., 0] |= ~available.any(axis=-1)
    if always_available:
        available[:] = True
    length = rng.integers(1, rounds + 1, episodes)
    active = np.arange(rounds)[:, None] < length
    arrivals: list[list[tuple[int, int]]] = [[] for _ in range(rounds)]
    for s in range(episodes):
        for r in range(length[s]):
            known = r + rng.integers(0, 4)
            if known < length[s] and rng.random() < 0.8:
                arrivals[known].append((s, r))
    for batch in arrivals:
        rng.shuffle(batch)
    return World(
        k=k,
        accepted=rng.integers(0, k + 1, (rounds, episodes, arms)),
        reward_bd=np.where(k > 0, rng.integers(0, 4, (rounds, episodes, arms)) / 3, np.nan),
        available=available,
        draws=rng.uniform(0, 1, (rounds, episodes, arms + 1)),
        active=active,
        arrivals=[[(int(e), int(r)) for e, r in batch] for batch in arrivals],
    )


def bernoulli_world(means: np.ndarray, episodes: int, seed: int) -> World:
    """Rewards 0 or 1 with the given means [T, N]."""
    rounds, n = means.shape
    rng = np.random.default_rng(seed)
    rewards = (rng.random((rounds, episodes, n)) < means[:, None, :]).astype(int)
    everywhere = np.ones((rounds, episodes, n), dtype=bool)
    draws = rng.random((rounds, episodes, n + 1))
    return World(np.ones(n, int), rewards, rewards.astype(float), everywhere, draws, everywhere[..., 0])


def feedback_of(world: World, t: int, arms: np.ndarray) -> Feedback:
    """What round t brings to the arms played; finished episodes carry rubbish, which must not matter."""
    rows = np.arange(len(arms))
    active = world.active[t]
    accepted = np.where(active, world.accepted[t, rows, arms], 99)
    batch = world.arrivals[t] if world.arrivals else []
    episode = np.array([e for e, _ in batch], dtype=np.int64)
    rounds = np.array([r for _, r in batch], dtype=np.int64)
    return Feedback(
        accepted=accepted,
        drafted=world.k[arms],
        committed=accepted + 1,
        reward_be=np.where(active, accepted / world.k_pool, np.inf),
        reward_bd=np.where(active, world.reward_bd[t, rows, arms], np.inf),
        reward_bd_full=np.where(active, 1.0 - world.reward_bd[t, rows, arms], np.inf),
        active=active,
        completed=Completed(episode, rounds, world.losses(rounds, episode), world.gamma(rounds, episode))
        if batch
        else None,
        first=FirstSlots(active, world.accepted[t] > 0, world.gamma(np.full(len(rows), t), rows)[:, :, 0]),
    )


def play(selector: Selector, world: World) -> tuple[np.ndarray, np.ndarray]:
    """Arms int[T, S] and propensities float[T, S]; -1 and NaN once an episode is finished."""
    return play_in(selector, world, None)


def play_in(selector: Selector, world: World, context: Context | None) -> tuple[np.ndarray, np.ndarray]:
    """As `play`, with what some selectors need besides feedback."""
    rounds, episodes, n_arms = world.shape
    selector.reset(n_arms, world.k, episodes, context or context_of(n_arms, episodes))
    arms = np.full((rounds, episodes), -1)
    propensity = np.full((rounds, episodes), np.nan)
    for t in range(rounds):
        chosen, probability = selector.select(t, world.available[t], world.draws[t])
        active = world.active[t]
        arms[t, active], propensity[t, active] = chosen[active], probability[active]
        selector.update(chosen, feedback_of(world, t, chosen))
    return arms, propensity
