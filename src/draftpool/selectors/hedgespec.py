"""HedgeSpec: full-information drafter selection (arXiv 2510.20064; notes 2.9: H3, H6, H7, H11)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np

from draftpool.errors import DraftpoolError
from draftpool.selectors.base import (
    Bools,
    Feedback,
    Floats,
    Ints,
    Parameters,
    Selector,
    register_selector,
    sample_arms,
)

# Regrets are sums of numbers of order 1; what is smaller than this is rounding and must not decide an arm.
_ZERO = 1e-12
# Newton's steps for NormalHedge's scale; five are enough for 1e-12 in pools of up to 1,000 arms.
_NEWTON_STEPS = 7


@register_selector("hedgespec")
class HedgeSpec(Selector):
    """HedgeSpec with NormalHedge on the length loss; an arm is sampled from the weights in every round.

    The loss of a round is 1 - (a_i + 1) / (K + 1) for every arm i, a_i being what it would have had accepted
    at that round's anchor. It arrives, possibly late, in `Feedback.completed`; a skipped round brings none.
    An arm's regret grows by <w, loss> - loss_i with w the weights *played in the loss's own round*, which are
    kept until the episode ends (8 S N bytes a round). Unavailable arms get weight 0 and the rest is
    renormalised, uniformly if all of the weight was theirs.
    """

    needs: ClassVar[Literal["bandit", "full"]] = "full"

    class Params(Parameters):
        """`learner` and `loss`: the paper's practical choice."""

        learner: Literal["normal_hedge"] = "normal_hedge"
        loss: Literal["length"] = "length"

    def start(self) -> None:
        """No loss has been seen. `regret` [S, N] is the regret to each arm so far."""
        self.regret = np.zeros((self.episodes, self.n_arms))
        self._played = np.zeros((16, self.episodes, self.n_arms))
        self._rounds = 0

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """Sample from the NormalHedge weights and keep them for the round's loss."""
        weights = np.where(available, normal_hedge_weights(self.regret), 0.0)
        total = weights.sum(axis=1, keepdims=True)
        weights = np.where(total > 0.0, weights, available)
        weights = weights / weights.sum(axis=1, keepdims=True)
        if t >= len(self._played):
            self._played = np.concatenate([self._played, np.zeros((t + 1, *weights.shape))])
        self._played[t] = weights
        self._rounds = t + 1
        return sample_arms(weights, draws[:, 0])

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Add the regrets of the losses that became known, whichever arm was played."""
        completed = feedback.completed
        if completed is None or len(completed.round) == 0:
            return
        used = feedback.active[completed.episode]
        episode, rounds, loss = completed.episode[used], completed.round[used], completed.loss[used]
        self.check_unit("full-information loss", loss, np.ones(loss.shape, dtype=np.bool_))
        if ((rounds < 0) | (rounds >= self._rounds)).any():
            raise DraftpoolError(
                f"loss of round {int(rounds.max())} after {self._rounds} rounds",
                self.where,
                "deliver losses of played rounds",
            )
        weights = self._played[rounds, episode]
        np.add.at(self.regret, episode, (weights * loss).sum(axis=1, keepdims=True) - loss)


def normal_hedge_scale(regret: Floats) -> Floats:
    """The scale c of NormalHedge (Chaudhuri, Freund, Hsu 2009): mean_i exp([R_i]_+^2 / (2c)) = e.

    Args:
        regret: float64[S, N].

    Returns:
        c > 0 as float64[S], relative error below 1e-12; NaN where no regret is positive.
    """
    positive = np.where(regret > _ZERO, regret, 0.0)
    largest = positive.max(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = largest**2 / (2.0 * _exponent(positive / largest[:, None]))
    return np.where(largest > 0.0, scale, np.nan)


def normal_hedge_weights(regret: Floats) -> Floats:
    """NormalHedge's weights w_i ~ [R_i]_+ / c * exp([R_i]_+^2 / (2c)), uniform if no regret is positive.

    Args:
        regret: float64[S, N].

    Returns:
        float64[S, N], each row sums to 1.
    """
    weights = np.full(regret.shape, 1.0 / regret.shape[1])
    rows = np.flatnonzero((regret > _ZERO).any(axis=1))
    positive = np.where(regret[rows] > _ZERO, regret[rows], 0.0)
    scaled = positive / positive.max(axis=1, keepdims=True)
    raw = scaled * np.exp(_exponent(scaled)[:, None] * scaled**2)
    weights[rows] = raw / raw.sum(axis=1, keepdims=True)
    return weights


def _exponent(scaled: Floats) -> Floats:
    # With x_i = R_i / R_max, h = R_max^2 / (2c) solves log mean_i exp(h x_i^2) = 1. The left side is convex and
    # rises, and some x_i is 1, hence exp(h) / N <= e: Newton's steps from 1 + ln N fall towards h and never pass
    # it, and nothing overflows.
    squares = scaled**2
    h = np.full(len(scaled), 1.0 + math.log(scaled.shape[1]))
    for _ in range(_NEWTON_STEPS):
        powers = np.exp(h[:, None] * squares)
        total = powers.sum(axis=1)
        slope = (powers * squares).sum(axis=1) / total
        h -= (np.log(total / scaled.shape[1]) - 1.0) / slope
    return h
