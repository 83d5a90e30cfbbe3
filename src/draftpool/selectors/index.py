"""Index policies: every arm once, then the arm of the largest index (mean reward plus a bonus)."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np

from draftpool.selectors.base import Bools, Feedback, Floats, Ints, Selector, best_arms


def ucb(total: Floats, count: Floats, log_rounds: float | Floats, beta: float) -> Floats:
    """Mean + beta * sqrt(2 ln t / n_i), the index of UCB1: [S, N] from sums, counts (positive) and ln t."""
    return total / count + beta * np.sqrt(2.0 * log_rounds / count)


class IndexSelector(Selector):
    """Base of index policies on the reward of the arm played.

    `count` and `total` [S, N] hold rounds and summed rewards of every arm; an arm whose count is 0 comes first,
    in an order that is random per query. Ties go to the arm just played, which saves a switch, then at random.
    """

    needs: ClassVar[Literal["bandit", "full"]] = "bandit"

    def start(self) -> None:
        """No arm has been played."""
        self.count, self.total = self.table(), self.table()
        self._last = np.full(self.episodes, -1, dtype=np.int64)

    @abstractmethod
    def index(self, t: int) -> Floats:
        """Index of every arm in round t, float[S, N]; what arms without a round get does not matter."""

    def reward(self, arms: Ints, feedback: Feedback) -> Floats:
        """Reward of the round, float[S], in [0, 1] where active; the `reward` parameter says which."""
        return self.rewards(feedback, self.params.reward)

    def means(self) -> Floats:
        """Mean reward of every arm [S, N], 0 for an arm without a round."""
        return self.total / np.maximum(self.count, 1e-300)

    def warm_up(self, untried: Bools, draws: Floats) -> Ints:
        """The untried arm to play; rows without one do not matter."""
        return np.argmin(np.where(untried, self._order, np.inf), axis=1)

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """An untried arm if one is available, else the one of the highest index."""
        self._t = t
        if t == 0:
            self._order = draws[:, 1:].copy()
        untried = available & (self.count == 0.0)
        left = untried.sum(axis=1)
        if left.all():
            return self.warm_up(untried, draws), 1.0 / left
        index = np.where(available, self.index(t), -np.inf)
        arms, propensity = best_arms(index, self._last, draws[:, 1:])
        if not left.any():
            return arms, propensity
        arms = np.where(left > 0, self.warm_up(untried, draws), arms)
        return arms, np.where(left > 0, 1.0 / np.maximum(left, 1), propensity)

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Count the round and add its reward."""
        rewards = self.reward(arms, feedback)
        rows = self.rows[feedback.active]
        self.count[rows, arms[rows]] += 1.0
        self.total[rows, arms[rows]] += rewards[rows]
        self._last[rows] = arms[rows]
