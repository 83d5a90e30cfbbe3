"""Fixed weights of the DFlash paper (arXiv 2602.06036v2, section on training; reference notes 4.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from draftpool.training.objectives.base import Objective, Reduction, register_objective

if TYPE_CHECKING:
    from torch import Tensor

_PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@register_objective("dflash")
class DFlash(Objective):
    """DFlash: w_k = exp(-(k - 1) / gamma), k = 1..K.

    `gamma` null is the paper's value: 7, 5, 4 at blocks of 16, 10, 8; half the block otherwise (ours).
    """

    published_reduction: ClassVar[Reduction] = "weight_mean"
    refusal: ClassVar[str] = (
        "its decay is published for the slots of a block; `cross_entropy` with decay exp(-1 / gamma) gives "
        "the steps of a sequential drafter the same weights"
    )

    gamma: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)

    def weights(self, log_q: Tensor, mask: Tensor) -> Tensor:
        """The same decay for every anchor."""
        gamma = (
            self.gamma
            if self.gamma is not None
            else _PUBLISHED_GAMMA.get(self.block_size, self.block_size / 2)
        )
        place = log_q.new_ones(log_q.shape).cumsum(dim=-1)
        return (-(place - 1.0) / gamma).exp()


@register_objective("uniform")
class Uniform(Objective):
    """Every slot counts the same: w_k = 1 (plain cross-entropy)."""

    kinds: ClassVar[frozenset[str]] = frozenset({"block", "eagle", "independent"})
    published_reduction: ClassVar[Reduction] = "weight_mean"

    def weights(self, log_q: Tensor, mask: Tensor) -> Tensor:
        """Ones."""
        return log_q.new_ones(log_q.shape)
