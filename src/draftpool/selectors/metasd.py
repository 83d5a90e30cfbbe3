"""MetaSD: UCB over drafters on an alignment reward (arXiv 2604.05417, Algorithm 2; reference notes 1)."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from draftpool.selectors.base import Feedback, Floats, Ints, Parameters, register_selector
from draftpool.selectors.index import IndexSelector, ucb


class Alignment(Parameters):
    """`reward`: block divergence (up to the first reject, or of all slots) or block efficiency; `beta` > 0: weight of
    the bonus.
    """

    reward: Literal["bd", "be", "bd_full"] = "bd"
    beta: float = Field(default=0.25, gt=0.0, allow_inf_nan=False)


@register_selector("metasd_ucb")
class MetaSDUCB(IndexSelector):
    """MetaSD-UCB: every arm once, then the largest mean + beta * sqrt(2 ln t / n_i).

    t counts the rounds of this query so far and n_i those of arm i, so an arm's bonus is its own; statistics
    begin anew with every query. The paper leaves open and we set: beta (default 0.25), the order of the first
    N rounds (random per query) and ties (the arm just played, which saves a switch, then at random).
    """

    Params = Alignment

    def index(self, t: int) -> Floats:
        """Mean + beta * sqrt(2 ln t / n_i)."""
        return ucb(self.total, np.maximum(self.count, 1.0), math.log(max(t, 1)), self.params.beta)


@register_selector("metasd_discounted_ucb")
class DiscountedUCB(IndexSelector):
    """Discounted UCB (Garivier and Moulines 2011), MetaSD's extension for drift (reference notes M8).

    A round s ago weighs discount^s in the counts N_i and sums; index: mean + beta * sqrt(2 ln(sum_j N_j) / N_i).
    """

    class Params(Alignment):
        """As MetaSD-UCB; `discount` in (0, 1)."""

        discount: float = Field(default=0.95, gt=0.0, lt=1.0)

    def index(self, t: int) -> Floats:
        """Discounted mean + bonus of the discounted counts."""
        count = np.maximum(self.count, 1e-300)
        rounds = np.maximum(self.count.sum(axis=1, keepdims=True), 1.0)
        return ucb(self.total, count, np.log(rounds), self.params.beta)

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Fade the past of running episodes, then add the round."""
        fade = np.where(feedback.active, self.params.discount, 1.0)[:, None]
        self.count *= fade
        self.total *= fade
        super().learn(arms, feedback)


@register_selector("metasd_sliding_ucb")
class SlidingWindowUCB(IndexSelector):
    """Sliding-window UCB (Garivier and Moulines 2011), MetaSD's extension for drift (reference notes M8).

    Counts and sums cover the last `window` rounds; index: mean + beta * sqrt(2 ln min(t, window) / n_i). An arm
    that was not played within the window is tried again at once.
    """

    class Params(Alignment):
        """As MetaSD-UCB; `window`: rounds remembered."""

        window: int = Field(default=20, ge=1)

    def start(self) -> None:
        """No arm has been played."""
        super().start()
        self._arms = np.zeros((self.params.window, self.episodes), dtype=np.int64)
        self._rewards = np.zeros((self.params.window, self.episodes))

    def index(self, t: int) -> Floats:
        """Mean of the window + its bonus."""
        rounds = max(min(t, self.params.window), 1)
        return ucb(self.total, np.maximum(self.count, 1.0), math.log(rounds), self.params.beta)

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Forget the round that leaves the window, then add the new one."""
        place = self._t % self.params.window
        rows = self.rows[feedback.active]
        if self._t >= self.params.window:
            old = self._arms[place, rows]
            self.count[rows, old] -= 1.0
            # An empty window must sum to 0, which subtraction alone leaves to rounding.
            left = self.total[rows, old] - self._rewards[place, rows]
            self.total[rows, old] = np.where(self.count[rows, old] == 0.0, 0.0, left)
        self._arms[place] = arms
        self._rewards[place] = self.reward(arms, feedback)
        super().learn(arms, feedback)
