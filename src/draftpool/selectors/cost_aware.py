"""Cost-aware learners (ours): the same rules on tokens per second, from modelled costs and never from the clock."""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from draftpool.errors import DraftpoolError
from draftpool.selectors.base import (
    Completed,
    Feedback,
    Floats,
    Ints,
    Parameters,
    Selector,
    register_selector,
)
from draftpool.selectors.hedgespec import HedgeParams, HedgeSpec
from draftpool.selectors.index import IndexSelector, ucb


def speeds(selector: Selector) -> Floats:
    """Factor [N] that turns committed tokens of a round into a reward on [0, 1].

    Tokens per second committed / cost_i, divided by the most that any arm can reach, (k_i + 1) / cost_i.

    Raises:
        DraftpoolError: If the context has no usable costs.
    """
    costs = selector.context.costs
    if costs is None or np.shape(costs) != (selector.n_arms,) or not (np.asarray(costs) > 0.0).all():
        raise DraftpoolError(
            f"costs of a round are {costs}", selector.where, "give one positive cost per arm (profile_costs)"
        )
    return 1.0 / (costs * ((selector.k + 1) / costs).max())


@register_selector("cost_ucb")
class CostUCB(IndexSelector):
    """UCB on tokens per second: mean committed tokens over the cost of the arm's round, plus MetaSD's bonus."""

    plays_plain = True

    class Params(Parameters):
        """`beta` > 0: weight of the bonus."""

        beta: float = Field(default=0.25, gt=0.0, allow_inf_nan=False)

    def start(self) -> None:
        """No arm has been played."""
        super().start()
        self._speeds = speeds(self)

    def reward(self, arms: Ints, feedback: Feedback) -> Floats:
        """(accepted + 1) tokens at the arm's cost, untrimmed, so that the end of a text punishes nobody."""
        # The fastest arm's longest draft makes 1, but for rounding.
        values = np.minimum((feedback.accepted + 1) * self._speeds[arms], 1.0)
        self.check_unit("tokens per second", values, feedback.active)
        return values

    def index(self, t: int) -> Floats:
        """Mean + beta * sqrt(2 ln t / n_i)."""
        return ucb(self.total, np.maximum(self.count, 1.0), math.log(max(t, 1)), self.params.beta)


@register_selector("cost_hedge")
class CostHedge(HedgeSpec):
    """HedgeSpec whose loss is 1 - (a_i + 1) tokens at arm i's cost, on the same scale as `cost_ucb`."""

    plays_plain = True

    class Params(HedgeParams):
        """As HedgeSpec's; `loss` is `length` and `estimator` `indicator`."""

    def start(self) -> None:
        """No loss has been seen."""
        if self.params.loss != "length" or self.params.estimator != "indicator":
            raise DraftpoolError(
                "only lengths have a cost", self.where, "use loss: length and estimator: indicator"
            )
        super().start()
        self._speeds = speeds(self)

    def _length_loss(self, completed: Completed) -> Floats:
        longest = max(1, int(self.k.max()))
        committed = (1.0 - completed.loss) * (longest + 1)
        return np.clip(1.0 - committed * self._speeds, 0.0, 1.0)
