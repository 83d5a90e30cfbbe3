"""HedgeSpec's losses as published: one-step acceptance of every drafter at every committed token (arXiv 2510.20064).

Each new token is fed to every drafter, which tells how likely its next proposal is to be accepted there. The loss of a
start s is 1 - (1 + sum_m prod_{j <= m} gamma_{s+j}) / (K + 1) over the K verified prefixes from s on (Theorem 3), known
once all K tokens are committed. For sequential drafters this is their expected length; the later slots of a block say
nothing of it, so block drafters are refused.
"""

from __future__ import annotations

import numpy as np

from draftpool.replay.answers import Answers
from draftpool.selectors.base import Bools, Completed, Floats, Ints


def prefill_losses(answers: Answers, soft: bool) -> tuple[Floats, Bools]:
    """Losses of every start and whether its K tokens lie inside the turn.

    Args:
        answers: What every arm would bring at every anchor; slot 1 of an anchor is the one-step proposal there.
        soft: 1 - TV (or the scale of the pool), else whether the token was the proposed one.

    Returns:
        Losses [A * L, N] and complete [A * L].
    """
    k_pool, length = answers.k_pool, answers.length
    step = answers.gamma[:, :, 0].astype(np.float64) if soft else (answers.accepted > 0).astype(np.float64)
    step = np.where(answers.k > 0, step, 0.0)
    by_answer = step.reshape(len(answers.tokens), length, len(answers.arms))
    padded = np.pad(by_answer, ((0, 0), (0, k_pool), (0, 0)))
    survival = np.ones_like(by_answer)
    total = np.ones_like(by_answer)
    for slot in range(k_pool):
        # A drafter drafts no more than its own k.
        survival = survival * np.where(slot < answers.k, padded[:, slot : slot + length], 0.0)
        total = total + survival
    losses = 1.0 - total / (k_pool + 1)
    return losses.reshape(-1, len(answers.arms)), answers.left >= k_pool


class PrefillLosses:
    """Delivers the losses of starts whose K tokens are there.

    Args:
        answers: Of the episodes.
        which: int[E], the answer of every episode.
        soft: As in :func:`prefill_losses`.
    """

    def __init__(self, answers: Answers, which: Ints, soft: bool):
        self.answers, self.which = answers, which
        self.losses, self.complete = prefill_losses(answers, soft)
        self.round_of = np.zeros((len(which), answers.length), dtype=np.int64)
        self.delivered = np.zeros(len(which), dtype=np.int64)

    def deliver(self, t: int, before: Ints, after: Ints) -> Completed | None:
        """Losses that round t made known, oldest start first.

        Args:
            t: Round.
            before: int[E], tokens committed before it.
            after: int[E], and behind it.
        """
        places = np.arange(self.answers.length)
        fresh = (places >= before[:, None]) & (places < after[:, None])
        self.round_of[fresh] = t
        last = after - self.answers.k_pool
        told = (places >= self.delivered[:, None]) & (places <= last[:, None])
        self.delivered = np.maximum(self.delivered, last + 1)
        cells = self.which[:, None] * self.answers.length + places
        told &= self.complete[cells]
        place, episode = np.nonzero(told.T)
        if not len(place):
            return None
        return Completed(episode, self.round_of[episode, place], self.losses[cells[episode, place]])
