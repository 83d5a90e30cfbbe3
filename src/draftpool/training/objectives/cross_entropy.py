"""Cross-entropy of a sequential drafter's steps, with a geometric decay.

EAGLE-3's training code adds the losses of its unrolled steps j = 0, 1, ... with weights 0.8^j (SpecForge,
scripts/train_eagle3_online.py): that is decay 0.8. Its loss is the cross-entropy against the target's whole
distribution, whose gradient is `forward_kl`'s; this one is against the training token alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from draftpool.training.objectives.base import Objective, Reduction, register_objective

if TYPE_CHECKING:
    from torch import Tensor


class Decayed(Objective):
    """w_k = decay^(k - 1), k = 1..K; `decay` 1 lets every step count the same."""

    published_reduction: ClassVar[Reduction] = "weight_mean"

    decay: float = Field(default=1.0, gt=0.0, le=1.0)

    def weights(self, log_q: Tensor, mask: Tensor) -> Tensor:
        """The same decay for every anchor."""
        place = log_q.new_ones(log_q.shape).cumsum(dim=-1)
        return self.decay ** (place - 1.0)


@register_objective("cross_entropy")
class CrossEntropy(Decayed):
    """-log q of the training token."""

    kinds: ClassVar[frozenset[str]] = frozenset({"eagle", "independent"})
    refusal: ClassVar[str] = (
        "it weighs the steps of a sequential drafter; for the slots of a block `uniform` is the same at decay 1 and "
        "`dflash` with gamma -1 / ln(decay) below it"
    )
