"""Oracles of a pool: the best that any choice of drafters could do in hindsight (DESIGN section 9).

Arrays are indexed by tokens left: committed[p, i, l] is what drafter i commits on answer p with l tokens left.
"""

from __future__ import annotations

import numpy as np

from draftpool.analysis.metrics import rounds_to_go
from draftpool.replay.answers import Answers
from draftpool.selectors.base import Floats, Ints


def best_switching_rounds(committed: Ints) -> Ints:
    """Fewest rounds over all sequences of drafters: [P, N, L + 1] -> [P, L + 1].

    Dynamic programming from the end: R(l) = 1 + min_i R(l - committed_i(l)), R(0) = 0.
    """
    rounds = np.zeros((committed.shape[0], committed.shape[2]), dtype=committed.dtype)
    rows = np.arange(len(committed))[:, None]
    for left in range(1, committed.shape[2]):
        rounds[:, left] = 1 + rounds[rows, left - committed[:, :, left]].min(axis=1)
    return rounds


def best_switching_cost(committed: Ints, costs: Floats, switch_cost: float = 0.0) -> Floats:
    """Lowest cost over all sequences of drafters when a round of drafter i costs ``costs[i]``, or ``costs[p, i, l]``.

    Args:
        committed: [P, N, L + 1].
        costs: Cost of a round of every drafter [N], for example modelled seconds; or with l tokens left [P, N, L + 1].
        switch_cost: Added whenever a round's drafter is not that of the round before.

    Returns:
        float64 [P, L + 1]. State (tokens left, last drafter): W(l, i) = cost_i + V(l - committed_i(l), i), V(l, p) =
        min(W(l, p), min_i W(l, i) + switch cost), V(0, .) = 0; the first round switches from nowhere, free.
    """
    answers, arms, length = committed.shape
    value = np.zeros((answers, length, arms))
    best = np.zeros((answers, length))
    rows, columns = np.arange(answers)[:, None], np.arange(arms)
    for left in range(1, length):
        now = costs if costs.ndim == 1 else costs[:, :, left]
        after = now + value[rows, left - committed[:, :, left], columns]
        best[:, left] = after.min(axis=1)
        value[:, left] = np.minimum(after, best[:, left, None] + switch_cost)
    return best


def fixed_rounds(answers: Answers) -> Ints:
    """Rounds that every arm needs alone for every answer, int[A, N]."""
    committed = answers.committed_by_left()
    rows = np.arange(len(answers.tokens)), answers.tokens
    return np.stack([rounds_to_go(committed[:, arm])[rows] for arm in range(len(answers.arms))], axis=1)


def greedy_rounds(committed: Ints) -> Ints:
    """Rounds when the drafter that commits most is taken in every round: [P, N, L + 1] -> [P, L + 1].

    A diagnostic and no bound: a longer step may end at a worse anchor, so it can lose even to one fixed drafter.
    It is also what drafting with all drafters and keeping the longest draft needs (MetaSD's baseline).
    """
    return rounds_to_go(committed.max(axis=1))
