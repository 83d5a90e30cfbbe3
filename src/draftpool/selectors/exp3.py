"""EXP3 in the anytime form of EXP3Spec (BanditSpec, arXiv 2505.15141v2; reference notes section 5.3)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np

from draftpool.selectors.base import Bools, Feedback, Floats, Ints, Selector, register_selector, sample_arms


@register_selector("exp3")
class EXP3(Selector):
    """EXP3Spec: p_i ~ exp(-eta_t * sum of estimated losses), eta_t = sqrt(ln N / (t N)), t from 1.

    With Y = accepted + 1 and L the longest draft of the pool, the loss (L + 1 - Y) / L is 1 - accepted / L.
    It is charged to the arm played, divided by the probability with which it was played, which makes the
    estimate unbiased. Unavailable arms get probability 0 and the rest is renormalised.
    """

    needs: ClassVar[Literal["bandit", "full"]] = "bandit"

    def start(self) -> None:
        """No loss has been seen. `estimated_loss` [S, N] is the sum of the estimates."""
        self.estimated_loss = self.table()
        self._propensity = np.ones(self.episodes)

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """Sample from the exponential weights."""
        eta = math.sqrt(math.log(self.n_arms) / ((t + 1) * self.n_arms))
        loss = np.where(available, self.estimated_loss, np.inf)
        # Relative to the best available arm: its weight is 1, so the sum cannot vanish.
        weights = np.exp(-eta * (loss - loss.min(axis=1, keepdims=True)))
        arms, self._propensity = sample_arms(weights, draws[:, 0])
        return arms, self._propensity

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Add the importance-weighted loss of the arm played."""
        loss = 1.0 - feedback.accepted / max(1, int(self.k.max()))
        self.check_unit("loss 1 - accepted / L", loss, feedback.active)
        rows = self.rows[feedback.active]
        self.estimated_loss[rows, arms[rows]] += loss[rows] / self._propensity[rows]
