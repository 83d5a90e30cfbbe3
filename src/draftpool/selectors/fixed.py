"""Selectors that learn nothing: one drafter throughout, plain decoding, random and round-robin."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

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


class _Constant(Selector):
    """Plays one arm throughout."""

    ignores_availability: ClassVar[bool] = True
    needs: ClassVar[Literal["bandit", "full"]] = "bandit"

    def __init__(self, arms: Sequence[str], /, **parameters: Any) -> None:
        super().__init__(arms, **parameters)
        name = self.arm_name()
        if name not in self.arms:
            raise DraftpoolError(
                f"no arm is called {name!r}", self.where, f"the pool has: {', '.join(self.arms)}"
            )
        self._arm = self.arms.index(name)

    @abstractmethod
    def arm_name(self) -> str:
        """Name of the arm."""

    def start(self) -> None:
        """No state."""

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """The arm, with certainty."""
        return np.full(self.episodes, self._arm, dtype=np.int64), np.ones(self.episodes)

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Nothing to learn."""


@register_selector("fixed")
class Fixed(_Constant):
    """One drafter in every round; with the generalist, the one-size-fits-all baseline."""

    class Params(Parameters):
        """`arm`: name of the arm."""

        arm: str

    def arm_name(self) -> str:
        """The configured arm."""
        return self.params.arm


@register_selector("plain")
class Plain(_Constant):
    """Plain decoding in every round: the pool's arm of that name, which drafts nothing."""

    def arm_name(self) -> str:
        """The arm of plain decoding."""
        return "plain"


@register_selector("random")
class Random(Selector):
    """A uniformly random available arm in every round."""

    needs: ClassVar[Literal["bandit", "full"]] = "bandit"

    def start(self) -> None:
        """No state."""

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """Uniform over the available arms."""
        return sample_arms(available.astype(np.float64), draws[:, 0])

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Nothing to learn."""


@register_selector("round_robin")
class RoundRobin(Selector):
    """The arms in pool order, from the first, over and over; an unavailable arm is passed over."""

    needs: ClassVar[Literal["bandit", "full"]] = "bandit"

    def start(self) -> None:
        """Begin before the first arm."""
        self._last = np.full(self.episodes, -1, dtype=np.int64)

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """The next available arm after the last one played, with certainty."""
        ahead = (np.arange(self.n_arms) - self._last[:, None] - 1) % self.n_arms
        return np.argmin(np.where(available, ahead, self.n_arms), axis=1), np.ones(self.episodes)

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Remember the arm played."""
        self._last = np.where(feedback.active, arms, self._last)
