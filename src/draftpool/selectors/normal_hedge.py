"""NormalHedge's weights (Chaudhuri, Freund and Hsu 2009): a Hedge without a learning rate."""

from __future__ import annotations

import math

import numpy as np

from draftpool.selectors.base import Floats

# Regrets are sums of numbers of order 1; what is smaller than this is rounding and must not decide an arm.
_ZERO = 1e-12
# Newton's steps for the scale; from the start below, five are enough for 1e-12 in pools of up to 1,000 arms.
_NEWTON_STEPS = 5


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
    positive = np.where(regret > _ZERO, regret, 0.0)
    largest = positive.max(axis=1, keepdims=True)
    rows = np.flatnonzero(largest > 0.0)
    if len(rows) == len(regret):
        return _weights(positive / largest)
    weights = np.full(regret.shape, 1.0 / regret.shape[1])
    weights[rows] = _weights(positive[rows] / largest[rows])
    return weights


def _weights(scaled: Floats) -> Floats:
    raw = scaled * np.exp(_exponent(scaled)[:, None] * scaled * scaled)
    return raw / raw.sum(axis=1, keepdims=True)


def _exponent(scaled: Floats) -> Floats:
    # With x_i = R_i / R_max, h = R_max^2 / (2c) solves log mean_i exp(h x_i^2) = 1. The left side is convex and
    # rises, so Newton's steps fall towards h from any larger number and never pass it, and nothing overflows. Larger
    # are ln(e N - N + 1), since some x_i is 1 and no exponential below 1, and by Jensen 1 / mean_i x_i^2.
    squares, n_arms = scaled * scaled, scaled.shape[1]
    ones = np.ones(n_arms)
    h = np.minimum(math.log((math.e - 1.0) * n_arms + 1.0), n_arms / (squares @ ones))
    for _ in range(_NEWTON_STEPS):
        powers = np.exp(h[:, None] * squares)
        # Products with ones add the arms up faster than sums over rows do.
        total = powers @ ones
        slope = (powers * squares) @ ones / total
        h = h - (np.log(total / n_arms) - 1.0) / slope
    return h
