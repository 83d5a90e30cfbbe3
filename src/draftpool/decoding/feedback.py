"""Full information about block drafters, delivered when it is known (HedgeSpec with delayed feedback)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from draftpool.decoding.verification import acceptance_probability, proposed_probability
from draftpool.drafters.base import Draft
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
    open when the text ends are dropped. With `whole` a round waits until K tokens are there, for estimators that
    read all slots.
    """

    k_pool: int
    whole: bool = False
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
            short = self.whole and len(known) < self.k_pool
            if short or any(accepted is None for accepted in pending.accepted):
                still.append(pending)
            else:
                rounds.append(pending.round)
                losses.append([length_loss(accepted, self.k_pool) for accepted in pending.accepted])
        self.waiting = still
        if not rounds:
            return None
        return Completed(np.zeros(len(rounds), dtype=np.int64), np.array(rounds), np.array(losses))


class SlotProbabilities:
    """Acceptance probabilities of every arm's slots along the committed text, for soft estimators.

    Holds the target's logits of the last K committed positions, and the drafts of the rounds that still wait.

    Args:
        k_pool: K, the pool's longest draft.
        hard: As in :func:`draftpool.decoding.engine.decode`.
    """

    def __init__(self, k_pool: int, hard: bool = False):
        self.k_pool, self.hard = k_pool, hard
        self._logits: dict[int, Tensor] = {}
        self._drafts: dict[int, tuple[int, list[Draft | None]]] = {}

    def add(self, round_: int, start: int, drafts: list[Draft | None] | None, logits: Tensor) -> None:
        """Remember what a round committed and, if all arms were evaluated, what they drafted.

        Args:
            round_: Round number.
            start: Place in the answer of the first drafted token.
            drafts: Drafts of all arms, or None.
            logits: The target's rows of the committed tokens [committed, vocabulary].
        """
        if drafts is not None:
            self._drafts[round_] = (start, drafts)
        self._logits |= {start + row: logits[row] for row in range(len(logits))}
        oldest = min((place for place, _ in self._drafts.values()), default=start)
        self._logits = {place: row for place, row in self._logits.items() if place >= oldest}

    def slots(self, round_: int, n_slots: int) -> np.ndarray:
        """Acceptance probabilities [N, n_slots] of a round, 0 beyond an arm's draft."""
        start, drafts = self._drafts[round_]
        gamma = np.zeros((len(drafts), n_slots))
        for arm, draft in enumerate(drafts):
            if draft is None or (draft.log_q is None and not self.hard):
                continue
            for slot in range(min(n_slots, len(draft.ids))):
                row = self._logits[start + slot][None]
                if self.hard:
                    value = proposed_probability(draft.ids[slot : slot + 1], row)
                else:
                    value = acceptance_probability(draft.log_q[slot][None], draft.vocabulary, row)
                gamma[arm, slot] = float(value[0])
        return gamma

    def take(self, rounds: Sequence[int]) -> np.ndarray:
        """Acceptance probabilities [m, N, K] of completed rounds, which are forgotten."""
        found = np.stack([self.slots(int(round_), self.k_pool) for round_ in rounds])
        for round_ in rounds:
            del self._drafts[int(round_)]
        return found


def matching_prefix(draft: list[int], known: list[int]) -> int | None:
    """Length of the draft's prefix that matches the text, or None while the text is too short to tell."""
    for place, token in enumerate(draft):
        if place >= len(known):
            return None
        if token != known[place]:
            return place
    return len(draft)
