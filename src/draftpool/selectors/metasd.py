"""MetaSD: UCB over drafters on an alignment reward (arXiv 2604.05417, Algorithm 2; reference notes 1)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from draftpool.selectors.base import (
    Bools,
    Feedback,
    Floats,
    Ints,
    Parameters,
    Selector,
    best_arms,
    register_selector,
)


@register_selector("metasd_ucb")
class MetaSDUCB(Selector):
    """MetaSD-UCB: every arm once, then the largest mean + beta * sqrt(2 ln t / n_i).

    t counts the rounds of this query so far and n_i those of arm i, so an arm's bonus is its own; statistics
    begin anew with every query. The paper leaves open and we set: beta (default 0.25), the order of the first
    N rounds (random per query) and ties (the arm just played, which saves a switch, then at random).
    """

    needs: ClassVar[Literal["bandit", "full"]] = "bandit"

    class Params(Parameters):
        """`reward`: block divergence or block efficiency; `beta` > 0: weight of the bonus."""

        reward: Literal["bd", "be"] = "bd"
        beta: float = Field(default=0.25, gt=0.0, allow_inf_nan=False)

    def start(self) -> None:
        """No arm has been played."""
        self._count = np.zeros((self.episodes, self.n_arms))
        self._total = np.zeros((self.episodes, self.n_arms))
        self._last = np.full(self.episodes, -1, dtype=np.int64)

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """An untried arm if one is available, else the one of the highest index."""
        if t == 0:
            self._order = draws[:, 1:].copy()
        untried = available & (self._count == 0)
        first_arms = np.argmin(np.where(untried, self._order, np.inf), axis=1)
        played = np.maximum(self._count, 1.0)
        index = self._total / played + self.params.beta * np.sqrt(2.0 * math.log(max(t, 1)) / played)
        best, best_propensity = best_arms(np.where(available, index, -np.inf), self._last, draws[:, 1:])
        left = untried.sum(axis=1)
        arms = np.where(left > 0, first_arms, best)
        return arms, np.where(left > 0, 1.0 / np.maximum(left, 1), best_propensity)

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Count the round and add its reward."""
        rewards = self.rewards(feedback, self.params.reward)
        rows = self.rows[feedback.active]
        self._count[rows, arms[rows]] += 1.0
        self._total[rows, arms[rows]] += rewards[rows]
        self._last[rows] = arms[rows]
