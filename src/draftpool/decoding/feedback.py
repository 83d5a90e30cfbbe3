"""Full-information losses of block drafters, delivered when they are known (HedgeSpec with delayed feedback)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftpool.selectors.base import Completed


def length_loss(accepted: int, k_pool: int) -> float:
    """1 - (a + 1) / (K + 1), on [0, 1] (HedgeSpec's EAL loss with 0/1 acceptance; papers.md H2, H6)."""
    return 1.0 - (accepted + 1) / (k_pool + 1)


@dataclass
class _Pending:
    round: int
    start: int
    drafts: list[list[int]]
    accepted: list[int | None]


@dataclass
class PendingLosses:
    """Evaluated rounds of one text whose losses are not all known yet.

    A drafter's loss at an anchor is known once its draft met a mismatch with the committed text or all its tokens
    are there. A round is delivered when all its drafters' losses are known, in order of completion; rounds still
    open when the text ends are dropped.
    """

    k_pool: int
    waiting: list[_Pending] = field(default_factory=list)

    def add(self, round_: int, start: int, drafts: Sequence[list[int]]) -> None:
        """Remember what every drafter proposed in a round.

        Args:
            round_: Round number.
            start: Index in the answer of the first drafted token.
            drafts: Proposed ids of every arm.
        """
        self.waiting.append(_Pending(round_, start, list(drafts), [None] * len(drafts)))

    def deliver(self, answer: list[int]) -> Completed | None:
        """Return the rounds whose losses the committed answer makes known, oldest first; None if there are none."""
        rounds, losses, still = [], [], []
        for pending in self.waiting:
            known = answer[pending.start :]
            for arm, draft in enumerate(pending.drafts):
                if pending.accepted[arm] is None:
                    pending.accepted[arm] = matching_prefix(draft, known)
            if any(accepted is None for accepted in pending.accepted):
                still.append(pending)
            else:
                rounds.append(pending.round)
                losses.append([length_loss(accepted, self.k_pool) for accepted in pending.accepted])
        self.waiting = still
        if not rounds:
            return None
        return Completed(np.zeros(len(rounds), dtype=np.int64), np.array(rounds), np.array(losses))


def matching_prefix(draft: list[int], known: list[int]) -> int | None:
    """Length of the draft's prefix that matches the text, or None while the text is too short to tell."""
    for place, token in enumerate(draft):
        if place >= len(known):
            return None
        if token != known[place]:
            return place
    return len(draft)
