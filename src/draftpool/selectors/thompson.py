"""Thompson sampling with Gaussian posteriors (Agrawal and Goyal 2013), named by MetaSD as an alternative."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr, ndtri

from draftpool.selectors.base import Bools, Floats, Ints, register_selector
from draftpool.selectors.index import IndexSelector
from draftpool.selectors.metasd import Alignment

# Nodes of the Gauss-Hermite rule that integrates the probability of a choice.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(48)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@register_selector("thompson")
class Thompson(IndexSelector):
    """Every arm once, then the largest draw from N(mean_i, beta^2 / n_i), one draw per arm and round.

    Rewards lie on [0, 1], where beta = 1/2 covers the worst case; MetaSD gives no value. The propensity is the
    probability that the arm's draw is the largest, by a 48-point Gauss-Hermite rule.
    """

    Params = Alignment

    def index(self, t: int) -> Floats:
        """Draws from the posteriors."""
        return self.means() + self._spread() * ndtri(self._uniforms)

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """An untried arm, else the largest draw."""
        self._uniforms = draws[:, 1:]
        arms, propensity = super().choose(t, available, draws)
        sampled = ~(available & (self.count == 0.0)).any(axis=1)
        propensity = propensity.copy()
        for rows in np.array_split(np.flatnonzero(sampled), max(1, len(arms) // 1000)):
            propensity[rows] = self._probability(rows, arms[rows], available[rows])
        return arms, propensity

    def _spread(self) -> Floats:
        return self.params.beta / np.sqrt(np.maximum(self.count, 1e-300))

    def _probability(self, rows: Ints, arms: Ints, available: Bools) -> Floats:
        """P(draw of the arm > draws of all other available arms), float[len(rows)]."""
        means, spread = self.means()[rows], self._spread()[rows]
        own = np.arange(len(rows))
        points = means[own, arms][:, None] + spread[own, arms][:, None] * _NODES
        below = ndtr((points[:, None, :] - means[..., None]) / spread[..., None])
        others = available.copy()
        others[own, arms] = False
        return np.where(others[..., None], below, 1.0).prod(axis=1) @ _WEIGHTS
