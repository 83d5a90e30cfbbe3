"""Sequential halving (Karnin, Koren and Somekh 2013), MetaSD's variant with few switches (its Algorithm 4)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from draftpool.selectors.base import Bools, Feedback, Floats, Ints, Parameters, Selector, register_selector


@register_selector("sequential_halving")
class SequentialHalving(Selector):
    """Phases of equal length; after each one the better half of the arms goes on, by mean reward in that phase.

    A phase plays every surviving arm max(1, floor(budget / (survivors * ceil(log2 N)))) times in a row, in an
    order that is random per query; the last survivor plays on. MetaSD's budget is not known to us: an answer's
    number of rounds is random, so `budget` is a parameter.
    """

    needs: ClassVar[Literal["bandit", "full"]] = "bandit"

    class Params(Parameters):
        """`reward`: `bd` or `be`; `budget`: rounds of all phases together."""

        reward: Literal["bd", "be"] = "bd"
        budget: int = Field(default=24, ge=1)

    def start(self) -> None:
        """All arms survive."""
        self.survivors = np.ones((self.episodes, self.n_arms), dtype=np.bool_)
        self._count = np.zeros((self.episodes, self.n_arms))
        self._total = np.zeros((self.episodes, self.n_arms))
        self._last = np.full(self.episodes, -1, dtype=np.int64)
        self._phases = max(1, math.ceil(math.log2(self.n_arms)))

    def _quota(self) -> Floats:
        survivors = self.survivors.sum(axis=1, keepdims=True)
        return np.maximum(1.0, self.params.budget // (survivors * self._phases))

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """The arm just played while its turn lasts, else the next survivor."""
        if t == 0:
            self._order = draws[:, 1:].copy()
        open_ = available & self.survivors
        # An unavailable survivor waits; if none is available, any arm will do.
        open_ = np.where(open_.any(axis=1, keepdims=True), open_, available)
        due = open_ & (self._count < self._quota())
        due = np.where(due.any(axis=1, keepdims=True), due, open_)
        stay = (self._last >= 0) & due[self.rows, self._last]
        fresh = due & (self._count == 0.0)
        # The order is hidden until the first phase has shown it.
        hidden = fresh.sum(axis=1) * (self.survivors.all(axis=1) & ~stay)
        propensity = 1.0 / np.maximum(hidden, 1)
        ranked = np.where(fresh.any(axis=1, keepdims=True), fresh, due)
        following = np.argmin(np.where(ranked, self._order, np.inf), axis=1)
        return np.where(stay, self._last, following), propensity

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Add the round; halve where every survivor has had its turn."""
        rewards = self.rewards(feedback, self.params.reward)
        rows = self.rows[feedback.active]
        self._count[rows, arms[rows]] += 1.0
        self._total[rows, arms[rows]] += rewards[rows]
        self._last[rows] = arms[rows]
        over = (~self.survivors | (self._count >= self._quota())).all(axis=1) & feedback.active
        over &= self.survivors.sum(axis=1) > 1
        if over.any():
            mean = np.where(self.survivors, self._total / np.maximum(self._count, 1.0), -np.inf)[over]
            ranks = np.argsort(np.lexsort((self._order[over], -mean), axis=-1), axis=-1)
            kept = (self.survivors[over].sum(axis=1, keepdims=True) + 1) // 2
            self.survivors[over] = ranks < kept
            self._count[over] = 0.0
            self._total[over] = 0.0
