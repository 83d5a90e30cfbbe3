"""BanditSpec's UCBSpec, literal, scaled and as its released code computes it (arXiv 2505.15141v2, 5.2, 5.5)."""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from draftpool.selectors.base import Bools, Feedback, Floats, Ints, Parameters, register_selector
from draftpool.selectors.index import IndexSelector

# delta of the proof.
_DELTA = 0.5
# The released experiment cycles through its arms for this many rounds before it looks at an index.
_CYCLED = 7


class _PoolOrder(IndexSelector):
    """Tries the arms in pool order and rewards accepted / K."""

    def warm_up(self, untried: Bools, draws: Floats) -> Ints:
        """The first untried arm of the pool."""
        return np.argmax(untried, axis=1)

    def reward(self, arms: Ints, feedback: Feedback) -> Floats:
        """(Y - 1) / L with Y = accepted + 1 and L the pool's longest draft."""
        return self.rewards(feedback, "be")


@register_selector("ucbspec")
class UCBSpec(_PoolOrder):
    """UCBSpec: mean + scale * radius, on the scale (Y - 1) / L, which divides the published radius by L.

    Radius: 1/2 * sqrt((1 + n) / n^2 * (1 + 2 ln(N t^2 sqrt(1 + n) / delta))), delta = 1/2, t from 1. With
    `scale: 1` (literal) it exceeds the whole range of rewards for dozens of rounds, so that play is close to
    round-robin; the paper does not say whether its experiments scale it (reference notes 5.3).
    """

    class Params(Parameters):
        """`scale` > 0: factor on the radius, 1 for the literal algorithm."""

        scale: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)

    def index(self, t: int) -> Floats:
        """Mean + scaled confidence radius."""
        n = np.maximum(self.count, 1.0)
        inside = 1.0 + 2.0 * np.log(self.n_arms * (t + 1) ** 2 * np.sqrt(1.0 + n) / _DELTA)
        return self.total / n + self.params.scale * 0.5 * np.sqrt((1.0 + n) / n**2 * inside)


@register_selector("banditspec_as_released")
class AsReleased(_PoolOrder):
    """The score of BanditSpec's published code: mean + sqrt(6 ln t / t), the same bonus for every arm.

    Kept to show what a shared bonus does: after seven rounds of cycling it is greedy. The published code chooses
    draft lengths and rewards tokens per second of the round; here arms are drafters and the reward accepted / K.
    """

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """Cycle for seven rounds, then the largest score."""
        if t >= _CYCLED:
            return super().choose(t, available, draws)
        self._t = t
        ahead = (np.arange(self.n_arms) - t) % self.n_arms
        return np.argmin(np.where(available, ahead, self.n_arms), axis=1), np.ones(self.episodes)

    def index(self, t: int) -> Floats:
        """Mean + shared bonus."""
        return self.means() + math.sqrt(6.0 * math.log(max(t, 1)) / max(t, 1))
