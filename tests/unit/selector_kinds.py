"""One configuration of every kind of selector and of every choice within a kind, for tests that hold for all."""

from __future__ import annotations

import numpy as np

from draftpool.selectors.base import Context

BANDITS = [
    {"kind": "random"},
    {"kind": "round_robin"},
    {"kind": "metasd_ucb", "reward": "bd", "beta": 0.25},
    {"kind": "metasd_ucb", "reward": "be", "beta": 1.0},
    {"kind": "metasd_discounted_ucb", "discount": 0.9},
    {"kind": "metasd_sliding_ucb", "window": 5, "reward": "be"},
    {"kind": "sequential_halving", "budget": 8},
    {"kind": "thompson", "reward": "be"},
    {"kind": "exp3"},
    {"kind": "ucbspec"},
    {"kind": "ucbspec", "scale": 0.1},
    {"kind": "banditspec_as_released"},
    {"kind": "metasd_ucb", "reward": "bd_full"},
    {"kind": "cost_ucb"},
    {"kind": "router"},
]
FULL = [
    {"kind": "hedgespec"},
    {"kind": "hedgespec", "learner": "hedge"},
    {"kind": "hedgespec", "loss": "token"},
    {"kind": "hedgespec", "loss": "hybrid"},
    {"kind": "hedgespec", "estimator": "soft"},
    {"kind": "hedgespec", "loss": "token", "estimator": "soft"},
    {"kind": "hedgespec", "loss": "hybrid", "estimator": "soft"},
    {"kind": "hedgespec", "evaluate": "every", "every": 3},
    {"kind": "hedgespec", "evaluate": "skip"},
    {"kind": "hedgespec", "carry": True},
    {"kind": "hedgespec", "learner": "hedge", "share": 0.05},
    {"kind": "cost_hedge"},
]
KINDS = [*BANDITS, *FULL]


def label(cfg: dict) -> str:
    """Readable test id."""
    return "-".join(str(value) for value in cfg.values())


def context_of(n_arms: int, episodes: int) -> Context:
    """Costs that rise with the arm, and every prompt routed to the last arm."""
    routes = np.full(episodes, n_arms - 1)
    return Context(np.linspace(1.0, 1.5, n_arms), {"tfidf": routes, "hidden": routes})
