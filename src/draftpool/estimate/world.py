"""Everything that counting needs: the plan, shapes of target and drafters, assumed lengths, tokens per target call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from draftpool.estimate.drafters import TAPS, DrafterShape, drafter_shape
from draftpool.estimate.lengths import Lengths
from draftpool.estimate.shapes import Shape, target_shape

if TYPE_CHECKING:
    from draftpool.config.plan import Plan


@dataclass(frozen=True)
class World:
    """A study and what is assumed about it.

    Attributes:
        plan: The study.
        lengths: Assumed lengths of texts.
        tau: Tokens per target call by kind of drafter.
        given: Shapes that the user gave, by model.
    """

    plan: Plan
    lengths: Lengths
    tau: Mapping[str, float]
    given: Mapping[str, Path]

    @cached_property
    def shape(self) -> Shape:
        """Of the target."""
        return target_shape(self.plan.study.target, self.given)

    @cached_property
    def drafters(self) -> dict[str, DrafterShape]:
        """Shapes of all drafters by name."""
        taps = self.plan.study.target.taps
        return {
            name: drafter_shape(run, self.shape, taps, self.given) for name, run in self.plan.runs.items()
        }

    @property
    def n_taps(self) -> int:
        """Tapped layers."""
        taps = self.plan.study.target.taps
        return len(taps) if taps else TAPS

    def tau_of(self, kind: str) -> float:
        """Tokens per target call of a kind of drafter."""
        return self.tau.get(kind, self.tau["other"])
