"""A geometric schedule over draft heads, as multi-head drafters of the Medusa and Hydra kind are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from draftpool.training.objectives.base import Objective, Reduction, register_objective

if TYPE_CHECKING:
    from torch import Tensor


@register_objective("head_dependent")
class HeadDependent(Objective):
    """w_k = decay^k, k = 1..K: later heads, which are harder and count less, weigh less; slot k stands for
    head k.

    The form and 0.8 are general knowledge about Medusa's training, not checked against its paper.
    """

    published_reduction: ClassVar[Reduction] = "weight_mean"
    refusal: ClassVar[str] = (
        "its schedule is that of draft heads which all read the same feature; `cross_entropy` with the same decay "
        "gives the steps of a sequential drafter the same weights up to a factor"
    )

    decay: float = Field(default=0.8, gt=0.0, le=1.0)

    def weights(self, log_q: Tensor, mask: Tensor) -> Tensor:
        """The same schedule for every anchor."""
        return log_q.new_full(log_q.shape, self.decay).cumprod(dim=-1)
